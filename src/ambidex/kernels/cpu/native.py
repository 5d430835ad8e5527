"""The door to the compiled module `ambidex._native`: hands tensors over as arrays, without a copy."""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ambidex.core.errors import ConfigError, NativeModuleError, ShapeError
from ambidex.kernels.cpu import memory
from ambidex.kernels.shapes import check_shapes

# A machine without the module still imports this file and uses the reference ops: only use is an error.
try:
    from ambidex import _native
except ImportError as error:
    _import_error: ImportError | None = error
else:
    _import_error = None

NUMBER_NAMES: Final[Mapping[torch.dtype, str]] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "int8",
    torch.uint8: "int4",
}
"""Dtypes of a tiled pool; int8 and int4, bytes of two numbers, go with scales."""


def isa() -> str:
    """The instruction set that native ops use: the fastest of `available_isas()`, or of those up to `AMBIDEX_MAX_ISA`.

    Raises:
        NativeModuleError: the compiled module is missing or does not load.
        ConfigError: that variable names no instruction set.
    """
    check_loaded()
    try:
        return _native.isa()
    except ValueError as error:
        wrong = str(error).partition(" [")[0]  # what follows is the check in the source
        raise ConfigError(f"{wrong}: correct or unset it") from None


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this machine runs, slowest first: of `generic`, `avx2`, `avx512`, `avx512bf16`, `amx`.

    Raises:
        NativeModuleError: the compiled module is missing or does not load.
    """
    check_loaded()
    return tuple(_native.available_isas())


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, isa: str | None = None
) -> tuple[Tensor, Tensor]:
    """Join partial attentions over disjoint sets of keys.

    Args:
        out_a, out_b: [T, Hq, D] fp32 in CPU memory, contiguous; not read in rows whose lse is −inf.
        lse_a, lse_b: [T, Hq] likewise, natural log, −inf where no key was seen.
        isa: one of `available_isas()`, for tests; None for the fastest.
    Returns:
        `out` [T, Hq, D] and `lse` [T, Hq] over the union of keys; 0 and −inf where neither side saw one.
    Raises:
        NativeModuleError: the compiled module is missing or does not load.
        ShapeError: shapes differ, or a tensor is not fp32, not contiguous or not in CPU memory.
        ValueError: this machine does not run `isa`.
    Cost: moves 3 * T * Hq * D floats in the calling thread, with the GIL released.
    """
    check_loaded()
    check_shapes(out_a=(out_a, "T Hq D"), lse_a=(lse_a, "T Hq"), out_b=(out_b, "T Hq D"), lse_b=(lse_b, "T Hq"))
    _check_layout(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    out, lse = memory.new_fp32(out_a.shape), memory.new_fp32(lse_a.shape)
    rows = (lse.size, out_a.shape[2])  # [R, D]
    _native.merge_states(
        out_a.numpy().reshape(rows),
        lse_a.numpy().reshape(-1),
        out_b.numpy().reshape(rows),
        lse_b.numpy().reshape(-1),
        out.reshape(rows),
        lse.reshape(-1),
        isa=isa,
    )
    return torch.from_numpy(out), torch.from_numpy(lse)


def padded_dim(head_dim: int) -> int:
    """Numbers a row takes in a tiled pool: head_dim, padded with zeros to a multiple of 32."""
    return -(-head_dim // 32) * 32


Array64 = npt.NDArray[np.int64]


class KeyBatch:
    """Which keys of a tiled pool each request of a step sees; built once for all layers with one window.

    Args (int64 in CPU memory, all but the last):
        block_ids: [n], the blocks of all requests one after the other, each request's in ascending position.
        block_offsets: [R + 1], request r has block_ids[block_offsets[r] : block_offsets[r + 1]].
        first_key, num_keys: [R], visible are rows first_key … first_key + num_keys − 1 of the request's blocks, side
            by side; num_keys may be 0.
        row_offsets: [R + 1], request r has the queries row_offsets[r] … row_offsets[r + 1] − 1; each sees all its keys.
        block_size: tokens of a block.
    Raises:
        NativeModuleError: the compiled module is missing or does not load.
        ShapeError: the numbers do not fit each other.
    Cost: copies and checks everything, about 1 µs a thousand blocks.
    """

    def __init__(
        self,
        block_ids: Tensor,
        block_offsets: Tensor,
        first_key: Tensor,
        num_keys: Tensor,
        row_offsets: Tensor,
        *,
        block_size: int,
    ) -> None:
        check_loaded()
        arrays = [t.numpy() for t in (block_ids, block_offsets, first_key, num_keys, row_offsets)]
        try:
            self.native = _native.KeyBatch(*arrays, block_size=block_size)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"key batch: {error}") from error
        self.num_rows = int(row_offsets[-1])

    def set_positions(self, of_blocks: Tensor, of_rows: Tensor) -> None:
        """Say where keys and queries stand in their contexts, for attention with slopes.

        Args:
            of_blocks: [n] int64, the position of the first token of each of `block_ids`.
            of_rows: [T] int64, of each query.
        Raises:
            ShapeError: they do not fit the batch.
        """
        try:
            self.native.set_positions(of_blocks.numpy(), of_rows.numpy())
        except (TypeError, ValueError) as error:
            raise ShapeError(f"key batch: {error}") from error

    def assign(
        self, block_ids: Array64, block_offsets: Array64, first_key: Array64, num_keys: Array64, row_offsets: Array64
    ) -> None:
        """Name other keys, of blocks of the same size: a recorded step sees them in its next run.

        Args: as those of the class, as arrays.
        Raises:
            ShapeError: the numbers do not fit each other; the batch is empty then.
        """
        try:
            self.native.assign(block_ids, block_offsets, first_key, num_keys, row_offsets)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"key batch: {error}") from error
        self.num_rows = int(row_offsets[-1])


class ThreadPool:
    """Pinned threads that native ops share: one pool for a process, handed to everything that computes on its cores.

    Args:
        num_threads: threads that a call uses, the caller's included. The others are pinned, each to a processor of its
            own out of those this process may use; `num_pin_failures` says where that could not be.
        spin_us: how long a thread looks for new work before it sleeps; waking it costs 10 to 50 µs.
    Raises:
        NativeModuleError: the compiled module is missing or does not load.
        ValueError: no threads are asked for.
    """

    def __init__(self, num_threads: int, *, spin_us: int = 50) -> None:
        check_loaded()
        self.native = _native.ThreadPool(num_threads=num_threads, spin_us=spin_us)

    @property
    def num_threads(self) -> int:
        """Threads that a call uses, the caller's included."""
        return self.native.num_threads

    @property
    def num_pin_failures(self) -> int:
        """Threads that have no processor of their own, since there are too few or the system refused: they run, but may
        be moved and share one."""
        return self.native.num_pin_failures

    def read(self, buffer: Tensor) -> int:
        """Read a contiguous uint8 tensor with all threads: the measure of every op that reads memory.

        Returns:
            A sum that depends on every byte.
        """
        return self.native.read(buffer.numpy())


class AttentionPool:
    """Attention over tiled pools (docs/kv_layout.md, "Tile order"), and the scratch memory that it keeps.

    A tiled pool is K or V of one layer: [Hkv, N, P, padded_dim] in CPU memory, contiguous, N blocks of P tokens (a
    multiple of 16), the numbers of a block in tile order. Rows that were never stored may hold anything.

    Args:
        threads: who computes; calls with the same threads run one after the other.
    """

    def __init__(self, threads: ThreadPool) -> None:
        self.threads = threads
        self.native = _native.AttentionPool(threads.native)

    def attend_blocks(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        batch: KeyBatch,
        *,
        scale: float,
        k_scales: Tensor | None = None,
        v_scales: Tensor | None = None,
        slopes: Tensor | None = None,
        isa: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Partial attention of a ragged batch over blocks of one layer, where they lie.

        Query head h reads KV head h // (Hq / Hkv). Each visible K and V row is read once for all query heads of its
        group and all queries of its request.

        Args:
            q: [T, Hq, D] fp32, bf16 or fp16 in CPU memory, contiguous; T is the batch's. bf16 dot products round fp32.
            k_pool, v_pool: tiled, of one dtype out of `NUMBER_NAMES`, or of one of int8 and int4 each.
            scale: factor of q·k, positive.
            k_scales, v_scales: with integers only: row = scale · integers, [Hkv, N, P] fp32 of int8, [Hkv, N, W, P] of
                int4 (`kernels/reference/int4.py`).
            slopes: [Hq] fp32 (ALiBi, arXiv:2108.12409): a score is less by slope · (position of q − position of k); the
                batch has positions then.
            isa: one of `available_isas()`, for tests; None for the fastest.
        Returns:
            `out` [T, Hq, D] fp32 and `lse` [T, Hq] fp32, natural log; 0 and −inf where a request sees no key.
        Raises:
            ShapeError: tensors do not fit each other or the batch.
        Cost: reads the visible K and V rows once with all threads, the GIL released. Calls do not overlap.
        """
        out, lse = memory.new_fp32(q.shape), memory.new_fp32(q.shape[:2])
        memory.keep(batch.native)
        try:
            self.native.attend_blocks(
                array_of(q),
                number_of(q),
                array_of(k_pool),
                array_of(v_pool),
                number_of(k_pool),
                number_of(v_pool),
                None if k_scales is None else array_of(k_scales),
                None if v_scales is None else array_of(v_scales),
                batch.native,
                scale,
                out,
                lse,
                slopes=None if slopes is None else slopes.numpy(),
                isa=isa,
            )
        except (TypeError, ValueError) as error:
            raise ShapeError(f"attend_blocks: {error}") from error
        return torch.from_numpy(out), torch.from_numpy(lse)

    def store_rows(self, part: Literal["k", "v"], pool: Tensor, slots: Tensor, rows: Tensor) -> None:
        """Write K or V of new tokens into one layer of a tiled pool, in place.

        Args:
            pool: tiled; slots: [T] int64, block_id · P + offset, no two alike.
            rows: [T, Hkv, D] in the pool's dtype; of int4 packed rows [T, Hkv, R].
        Raises:
            ShapeError: tensors do not fit each other.
        Cost: about a cache miss a K number pair; whole blocks are cheaper by `pack_blocks`.
        """
        self._copy("store_rows", part, pool, slots.numpy(), rows)

    def store_values(
        self,
        part: Literal["k", "v"],
        pool: Tensor,
        slots: Tensor,
        rows: Tensor,
        *,
        scales: Tensor | None = None,
        isa: str | None = None,
    ) -> None:
        """Write K or V of new tokens into one layer of a tiled pool, in place, rounded to its numbers.

        Args:
            pool: tiled; slots: [T] int64, block_id · P + offset, no two alike; a negative one: stored nowhere.
            rows: [T, Hkv, D] fp32.
            scales: of the layer, with integers only: those of each row are written there.
        Raises:
            ShapeError: tensors do not fit each other.
        Cost: in the calling thread: for the rows of a decode step.
        """
        try:
            self.native.store_values(
                part,
                array_of(pool),
                number_of(pool),
                None if scales is None else scales.numpy(),
                slots.numpy(),
                rows.numpy(),
                isa=isa,
            )
        except (TypeError, ValueError) as error:
            raise ShapeError(f"store_values: {error}") from error

    def pack_blocks(self, part: Literal["k", "v"], pool: Tensor, block_ids: Tensor, rows: Tensor) -> None:
        """Fill whole blocks of one layer of a tiled pool.

        Args:
            pool: tiled; block_ids: [n] int64; rows: [Hkv, n · P, D] in the pool's dtype, of int4 packed ones.
        Raises:
            ShapeError: tensors do not fit each other.
        """
        self._copy("pack_blocks", part, pool, block_ids.numpy(), rows)

    def gather_rows(
        self,
        part: Literal["k", "v"],
        pool: Tensor,
        block_ids: Tensor,
        *,
        first_key: int,
        num_keys: int,
        head_dim: int,
    ) -> Tensor:
        """Rows first_key … first_key + num_keys − 1 of blocks of one layer, side by side.

        Args:
            pool: tiled; block_ids: [n] int64; head_dim: numbers of a row, of int4 bytes of a packed one.
        Returns:
            [Hkv, num_keys, head_dim] in the pool's dtype.
        Raises:
            ShapeError: the rows do not lie in the blocks, or the blocks not in the pool.
        Cost: copies the rows.
        """
        num_there = len(block_ids) * pool.shape[2]
        if not 0 <= first_key <= first_key + num_keys <= num_there:
            raise ShapeError(
                f"gather_rows: {num_keys} rows from {first_key} on do not lie in {len(block_ids)} blocks of "
                f"{pool.shape[2]}"
            )
        rows = torch.empty((pool.shape[0], num_keys, head_dim), dtype=pool.dtype)
        self.copy_rows(part, pool, block_ids, torch.arange(len(block_ids)) * pool.shape[2] - first_key, rows)
        return rows

    def copy_rows(self, part: Literal["k", "v"], pool: Tensor, block_ids: Tensor, places: Tensor, rows: Tensor) -> None:
        """Copy the rows of blocks of one layer to where they are wanted.

        Args:
            pool: tiled; block_ids: [n] int64.
            places: [n] int64, where among the rows of a head the first one of each block goes, the others behind it;
                what would come to lie before the first row or behind the last is left out.
            rows: [Hkv, m, head_dim] in the pool's dtype, those of each head side by side; others stay as they are.
        Raises:
            ShapeError: the blocks do not lie in the pool, or the tensors do not fit each other.
        Cost: reads and writes the rows once, with all threads; the GIL is released.
        """
        if pool.dtype != rows.dtype:
            raise ShapeError(f"copy_rows: rows are {rows.dtype}, the pool is {pool.dtype}")
        if rows.device.type != "cpu":
            raise ShapeError(f"copy_rows: expected rows on cpu, got them on {rows.device}")
        array = (rows.view(torch.int16) if rows.itemsize == 2 else rows).detach().numpy()
        try:
            self.native.copy_rows(part, array_of(pool), block_ids.numpy(), places.numpy(), array)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"copy_rows: {error}") from error

    def _copy(self, op: str, part: str, pool: Tensor, places: npt.NDArray[np.int64], rows: Tensor) -> None:
        if pool.dtype != rows.dtype:
            raise ShapeError(f"{op}: rows are {rows.dtype}, the pool is {pool.dtype}")
        try:
            getattr(self.native, op)(part, array_of(pool), places, array_of(rows))
        except (TypeError, ValueError) as error:
            raise ShapeError(f"{op}: {error}") from error


WORD_STRIDE: Final = 16
"""int32 numbers of a cache line, of which an `AttentionScript`'s word is the first."""


class AttentionScript:
    """The CPU lane of a step that the accelerator runs on its own: layer after layer it waits for the queries, attends
    and says that the answer is there.

    Args:
        pool: who attends.
        asked, answered, streamed: [L, 16] int32 in CPU memory, a word for each layer at [layer, 0]: 0 until the
            accelerator has written the queries, the CPU its answer, or the accelerator has ended its own part of the
            layer's attention; 1 from then on. Who starts a step sets them to 0.
    Raises:
        NativeModuleError: the compiled module is missing or does not load.
        ShapeError: the words have another shape.
    """

    def __init__(self, pool: AttentionPool, asked: Tensor, answered: Tensor, streamed: Tensor) -> None:
        try:
            words = (asked.numpy(), answered.numpy(), streamed.numpy())
            self._native = _native.AttentionScript(pool.native, *words)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"attention script: {error}") from error
        self._kept: list[tuple[Tensor, ...]] = [(asked, answered, streamed)]
        self._kept_owners: list[tuple[object, ...]] = []

    def add_layer(
        self,
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        *,
        scale: float,
        k_scales: Tensor | None,
        v_scales: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Describe the next layer; see `AttentionPool.attend_blocks`. `out` and `lse` are written where they lie."""
        try:
            self._native.add_layer(
                array_of(q),
                number_of(q),
                array_of(k_pool),
                array_of(v_pool),
                number_of(k_pool),
                number_of(v_pool),
                None if k_scales is None else array_of(k_scales),
                None if v_scales is None else array_of(v_scales),
                scale,
                out.numpy(),
                lse.numpy(),
            )
        except (TypeError, ValueError) as error:
            raise ShapeError(f"attention script: {error}") from error
        self._kept.append((q, k_pool, v_pool, out, lse))

    def bound_layer(self, pool: "_native.BoundedPool", arrays: "_native.BoundedArrays", *owners: object) -> None:
        """Let bounded attention over other keys follow upon the layer added last, joined with its answer.

        Args:
            arrays: `near` is the layer's `out` and `lse`; `other_lse` counts once the layer's word in `streamed` is 1.
            owners: of the memory that they name.
        Raises:
            ShapeError: they are another layer's.
        """
        try:
            self._native.bound_layer(pool, arrays)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"attention script: {error}") from error
        self._kept_owners.append((arrays, *owners))

    @property
    def busy_s(self) -> float:
        """Seconds that the last run attended for, its waits left out."""
        return self._native.busy_s

    def run(self, batches: Sequence[KeyBatch], *, limit_s: float, scanned: Sequence[KeyBatch] = ()) -> tuple[int, int]:
        """Answer a step.

        Args:
            batches: the keys of each layer.
            scanned: those that bounded attention reads, if layers are bounded.
            limit_s: how long to wait for the queries of a layer.
        Returns:
            How many layers were answered, fewer than all if the queries of one did not come in time; and in how many
            the answer came after the accelerator's own part had ended.
        Raises:
            ShapeError: a batch does not fit its layer.
        Cost: lasts as long as the step, the GIL released.
        """
        try:
            return self._native.run([batch.native for batch in batches], limit_s, [batch.native for batch in scanned])
        except (TypeError, ValueError) as error:
            raise ShapeError(f"attention script: {error}") from error


def number_of(tensor: Tensor) -> str:
    """The native name of a tensor's dtype.

    Raises:
        ShapeError: native attention has no form for it.
    """
    name = NUMBER_NAMES.get(tensor.dtype)
    if name is None:
        raise ShapeError(f"expected one of {', '.join(map(str, NUMBER_NAMES))}, got {tensor.dtype}")
    return name


def array_of(tensor: Tensor) -> npt.NDArray[np.generic]:
    """The tensor's memory as an array; 16-bit floats as integers, since numpy has no bf16."""
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ShapeError(f"expected a contiguous tensor on cpu, got strides {tensor.stride()} on {tensor.device}")
    array: npt.NDArray[np.generic] = (tensor.view(torch.int16) if tensor.itemsize == 2 else tensor).detach().numpy()
    return array


def check_loaded() -> None:
    """Raise NativeModuleError unless the compiled module is there."""
    if _import_error is not None:
        raise NativeModuleError(
            f"the compiled module ambidex._native cannot be loaded ({_import_error}): build it with `make setup` "
            f"in the source tree, or `pip install .` (needs a C++17 compiler such as g++ 12)"
        ) from _import_error


def _check_layout(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
            layout = "contiguous" if tensor.is_contiguous() else f"strides {tensor.stride()}"
            raise ShapeError(
                f"{name}: expected contiguous torch.float32 on cpu, got {tensor.dtype} on {tensor.device}, {layout}"
            )

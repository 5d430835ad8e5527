"""The KV bytes of one tier. Which block belongs to whom is the control plane's business (`kv/`).

`KVPool` is what copies and attention know of a pool; `RowKVPool` keeps rows as they are, `TiledKVPool`
(`storage/tiled_pool.py`) keeps them in the order that the native CPU kernels read.
"""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.core.errors import ShapeError, TierFullError
from ambidex.core.ids import KVPart, Tier
from ambidex.core.kv_spec import KVSpec
from ambidex.core.units import format_size
from ambidex.kernels import api
from ambidex.kernels.cuda.copy2d import RunCopies
from ambidex.storage.host_memory import HOST_MEMORY, HostMemory
from ambidex.storage.row_format import TORCH_DTYPES
from ambidex.storage.slow_tier import SlowTier


class KVPool(ABC):
    """K and V of `num_blocks` blocks on one tier, in the layout of `docs/kv_layout.md`.

    Memory is neither zeroed nor touched: a row holds anything until it is stored.

    Args:
        spec: layers, heads, head_dim, dtypes, block size and order of the numbers.
        num_blocks: may be 0.
        device: where the tensors lie; the host for DRAM.
        pinned: ask for pinned host memory; `is_pinned` and `pin_refusals` (a reason for each tensor) say what came of
            it. Host memory is asked for in huge pages; `page_refusal` says why the system gives none.
        memory: who is asked.
        parts: K and V where they were allocated already, each [L, Hkv, N, P, stored_row_size].
        slow: makes reads of a part of it slower.
    Raises:
        TierFullError: the device has not that many bytes.
    """

    def __init__(
        self,
        spec: KVSpec,
        tier: Tier,
        num_blocks: int,
        *,
        device: torch.device,
        pinned: bool,
        memory: HostMemory = HOST_MEMORY,
        parts: Mapping[KVPart, Tensor] | None = None,
        slow: SlowTier | None = None,
    ) -> None:
        self.spec = spec
        self.tier = tier
        self.num_blocks = num_blocks
        self.device = device
        self.slow = slow
        self.k = self._allocate(KVPart.K) if parts is None else parts[KVPart.K]  # [L, Hkv, N, P, stored_row_size]
        self.v = self._allocate(KVPart.V) if parts is None else parts[KVPart.V]  # [L, Hkv, N, P, stored_row_size]
        self._layers = tuple(zip(self.k, self.v, strict=True))
        self.page_refusal = memory.advise(self.k) or memory.advise(self.v) if device.type == "cpu" else None
        self._memory = memory
        self._is_to_be_pinned = pinned
        self.pin_refusals: tuple[str, ...] = ()
        self._pin(self.k, self.v)

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V of all blocks."""
        return self.num_blocks * self.spec.bytes_per_block

    @property
    def is_pinned(self) -> bool:
        """The copy engine and the accelerator's kernels reach all tensors in host memory."""
        return self._is_to_be_pinned and not self.pin_refusals

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that belongs to blocks, each [L, Hkv, N, …]: what a copy to a pool of the same spec copies."""
        return (self.k, self.v)

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [Hkv, N, P, stored_row_size], in the pool's order; views."""
        return self._layers[layer_idx]

    def reading(
        self, part: KVPart, layer_idx: int, block_ids: Tensor, *, rows_per_block: float
    ) -> AbstractContextManager[None]:
        """Read rows of K or V on the host within this: where memory is emulated, they take as long as it would.

        Args:
            block_ids: [n] int64, those that are read, repeated as often as other rows of them are.
            rows_per_block: rows of all KV heads that are read, for each id.
        """
        if self.slow is None:
            return nullcontext()
        ids = block_ids.to("cpu")
        num_bytes = len(ids) * rows_per_block * self.spec.row_bytes(part)
        return self.slow.reading(self.slow.bytes_of_rows(part, layer_idx, ids, rows_per_block), num_bytes)

    @abstractmethod
    def store(self, layer_idx: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Write K and V of new tokens.

        Args:
            slots: [T] int64 on the pool's device, block_id · P + offset, no two alike.
            k, v: [T, Hkv, D] on the pool's device, in a floating format; rounded to the pool's.
        """

    @abstractmethod
    def round(self, part: KVPart, rows: Tensor) -> Tensor:
        """K or V rows [T, Hkv, D] as whoever reads them from the pool later sees them, in the dtype of `rows`."""

    @abstractmethod
    def take_rows(self, part: KVPart, layer_idx: int, heads: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows of K or V of one layer.

        Args:
            heads, slots: [n] int64 on the pool's device; the slot is block_id · P + offset.
            dtype: of the answer.
        Returns:
            [n, D] on the pool's device.
        """

    @abstractmethod
    def read_rows(
        self, part: KVPart, layer_idx: int, block_ids: Tensor, *, num_keys: int, dtype: torch.dtype
    ) -> Tensor:
        """The first rows of K or V of blocks of one layer, side by side: [Hkv, num_keys, D] on the pool's device.

        Args:
            block_ids: [n] int64 on the pool's device.
            dtype: of the answer.
        Cost: copies the rows, twice where the dtype is not the pool's.
        """

    def is_read_by(self, device: torch.device) -> bool:
        """Whether the device itself brings this pool's rows, in the order of what it is given; else the host does."""
        return self.device == device

    def bring_rows(
        self,
        part: KVPart,
        layer_idx: int,
        block_ids: Tensor,
        *,
        num_keys: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """`read_rows` for a device: [Hkv, num_keys, D] there.

        Args:
            block_ids: [n] int64, on the device if it reads this pool (`is_read_by`), else on the pool's.
        Cost: as `read_rows`; if the host reads, the device waits for it, and new rows must be waited for before.
        """
        return self.read_rows(part, layer_idx, block_ids, num_keys=num_keys, dtype=dtype).to(device)

    @abstractmethod
    def copy_rows(self, part: KVPart, block_ids: Tensor, places: Tensor, to: Tensor) -> None:
        """Copy rows of K or V of blocks of all layers into host memory.

        Args:
            block_ids: [n] int64 on the host.
            places: [n] int64 on the host, ascending: where among the rows of a head the first one of each block goes,
                the others behind it; what would come to lie before the first row or behind the last is left out.
            to: [L, Hkv, m, D] in the pool's number format, pinned if the pool is on a GPU; the rows of a head are side
                by side. Other rows stay as they are.
        Raises:
            ShapeError: the pool keeps another number format.
        Cost: reads the rows once, of a pool on a GPU twice; that launches on its current stream and waits for nothing.
        """

    @abstractmethod
    def read_block(self, block_id: int) -> tuple[Tensor, Tensor]:
        """K and V rows of a block in all layers, each [L, Hkv, P, D] on the pool's device."""

    @abstractmethod
    def write_block(self, block_id: int, k: Tensor, v: Tensor) -> None:
        """Fill a block with rows [L, Hkv, P, D] of any device and floating format."""

    def _pin(self, *parts: Tensor) -> None:
        """Pin tensors, if that is asked for."""
        if self._is_to_be_pinned:
            reasons = [self._memory.pin(part, self) for part in parts]
            self.pin_refusals += tuple(reason for reason in reasons if reason is not None)

    def _allocate(self, part: KVPart) -> Tensor:
        spec = self.spec
        shape = (spec.num_layers, spec.num_kv_heads, self.num_blocks, spec.block_size, spec.stored_row_size(part))
        try:
            return torch.empty(shape, dtype=TORCH_DTYPES[spec.dtypes.of(part)], device=self.device)
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU is one, too
            raise TierFullError(
                f"tier {self.tier}: no {format_size(self.num_bytes)} for {self.num_blocks} KV blocks on {self.device}: "
                f"ask for fewer tokens or a smaller budget"
            ) from error


class RowKVPool(KVPool):
    """A pool whose rows stand as the model made them, in floats: what the accelerator's ops and torch's read."""

    def store(self, layer_idx: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        for pool, rows in zip(self.layer(layer_idx), (k, v), strict=True):
            api.store_rows(pool, slots, rows.to(pool.dtype))

    def round(self, part: KVPart, rows: Tensor) -> Tensor:  # noqa: ARG002  # both parts are alike here
        return rows.to(self.k.dtype).to(rows.dtype)

    def take_rows(self, part: KVPart, layer_idx: int, heads: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        return self.layer(layer_idx)[part is KVPart.V].flatten(1, 2)[heads, slots].to(dtype)

    def read_rows(
        self, part: KVPart, layer_idx: int, block_ids: Tensor, *, num_keys: int, dtype: torch.dtype
    ) -> Tensor:
        return api.gather_blocks(self.layer(layer_idx)[part is KVPart.V], block_ids)[:, :num_keys].to(dtype)

    def copy_rows(self, part: KVPart, block_ids: Tensor, places: Tensor, to: Tensor) -> None:
        pool = self.v if part is KVPart.V else self.k
        if pool.dtype != to.dtype:
            raise ShapeError(f"copy_rows: rows are {to.dtype}, the pool is {pool.dtype}")
        size, num_rows = self.spec.block_size, to.shape[2]
        if self.device.type == "cuda":
            self._copy_from_gpu(pool, block_ids, places, to)
            return
        runs = find_runs((block_ids * size).tolist(), places.tolist(), size, num_rows)
        rows_per_block = self.spec.num_kv_heads * sum(run.num for run in runs) / max(1, len(block_ids))
        for layer_idx, (layer, rows) in enumerate(zip(pool.flatten(2, 3), to, strict=True)):
            with self.reading(part, layer_idx, block_ids, rows_per_block=rows_per_block):
                for run in runs:
                    rows[:, run.place : run.place + run.num] = layer[:, run.slot : run.slot + run.num]

    def _copy_from_gpu(self, pool: Tensor, block_ids: Tensor, places: Tensor, to: Tensor) -> None:
        """Of each layer, gather the blocks side by side, and have the copy engine bring the runs."""
        size = self.spec.block_size
        runs = find_runs([i * size for i in range(len(block_ids))], places.tolist(), size, to.shape[2])
        ids = block_ids.to(self.device)
        stream = ctypes.c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        for layer, rows in zip(pool, to, strict=True):
            copies = RunCopies(api.gather_blocks(layer, ids), rows)
            for run in runs:
                copies.launch(stream, first=run.slot, place=run.place, num=run.num)

    def read_block(self, block_id: int) -> tuple[Tensor, Tensor]:
        return self.k[:, :, block_id], self.v[:, :, block_id]

    def write_block(self, block_id: int, k: Tensor, v: Tensor) -> None:
        self.k[:, :, block_id].copy_(k)
        self.v[:, :, block_id].copy_(v)


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows that lie side by side, and go side by side: from `slot` on, to `place` and behind it."""

    slot: int
    place: int
    num: int


def find_runs(slots: Sequence[int], places: Sequence[int], size: int, num_rows: int) -> list[RowRun]:
    """The runs of blocks of `size` rows whose first rows are at `slots` and go to `places`, without what would come to
    lie before row 0 or behind row `num_rows` − 1."""
    runs: list[RowRun] = []
    for slot, place in zip(slots, places, strict=True):
        skipped = max(0, -place)
        run = RowRun(slot + skipped, place + skipped, min(size, num_rows - place) - skipped)
        if run.num <= 0:
            continue
        last = runs[-1] if runs else None
        if last is not None and (last.slot + last.num, last.place + last.num) == (run.slot, run.place):
            runs[-1] = RowRun(last.slot, last.place, last.num + run.num)
        else:
            runs.append(run)
    return runs

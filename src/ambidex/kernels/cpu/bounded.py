"""Bounded attention over tiled pools in host memory: the native op, and what it reads beside K and V.

`kernels/reference/bounded.py` is the same in plain torch; docs/bounded.md derives the bound.
"""

from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu import memory
from ambidex.kernels.cpu.native import KeyBatch, ThreadPool, array_of, check_loaded, number_of

with suppress(ImportError):  # `BoundedPool` says so when it is made
    from ambidex import _native

NUM_FIGURES: Final = 5
"""Figures of each query head: `dropped_mass`, `error_share`, `value_norm`, `out_norm`, `num_kept`, in this order."""

PHASES: Final = ("scan", "choose", "keep", "wait")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedLayer:
    """One layer of a tiled pool as bounded attention reads it.

    `scanned` [Hkv, N, P, Dp] int8 in tile order with `scales` [Hkv, N, P] fp32; `rows` [Hkv, N, P, 2 Dp], K and V of a
    key side by side in the pool's number, None where K is int8 itself; `v` tiled, `v_scales` with int8; `norms`
    [Hkv, N, 2] fp32: no row of K in the block as it is scanned, and none of V, is longer. To `kept` [N] int32 are added
    the keys of each block that are kept, of all KV heads; None: nobody counts them.
    """

    scanned: Tensor
    scales: Tensor
    rows: Tensor | None
    v: Tensor
    v_scales: Tensor | None
    norms: Tensor
    kept: Tensor | None = None


class BoundedPool:
    """Bounded attention, and the scratch memory that it keeps.

    Args:
        threads: who computes; calls with the same threads run one after the other.
    """

    def __init__(self, threads: ThreadPool) -> None:
        check_loaded()
        self.threads = threads
        self.native = _native.BoundedPool(threads.native)

    def attend_bounded(
        self,
        q: Tensor,
        layer: ScannedLayer,
        batch: KeyBatch,
        *,
        scale: float,
        max_mass: float,
        near: tuple[Tensor, Tensor] | None = None,
        figures: Tensor | None = None,
        isa: str | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention of a ragged batch over blocks of one layer, without the keys that hold least of the softmax.

        Each query head leaves out at most `max_mass` of its softmax over these keys and those of `near`. Keys that one
        head of a group keeps, its others attend, too.

        Args:
            q: [T, Hq, D] fp32, bf16 or fp16 in CPU memory, contiguous; T is the batch's.
            layer: blocks that the batch names have been through `copy_for_scan`.
            scale: factor of q·k, positive.
            max_mass: at least 0 and below 1.
            near: `out` [T, Hq, D] and `lse` [T, Hq] fp32 over other keys; joined with the answer.
            figures: [T, Hq, NUM_FIGURES] fp32, written; None: a new one.
            isa: one of `available_isas()`, for tests; None for the fastest.
        Returns:
            `out` [T, Hq, D] and `lse` [T, Hq] fp32 over what was kept, and the figures. The share of the softmax that
            was left out is at most `dropped_mass`; the norm of the error of `out` at most
            `error_share · (value_norm + out_norm)`.
        Raises:
            ShapeError: tensors do not fit each other or the batch.
        Cost: reads all scanned keys once, and K and V of the kept rows; all threads, the GIL released.
        """
        out, lse = torch.from_numpy(memory.new_fp32(q.shape)), torch.from_numpy(memory.new_fp32(q.shape[:2]))
        if figures is None:
            figures = torch.from_numpy(memory.new_fp32((*q.shape[:2], NUM_FIGURES)))
        arrays = make_arrays(q, layer, scale=scale, max_mass=max_mass, near=near, out=out, lse=lse, figures=figures)
        for owner in (self, batch.native, layer, figures):
            memory.keep(owner)
        try:
            self.native.attend(arrays, batch.native, isa=isa)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"attend_bounded: {error}") from error
        return out, lse, figures

    def take_phase_seconds(self) -> dict[str, float]:
        """Seconds that the threads, taken together, spent in calls since the last time that this was asked.

        `scan` all keys; `choose` thresholds, and wait for what an accelerator saw; `keep` attend what is kept; `wait`
        for a threshold. What a thread does between calls, or while others finish, is in none of them.
        """
        return dict(zip(PHASES, self.native.take_phase_seconds(), strict=True))

    def copy_for_scan(
        self,
        k: Tensor,
        v: Tensor,
        block_ids: Tensor,
        layer: ScannedLayer,
        *,
        head_dim: int,
        k_scales: Tensor | None = None,
        isa: str | None = None,
    ) -> None:
        """Make what `attend_bounded` reads beside K and V of whole blocks, all of whose rows are stored.

        Args:
            k, v: [Hkv, N, P, Dp], one layer of a tiled pool; k_scales with int8; the scales of V are the layer's.
            block_ids: [n] int64.
            layer: where it goes; its `scanned`, `scales` and `rows` are not written where K is int8.
        Raises:
            ShapeError: tensors do not fit each other.
        Cost: reads K and V of the blocks and writes them again, and half of K.
        """
        is_int8 = layer.rows is None
        try:
            self.native.copy_for_scan(
                array_of(k), array_of(v), number_of(k),
                None if k_scales is None else k_scales.numpy(),
                None if layer.v_scales is None else layer.v_scales.numpy(),
                head_dim, block_ids.numpy(),
                None if is_int8 else layer.scanned.numpy(),
                None if is_int8 else layer.scales.numpy(),
                None if layer.rows is None else array_of(layer.rows),
                layer.norms.numpy(), isa=isa,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise ShapeError(f"copy_for_scan: {error}") from error


def make_arrays(
    q: Tensor,
    layer: ScannedLayer,
    *,
    scale: float,
    max_mass: float,
    near: tuple[Tensor, Tensor] | None,
    out: Tensor,
    lse: Tensor,
    figures: Tensor,
    other_lse: Tensor | None = None,
) -> "_native.BoundedArrays":
    """The memory of a call, checked; see `BoundedPool.attend_bounded`.

    Args:
        other_lse: [T, Hq] fp32 of keys that count in the softmax and are not joined; for `AttentionScript` alone.
    Raises:
        ShapeError: tensors do not fit each other.
    """
    try:
        return _native.BoundedArrays(
            array_of(q), number_of(q), array_of(layer.scanned), layer.scales.numpy(),
            None if layer.rows is None else array_of(layer.rows), array_of(layer.v), number_of(layer.v),
            None if layer.v_scales is None else layer.v_scales.numpy(), layer.norms.numpy(), scale, max_mass,
            None if near is None else near[0].numpy(), None if near is None else near[1].numpy(),
            None if other_lse is None else other_lse.numpy(), out.numpy(), lse.numpy(), figures.numpy(),
            None if layer.kept is None else layer.kept.numpy(),
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise ShapeError(f"bounded attention: {error}") from error

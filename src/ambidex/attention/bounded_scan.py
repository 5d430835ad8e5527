"""`BoundedScan`: the native form of the bounded policy for decode steps of fixed form (docs/bounded.md).

    key of a request      read by
    in a whole block      the bounded op: scanned in 8 bits, attended if it is kept
    in its newest block   exact attention, whose answer goes into the bounded op as what is known already
    on a GPU              exact attention there; how much of the softmax it holds is told to the op when it is known

What the op reads beside K and V (`storage/scan_copy.py`) is made when a block is first scanned, and forgotten when the
block is written again. Nothing else is kept of a request: what a step leaves out follows from its queries and keys.

A step may be asked of which blocks keys were kept: the op counts them, and the scan lane of a GPU those of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ambidex.attention.contexts import Context
from ambidex.attention.scan_check import ScanCheck
from ambidex.core.ids import BlockId, Lane, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.step import BlockRef, SelectionFigures, StepPlan
from ambidex.kernels.cpu.bounded import NUM_FIGURES, BoundedPool
from ambidex.storage.scan_copy import ScanCopy

MIN_SCANNED_BLOCKS: Final = 16
"""Whole blocks from which a request's keys are scanned: with 64 tokens each, contexts below 1024 tokens are attended
exactly, which takes some tens of microseconds a layer, no more than choosing does."""


class BoundedScan:
    """What the steps of one engine share.

    Args:
        spec: heads, layers and head_dim.
        copies: of the pools in host memory in tile order that have blocks, at least one.
        native: who attends.
        max_mass: share of the softmax that a step may leave out, at least 0 and below 1; tiers share it.
        min_blocks: whole blocks from which a request is scanned.
        wait: waits until the accelerator has written what it was told to write into the pools.
        check: computes a sample of the answers again; None: nobody does.
    """

    def __init__(
        self,
        spec: ModelSpec,
        copies: Mapping[Tier, ScanCopy],
        native: BoundedPool,
        *,
        max_mass: float,
        min_blocks: int = MIN_SCANNED_BLOCKS,
        wait: "WaitWritten | None" = None,
        check: ScanCheck | None = None,
    ) -> None:
        self.spec = spec
        self.copies = dict(copies)
        self.native = native
        self.max_mass = max_mass
        self.check = check
        self._block_size = next(iter(self.copies.values())).block_size
        self._min_blocks = min_blocks
        self._wait = wait
        self.lane_kept: Tensor | None = None
        """[N] int32 in host memory: keys of each block of DRAM that the scan lane kept in the last step that it
        scanned; None: it counts none."""

    def note(self, plan: StepPlan) -> None:
        """Forget what is known of blocks that a step writes, and of kept keys before a look; call it before the step.

        Cost: about a microsecond a request and a move.
        """
        written: dict[Tier, list[int]] = {tier: [] for tier in self.copies}
        for move in plan.moves:
            if move.target.tier in written:
                written[move.target.tier].append(move.target.block_id)
        for request in plan.requests:
            for block in request.blocks[request.start // self._block_size :]:
                if block.tier in written:
                    written[block.tier].append(block.block_id)
        for tier, block_ids in written.items():
            self.copies[tier].forget(block_ids)
        if plan.is_look:
            for counts in self._kept():
                counts.zero_()

    def prepare(self, contexts: Sequence[Context], last: Sequence[BlockRef]) -> dict[Tier, list[int]]:
        """How many of each request's blocks on each tier are scanned; see to it that they can be.

        Args:
            last: each request's newest block, which is not.
        Cost: the first time that a block is scanned, reads its K and V in all layers.
        """
        num_scanned: dict[Tier, list[int]] = {tier: [] for tier in self.copies}
        for context, newest in zip(contexts, last, strict=True):
            whole = {tier: context.tiers[tier].num - (newest.tier is tier) for tier in self.copies}
            is_scanned = sum(whole.values()) >= self._min_blocks
            for tier, num in whole.items():
                num_scanned[tier].append(num if is_scanned else 0)
        for tier in self.copies:
            ids = [context.tiers[tier].ids[:num] for context, num in zip(contexts, num_scanned[tier], strict=True)]
            self.make_missing(tier, np.unique(np.concatenate(ids)))
        return num_scanned

    def make_missing(self, tier: Tier, block_ids: NDArray[np.int64]) -> None:
        """See to it that whole blocks, no two alike, can be scanned."""
        missing = self.copies[tier].find_missing(block_ids)
        if missing:
            if self._wait is not None:
                self._wait()
            self.copies[tier].make(missing)

    def find_kept(self) -> dict[BlockRef, int] | None:
        """Of which blocks of DRAM a look, which has ended, kept keys, and how many in all layers and KV heads; None if
        it scanned none, or nobody counts.

        Cost: some microseconds for each thousand blocks of the pool, and each hundred that are named.
        """
        counts = self._kept()
        if not counts:
            return None
        kept = np.sum([each.numpy() for each in counts], axis=0)
        ids = np.flatnonzero(kept)
        named = zip(ids.tolist(), kept[ids].tolist(), strict=True)
        return {BlockRef(Tier.DRAM, BlockId(block_id)): num for block_id, num in named} or None

    def _kept(self) -> list[Tensor]:
        own = self.copies[Tier.DRAM].kept if Tier.DRAM in self.copies else None
        return [counts for counts in (own, self.lane_kept) if counts is not None]

    def new_figures(self, num_rows: int) -> Tensor:
        """Where the op writes what it left out: [L, B, Hq, NUM_FIGURES] fp32, zeros."""
        return torch.zeros(self.spec.num_layers, num_rows, self.spec.num_q_heads, NUM_FIGURES)


class WaitWritten:
    """Waits for all that a GPU was told to do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self) -> None:
        torch.cuda.synchronize(self._device)


def collect_figures(
    figures: Mapping[Tier, NDArray[np.float32]],
    num_scanned: Mapping[Tier, int],
    num_visible: int,
    out_norms: NDArray[np.float32] | None = None,
) -> SelectionFigures:
    """What a step left out.

    Args:
        figures: [L, B, Hq, NUM_FIGURES] of each tier that was scanned, in the order in which answers were joined.
        num_scanned: keys that one layer scanned on each tier, all requests together.
        num_visible: keys that the B queries of one layer see.
        out_norms: [L, B, Hq], lengths of the whole answers; None: those of the tier that came last.
    """
    mass = np.minimum(sum(array[..., 0].astype(np.float64) for array in figures.values()), 1.0)
    bounds = find_bounds(figures, out_norms)
    num_layers, _, num_heads = mass.shape
    num_kept = sum(int(array[..., 4].astype(np.float64).sum()) for array in figures.values())
    num_left = num_layers * num_heads * sum(num_scanned.values()) - num_kept
    return SelectionFigures(
        num_choices=mass.size,
        num_visible=num_layers * num_heads * num_visible,
        num_attended=num_layers * num_heads * num_visible - num_left,
        num_bounded=mass.size,
        sum_dropped_mass=float(mass.sum()),
        max_dropped_mass=float(mass.max(initial=0.0)),
        max_error_bound=float(np.max(bounds, initial=0.0)),
    )


def find_bounds(
    figures: Mapping[Tier, NDArray[np.float32]], out_norms: NDArray[np.float32] | None = None
) -> NDArray[np.float64]:
    """[L, B, Hq], the bounds on the norms of the answers' errors; arguments as in `collect_figures`."""
    arrays = [array.astype(np.float64) for array in figures.values()]
    norms = arrays[-1][..., 3] if out_norms is None else out_norms.astype(np.float64)
    bounds: NDArray[np.float64] = np.sum([array[..., 1] * (array[..., 2] + norms) for array in arrays], axis=0)
    return bounds


def join_lanes(cpu: NDArray[np.float32], lane: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the CPU lane and the scan lane left out together of the softmax over all keys.

    Each leaves out a share of its own keys and of a part of what is near, and the parts make up all of that: of the
    whole, no more is left out than the larger share, since (a + b) / (A + B) ≤ max(a / A, b / B).

    Args:
        cpu: [L, B, Hq, NUM_FIGURES]; lane: [L, B, Hq, NUM_LANE_FIGURES].
    """
    joined = cpu.copy()
    joined[..., 0] = np.maximum(cpu[..., 0], lane[..., 0])
    joined[..., 1] = np.maximum(cpu[..., 1], lane[..., 0])
    joined[..., 2] = np.maximum(cpu[..., 2], lane[..., 1])
    joined[..., 4] = cpu[..., 4] + lane[..., 2]
    return joined


def scanned_bytes(
    copies: Mapping[Tier, ScanCopy],
    figures: Mapping[Tier, NDArray[np.float32]],
    num_scanned: Mapping[Tier, int],
    spec: ModelSpec,
    lanes: Mapping[Tier, Lane],
) -> dict[Lane, int]:
    """Bytes that a step read of scanned keys and of those kept."""
    read = dict.fromkeys(lanes.values(), 0)
    for tier, copy in copies.items():
        kept = int(figures[tier][..., 4].sum()) // spec.group_size
        num_keys = spec.num_layers * spec.num_kv_heads * num_scanned[tier]
        read[lanes[tier]] += num_keys * copy.key_bytes + kept * copy.kept_bytes
    return read

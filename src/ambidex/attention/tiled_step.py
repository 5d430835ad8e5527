"""A decode step whose keys all lie in pools in tile order, in a form that does not change from step to step: what a
recorded program (`kernels/cpu/recorded.py`) needs.

    TiledInputs      ids, positions, slots and key batches at fixed places; filled in before each run
    TiledAttention   the attention over them: store, attend over each tier, merge
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ambidex.attention.bounded_scan import BoundedScan
from ambidex.attention.contexts import Context
from ambidex.attention.scan_check import AnswerCopies
from ambidex.attention.state import AttentionState, merge
from ambidex.core.ids import Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.step import BlockRef, ScheduledRequest
from ambidex.kernels import api
from ambidex.kernels.cpu.native import KeyBatch
from ambidex.storage.tiled_pool import TiledKVPool


class TiledInputs:
    """What a step of B requests reads.

    Args:
        num_rows: B.
        windows: distinct sliding windows of the layers, None for full attention.
        block_size: tokens of a block.
        tiers: those that have blocks.
        bounded: the bounded policy; None: all keys are attended.
    """

    def __init__(
        self,
        num_rows: int,
        *,
        windows: Collection[int | None],
        block_size: int,
        tiers: Collection[Tier],
        bounded: BoundedScan | None = None,
    ) -> None:
        self.num_rows = num_rows
        self.windows = tuple(windows)
        self.block_size = block_size
        self.token_ids = torch.zeros(num_rows, dtype=torch.int64)
        self.positions = torch.zeros(num_rows, dtype=torch.int64)
        self.slots = {tier: torch.full((num_rows,), -1, dtype=torch.int64) for tier in tiers}
        self._row_offsets = np.arange(num_rows + 1, dtype=np.int64)
        no_blocks, no_keys = np.zeros(0, np.int64), np.zeros(num_rows, np.int64)
        no_key = (no_blocks, np.zeros(num_rows + 1, np.int64), no_keys, no_keys, self._row_offsets)
        self.keys = {
            (tier, window): KeyBatch(*map(torch.from_numpy, no_key), block_size=block_size)
            for tier in tiers
            for window in self.windows
        }
        self.bounded = bounded
        scanned_tiers = bounded.copies if bounded is not None else ()
        self.scanned = {tier: KeyBatch(*map(torch.from_numpy, no_key), block_size=block_size) for tier in scanned_tiers}
        """Keys that the bounded op reads."""
        self.figures = {tier: bounded.new_figures(num_rows) for tier in scanned_tiers} if bounded is not None else {}
        """What it left out in the last step, [L, B, Hq, NUM_FIGURES]."""
        self.num_scanned: dict[Tier, int] = {}
        """Keys of `scanned`, all requests together."""
        self.scanned_rows: list[int] = []
        """The requests that they are of."""
        self.copies: AnswerCopies | None = None
        """Where each layer leaves its queries and answers; None: nobody looks at them."""
        if bounded is not None and bounded.check is not None:
            self.copies = AnswerCopies(bounded.spec, num_rows, dtype=torch.float32, device=torch.device("cpu"))
        self.num_keys: dict[int | None, dict[Tier, int]] = {}
        """Keys that the step's attention reads under each window, all requests together."""

    def fill(
        self, requests: Sequence[ScheduledRequest], contexts: Sequence[Context], positions: NDArray[np.int64]
    ) -> None:
        """Describe a step of requests with one new token each.

        Args:
            contexts: the blocks of each request.
            positions: [n] of the new tokens.
        Cost: copies the block ids of all requests.
        """
        self.token_ids.numpy()[:] = [request.token_ids[0] for request in requests]
        self.positions.numpy()[:] = positions
        last = [request.blocks[-1] for request in requests]
        for tier, slots in self.slots.items():
            is_here = np.array([block.tier is tier for block in last])
            ids = np.array([block.block_id for block in last], np.int64)
            slots.numpy()[:] = np.where(is_here, ids * self.block_size + positions % self.block_size, -1)
        self.num_keys = {window: {} for window in self.windows}
        num_scanned: Mapping[Tier, Sequence[int]] = {}
        if self.bounded is not None:
            num_scanned = self.bounded.prepare(contexts, last)
            self.scanned_rows = np.flatnonzero(np.sum(list(num_scanned.values()), axis=0)).tolist()
            for tier, batch in self.scanned.items():
                self.num_scanned[tier] = self._assign_scanned(batch, tier, num_scanned[tier], contexts)
        for (tier, window), batch in self.keys.items():
            first = num_scanned.get(tier) or [0] * self.num_rows
            self.num_keys[window][tier] = self._assign(batch, tier, window, first, last, contexts, positions)

    def _assign(
        self,
        batch: KeyBatch,
        tier: Tier,
        window: int | None,
        first: Sequence[int],
        last: Sequence[BlockRef],
        contexts: Sequence[Context],
        positions: NDArray[np.int64],
    ) -> int:
        """Name the keys of a tier under a window, behind the `first` blocks of each; returns how many they are."""
        blocks = [context.tiers[tier] for context in contexts]
        counts = np.array([item.num for item in blocks], np.int64) - np.array(first, np.int64)
        num_stored = counts * self.block_size
        # Rows of the newest block behind the new token were never stored.
        is_newest = np.array([block.tier is tier for block in last])
        num_stored -= np.where(is_newest, self.block_size - 1 - positions % self.block_size, 0)
        hidden = np.zeros_like(num_stored)
        if window is not None:
            first_visible = np.maximum(positions - window + 1, 0).tolist()
            hidden[:] = [
                item.num_hidden_rows(first, self.block_size) for item, first in zip(blocks, first_visible, strict=True)
            ]
        num_keys = np.maximum(num_stored - hidden, 0)
        first_key = np.where(num_keys > 0, hidden, 0)
        offsets = np.cumsum([0, *counts], dtype=np.int64)
        ids = np.concatenate([item.ids[begin : item.num] for item, begin in zip(blocks, first, strict=True)])
        batch.assign(ids, offsets, first_key, num_keys, self._row_offsets)
        return int(num_keys.sum())

    def _assign_scanned(
        self, batch: KeyBatch, tier: Tier, num_scanned: Sequence[int], contexts: Sequence[Context]
    ) -> int:
        """Name the first blocks of each request on a tier; returns how many keys they have."""
        counts = np.array(num_scanned, np.int64)
        ids = np.concatenate(
            [context.tiers[tier].ids[:num] for context, num in zip(contexts, num_scanned, strict=True)]
        )
        offsets = np.cumsum([0, *counts], dtype=np.int64)
        num_keys = counts * self.block_size
        batch.assign(ids, offsets, np.zeros_like(num_keys), num_keys, self._row_offsets)
        return int(num_keys.sum())


class TiledAttention:
    """What `models.base.AttentionOp` asks for, for one new token a row.

    Args:
        spec: heads, windows and head_dim (the scale is head_dim ** -0.5).
        pools: in tile order, by tier; those in which any row of the step sees a key, or is stored.
        inputs: of the step.
    """

    def __init__(self, spec: ModelSpec, pools: Mapping[Tier, TiledKVPool], inputs: TiledInputs) -> None:
        self._scale = spec.head_dim**-0.5
        self._windows = spec.windows
        self._pools = dict(pools)
        self._inputs = inputs

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Rotate q and k, store k and v in their slots, and attend over the visible keys, the new ones included.

        Args:
            q: [B, Hq, D]; k, v: [B, Hkv, D], fp32 on the CPU.
            angles: cos and sin; None: nothing is rotated.
        Returns:
            [B, Hq, D] fp32.
        Raises:
            ShapeError: the tensors fit neither the rows nor the pools.
        """
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if angles is not None:
            q, k = api.rotate(q, *angles), api.rotate(k, *angles)
        states: list[AttentionState] = []
        for tier, pool in self._pools.items():
            (k_pool, v_pool), (k_scales, v_scales) = pool.layer(layer_idx), pool.scales(layer_idx)
            slots = self._inputs.slots[tier]
            for part, numbers, scales, rows in _parts(k_pool, v_pool, k_scales, v_scales, k, v):
                pool.native.store_values(part, numbers, slots, rows, scales=scales)
            out, lse = pool.native.attend_blocks(
                q, k_pool, v_pool, self._inputs.keys[tier, self._windows[layer_idx]],
                scale=self._scale, k_scales=k_scales, v_scales=v_scales,
            )  # fmt: skip
            states.append(AttentionState(out, lse))
        joined = states[0]
        for state in states[1:]:
            joined = merge(joined, state)
        if self._inputs.bounded is not None:
            joined = self._attend_scanned(self._inputs.bounded, layer_idx, q, joined)
        if self._inputs.copies is not None:
            self._inputs.copies.keep(layer_idx, q, joined.out)
        return joined.out

    def _attend_scanned(self, bounded: BoundedScan, layer_idx: int, q: Tensor, near: AttentionState) -> AttentionState:
        """Bounded attention over each tier in turn, what came before being known already."""
        for tier in self._pools:
            out, lse, _ = bounded.native.attend_bounded(
                q,
                bounded.copies[tier].layer(layer_idx),
                self._inputs.scanned[tier],
                scale=self._scale,
                max_mass=bounded.max_mass / len(self._pools),
                near=(near.out, near.lse),
                figures=self._inputs.figures[tier][layer_idx],
            )
            near = AttentionState(out, lse)
        return near


def _parts(
    k_pool: Tensor, v_pool: Tensor, k_scales: Tensor | None, v_scales: Tensor | None, k: Tensor, v: Tensor
) -> tuple[tuple[Literal["k", "v"], Tensor, Tensor | None, Tensor], ...]:
    return ("k", k_pool, k_scales, k), ("v", v_pool, v_scales, v)


def find_positions(requests: Sequence[ScheduledRequest], *, block_size: int, most: int) -> NDArray[np.int64] | None:
    """Positions [n] of the new tokens, if each request has one and its blocks are those up to it; else None."""
    if not 0 < len(requests) <= most or any(len(request.token_ids) != 1 for request in requests):
        return None
    positions = np.array([request.start for request in requests], np.int64)
    num_blocks = np.array([len(request.blocks) for request in requests], np.int64)
    return positions if bool((num_blocks == positions // block_size + 1).all()) else None

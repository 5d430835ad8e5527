"""`TileReader`: old keys in a pool in tile order. A few queries: one native call, where the keys lie. A chunk of a
prompt, or queries whose windows differ: the rows are copied out and attended as a matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ambidex.attention.metadata import OldKeys
from ambidex.attention.parts import PartAttention
from ambidex.attention.state import AttentionState, empty
from ambidex.core.errors import InternalError
from ambidex.kernels.cpu.native import KeyBatch
from ambidex.storage.tiled_pool import TiledKVPool

MAX_NATIVE_QUERIES: Final = 64
"""Queries of a request that are attended in place; more make a matrix product that is worth a copy of the rows."""


class TileReader:
    """Attention over old keys of a `TiledKVPool`; see `attention.readers.Reader`."""

    reads_own = True

    def __init__(self, pool: TiledKVPool, attention: PartAttention) -> None:
        self._pool = pool
        self._attention = attention

    def prepare(self, parts: Sequence[OldKeys], num_tokens: int) -> "PreparedTiles":
        few = [part for part in parts if self._is_native(part)]
        batch = None
        if few:
            batch = _key_batch(few, num_tokens, self._pool.spec.block_size)
            if self._attention.slopes is not None:
                _set_positions(batch, few, num_tokens, self._pool.spec.block_size)
        return PreparedTiles(
            pool=self._pool,
            attention=self._attention,
            batch=batch,
            matrices=tuple(part for part in parts if not self._is_native(part)),
        )

    @staticmethod
    def _is_native(part: OldKeys) -> bool:
        num_queries: int = part.rows.stop - part.rows.start
        return part.mask is None and num_queries <= MAX_NATIVE_QUERIES


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTiles:
    """See `attention.readers.Prepared`."""

    pool: TiledKVPool
    attention: PartAttention
    batch: KeyBatch | None
    """The parts that are attended in place."""
    matrices: tuple[OldKeys, ...]

    def attend(self, layer_idx: int, q: Tensor) -> AttentionState:
        state = self._attend_in_place(layer_idx, q)
        for part in self.matrices:
            k, v = self.pool.gather(
                layer_idx,
                part.block_ids,
                first_key=part.keys.start,
                num_keys=part.keys.stop - part.keys.start,
                dtype=q.dtype,
            )
            out, lse = self.attention.attend_old(q[part.rows], k, v, part)
            state.out[part.rows], state.lse[part.rows] = out.float(), lse
        return state

    def _attend_in_place(self, layer_idx: int, q: Tensor) -> AttentionState:
        if self.batch is None:
            return empty(*q.shape, device=q.device)
        k, v = self.pool.layer(layer_idx)
        k_scales, v_scales = self.pool.scales(layer_idx)
        out, lse = self.pool.native.attend_blocks(
            q.contiguous(),
            k,
            v,
            self.batch,
            scale=self.attention.scale,
            k_scales=k_scales,
            v_scales=v_scales,
            slopes=self.attention.slopes,
        )
        return AttentionState(out, lse)


def _key_batch(parts: Sequence[OldKeys], num_tokens: int, block_size: int) -> KeyBatch:
    """The parts, in ascending order of their rows, and between them the rows of T that see no key."""
    first_key, num_keys, num_blocks, rows = [], [], [], [0]
    for part in parts:
        if part.rows.start > rows[-1]:
            first_key.append(0)
            num_keys.append(0)
            num_blocks.append(0)
            rows.append(part.rows.start)
        first_key.append(part.keys.start)
        num_keys.append(part.keys.stop - part.keys.start)
        num_blocks.append(len(part.block_ids))
        rows.append(part.rows.stop)
    if rows[-1] < num_tokens:
        first_key.append(0)
        num_keys.append(0)
        num_blocks.append(0)
        rows.append(num_tokens)
    return KeyBatch(
        torch.cat([part.block_ids for part in parts]),
        torch.tensor([0, *num_blocks]).cumsum(0),
        torch.tensor(first_key),
        torch.tensor(num_keys),
        torch.tensor(rows),
        block_size=block_size,
    )


def _set_positions(batch: KeyBatch, parts: Sequence[OldKeys], num_tokens: int, block_size: int) -> None:
    """Tell the batch where its blocks and queries stand."""
    of_blocks, of_rows = [], torch.zeros(num_tokens, dtype=torch.int64)
    for part in parts:
        if part.query_positions is None or part.key_positions is None:
            raise InternalError("attention with slopes is handed keys without positions")
        firsts = torch.arange(len(part.block_ids)) * block_size - part.keys.start  # of each block, among visible keys
        seen = firsts.clamp(min=0)
        of_blocks.append(part.key_positions[seen] - (seen - firsts))
        of_rows[part.rows] = part.query_positions
    batch.set_positions(torch.cat(of_blocks), of_rows)

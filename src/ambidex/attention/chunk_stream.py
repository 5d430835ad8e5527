"""The stream lane of chunks: old keys in DRAM that a chunk of a prompt sees are brought to the accelerator, piece by
piece, and attended there, behind its computation. (That of decode steps is in `attention/streamed.py`.)

Which lane is the faster one for T queries of a request over S keys of one layer:

    stream    S · bytes / link                                          the link's time, whatever T is
    CPU       max(S · bytes / dram, 4 · T · S · Hq · D / cpu)           its products, for more than a few queries

equal at T = bytes · cpu / (4 · Hq · D · link), with `bytes` of K and V of a token: with 16-bit numbers and groups of G
query heads cpu / (G · link), tens of queries for a CPU of some TFLOP/s and a link of 50 GB/s. Until both are measured
where the engine runs, the stream lane takes what the CPU lane does not attend in place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ambidex.attention.metadata import OldKeys
from ambidex.attention.state import AttentionState, merge_rows
from ambidex.attention.tiles import MAX_NATIVE_QUERIES
from ambidex.core.kv_spec import StreamBuffers
from ambidex.kernels import api, tiles
from ambidex.storage.tile_ring import BlockList, TileRing
from ambidex.storage.tiled_pool import TiledKVPool

MIN_STREAMED_QUERIES: Final = MAX_NATIVE_QUERIES + 1
"""Queries of a request from which its keys are streamed: see above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some blocks of an `OldKeys`, and what its queries see of them."""

    rows: slice
    blocks: BlockList
    keys: slice
    """Visible keys, among the rows of the blocks."""
    mask: Tensor | None
    """[queries, keys] bool on the accelerator."""


class ChunkStream:
    """Attention over old keys of a pool in host memory, on the accelerator.

    Args:
        device: the accelerator.
        dtype: of the queries.
        scale: factor of q·k.
        windows: sliding windows of the layers.
        sizes: of the buffers, which are allocated here.
        min_queries: queries of a request from which its keys are streamed, at least 2: the key of a single new token,
            which may be read with the old ones, is stored too late for copies that run ahead.
    """

    def __init__(
        self,
        pool: TiledKVPool,
        *,
        device: torch.device,
        dtype: torch.dtype,
        scale: float,
        windows: Sequence[int | None],
        sizes: StreamBuffers,
        min_queries: int = MIN_STREAMED_QUERIES,
    ) -> None:
        self._spec = pool.spec
        self._device = device
        self._scale = scale
        self._windows = tuple(windows)
        self._piece_blocks = sizes.piece_blocks
        self._min_queries = max(min_queries, 2)
        self._ring = TileRing(pool, sizes, device)
        rows = self._spec.num_kv_heads * self._piece_blocks * self._spec.block_size * self._spec.head_dim
        self._k = torch.empty(rows, dtype=dtype, device=device)
        self._v = torch.empty(rows, dtype=dtype, device=device)
        self._views: Mapping[int | None, tuple[Piece, ...]] = {}
        self._next_layer: int | None = None

    def takes(self, part: OldKeys) -> bool:
        """Whether this lane attends over the part."""
        num_queries: int = part.rows.stop - part.rows.start
        return num_queries >= self._min_queries

    def begin(self, parts: Mapping[int | None, Sequence[OldKeys]]) -> None:
        """Cut a step's parts into pieces and send the first ones on their way.

        Args:
            parts: those that this lane takes, by window.
        Cost: on CUDA, one small copy a part and one for each mask.
        """
        self._ring.stop()
        self._views = {
            window: tuple(piece for part in of_window for piece in self._cut(part))
            for window, of_window in parts.items()
        }
        self._start(0)

    def attend(self, layer_idx: int, q: Tensor, state: AttentionState) -> AttentionState:
        """Join what the queries get from the streamed keys of a layer to a state.

        Args:
            q: [T, Hq, D]; state: over other keys, `out` fp32; may be changed in place.
        Returns:
            The state over both.
        Cost: does not wait. Layers are expected in their order: another one begins the copies anew.
        """
        pieces = self._pieces(layer_idx)
        if not pieces:
            return state
        if layer_idx != self._next_layer:
            self._start(layer_idx)
        for piece in pieces:
            k, v = self._rows_of(piece)
            out, lse = api.attend(q[piece.rows], k, v, scale=self._scale, mask=piece.mask)
            state = merge_rows(state, AttentionState(out, lse), piece.rows)
        self._next_layer = self._first_with_pieces(layer_idx + 1)
        return state

    def _start(self, layer_idx: int) -> None:
        self._next_layer = self._first_with_pieces(layer_idx)
        self._ring.start([(i, piece.blocks) for i in range(layer_idx, len(self._windows)) for piece in self._pieces(i)])

    def _first_with_pieces(self, layer_idx: int) -> int | None:
        return next((i for i in range(layer_idx, len(self._windows)) if self._pieces(i)), None)

    def _pieces(self, layer_idx: int) -> tuple[Piece, ...]:
        return self._views.get(self._windows[layer_idx], ())

    def _cut(self, part: OldKeys) -> list[Piece]:
        size, block_ids = self._spec.block_size, part.block_ids
        if part.mask is None and part.keys == slice(0, len(block_ids) * size):
            block_ids = block_ids.sort().values  # in any order, all seen by all: neighbours travel in longer runs
        ids = block_ids.tolist()
        device_ids = block_ids.to(self._device, non_blocking=True)
        mask = None if part.mask is None else part.mask.to(self._device)
        pieces = []
        for begin in range(0, len(ids), self._piece_blocks):
            end = min(begin + self._piece_blocks, len(ids))
            first, last = max(part.keys.start, begin * size), min(part.keys.stop, end * size)
            seen = slice(first - part.keys.start, last - part.keys.start)
            pieces.append(
                Piece(
                    rows=part.rows,
                    blocks=BlockList(tuple(ids[begin:end]), device_ids[begin:end]),
                    keys=slice(first - begin * size, last - begin * size),
                    mask=None if mask is None else mask[:, seen],
                )
            )
        return pieces

    def _rows_of(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """K and V [Hkv, S, D] of the next piece, until the one after it is asked for."""
        k_tiles, v_tiles, *scales = self._ring.take()
        num_heads, num_rows = self._spec.num_kv_heads, len(piece.blocks.ids) * self._spec.block_size
        shape = (num_heads, num_rows, self._spec.head_dim)
        k, v = (memory[: torch.Size(shape).numel()].view(shape) for memory in (self._k, self._v))
        k_scales, v_scales = scales or (None, None)
        tiles.unpack_blocks(k_tiles, v_tiles, k, v, k_scales=k_scales, v_scales=v_scales)
        self._ring.free()
        return k[:, piece.keys], v[:, piece.keys]

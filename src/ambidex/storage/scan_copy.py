"""`ScanCopy`: what bounded attention reads beside a tiled pool, made block by block when a block is complete.

pool int8       norms of rows, a few bytes a block; its K is scanned itself
any other       besides, an 8-bit copy of K in tile order, which is scanned, and K and V row after row, for single
                keys: in tile order a row lies in many lines of memory, each of which holds parts of other rows
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ambidex.core.dtypes import DType
from ambidex.core.errors import TierFullError
from ambidex.core.ids import KVPart
from ambidex.core.kv_spec import SCALE_WORD_BYTES, scan_bytes_per_block
from ambidex.core.units import format_size
from ambidex.kernels.cpu.bounded import BoundedPool, ScannedLayer
from ambidex.storage.host_memory import HOST_MEMORY, HostMemory
from ambidex.storage.huge_pages import advise_huge_pages
from ambidex.storage.tiled_pool import TiledKVPool

_PAGE: Final = 4096
_ALIGNMENT: Final = 128
"""Bytes of what a GPU reads over the link at once, and of two lines of a CPU's cache."""


class ScanCopy:
    """Belongs to one pool; knows of which blocks it is true.

    Args:
        pool: in host memory.
        native: who makes it.
        counts_kept: keys that are kept are counted by block.
    Raises:
        TierFullError: there is not that much memory.
    """

    def __init__(self, pool: TiledKVPool, native: BoundedPool, *, counts_kept: bool = False) -> None:
        self._pool = pool
        self._native = native
        spec = pool.spec
        heads = (spec.num_layers, spec.num_kv_heads, pool.num_blocks)
        rows = (*heads, spec.block_size, spec.row_size)
        self._memory = torch.empty(0, dtype=torch.uint8)
        """All of it that is not the pool's, in pages of its own: a driver pins a page once."""
        self._is_made = np.zeros(pool.num_blocks, np.bool_)
        self.kept = torch.zeros(pool.num_blocks, dtype=torch.int32) if counts_kept else None
        """[N]: keys of each block that the native op kept since somebody set this to 0, of all layers and KV heads."""
        try:
            if pool.k_scales is not None:
                scanned, scales, kv_rows, norms = pool.k, pool.k_scales, None, torch.zeros(*heads, 2)
            else:
                self._memory, (scanned, scales, kv_rows, norms) = _allocate(
                    (rows, torch.int8),
                    (rows[:4], torch.float32),
                    ((*rows[:4], 2 * spec.row_size), pool.k.dtype),
                    ((*heads, 2), torch.float32),
                )
                self.page_refusal = advise_huge_pages(self._memory)
                norms.zero_()
        except RuntimeError as error:  # torch's, of its allocator
            raise TierFullError(
                f"tier {pool.tier}: no {format_size(self.num_bytes)} for what bounded attention keeps beside K and V: "
                f"ask for fewer tokens, a smaller budget or `kv_dtype` int8"
            ) from error
        self._layers = tuple(
            ScannedLayer(
                scanned=scanned[layer_idx],
                scales=scales[layer_idx],
                rows=None if kv_rows is None else kv_rows[layer_idx],
                v=pool.layer(layer_idx)[1],
                v_scales=pool.scales(layer_idx)[1],
                norms=norms[layer_idx],
                kept=self.kept,
            )
            for layer_idx in range(spec.num_layers)
        )

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._pool.spec.block_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks."""
        return self._pool.num_blocks * scan_bytes_per_block(self._pool.spec)

    @property
    def key_bytes(self) -> int:
        """Bytes of one key of one layer and head that a scan reads."""
        return self._pool.spec.row_size + SCALE_WORD_BYTES

    @property
    def kept_bytes(self) -> int:
        """Bytes of K and V of one key of one layer and head that are read where it is kept."""
        spec = self._pool.spec
        value = spec.row_bytes(KVPart.V) + SCALE_WORD_BYTES * spec.num_scale_words(KVPart.V)
        return value if spec.dtype is DType.INT8 else 2 * value

    def pin(self, memory: HostMemory = HOST_MEMORY) -> str | None:
        """Let a GPU read it where it lies for as long as this object lives; returns why that cannot be, or None.

        Cost: touches every page.
        """
        return memory.pin(self._memory, self)

    def layer(self, layer_idx: int) -> ScannedLayer:
        """What is read of one layer."""
        return self._layers[layer_idx]

    def forget(self, block_ids: Iterable[int]) -> None:
        """The blocks are about to be written."""
        for block_id in block_ids:
            self._is_made[block_id] = False

    def find_missing(self, block_ids: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Sequence[int]:
        """Those of some blocks of which it is not true."""
        missing: list[int] = block_ids[~self._is_made[block_ids]].tolist()
        return missing

    def make(self, block_ids: Sequence[int]) -> None:
        """Make it true of blocks whose rows are all stored.

        Cost: reads K and V of the blocks in all layers, with all native threads.
        """
        ids = torch.tensor(block_ids, dtype=torch.int64)
        for layer_idx, layer in enumerate(self._layers):
            k, v = self._pool.layer(layer_idx)
            self._native.copy_for_scan(
                k, v, ids, layer, head_dim=self._pool.spec.head_dim, k_scales=self._pool.scales(layer_idx)[0]
            )
        self._is_made[block_ids] = True


def _allocate(*parts: tuple[Sequence[int], torch.dtype]) -> tuple[Tensor, list[Tensor]]:
    """Memory of whole pages, and tensors of these shapes in it, side by side.

    Raises:
        RuntimeError: torch's, there is not that much.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in parts]
    starts = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
    num_bytes = -(-starts[-1] // _PAGE) * _PAGE
    memory = torch.empty(num_bytes + _PAGE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % _PAGE :][:num_bytes]
    places = zip(parts, starts, sizes, strict=False)
    return memory, [memory[start : start + size].view(dtype).view(shape) for (shape, dtype), start, size in places]

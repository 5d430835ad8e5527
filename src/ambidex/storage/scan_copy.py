"""`ScanCopy`: what bounded attention reads beside a tiled pool, made block by block when a block is complete.

pool int8       norms of rows, a few bytes a block; its K is scanned itself
any other       besides, an 8-bit copy of K in tile order, which is scanned, and K and V row after row, for single
                keys: in tile order a row lies in many lines of memory, each of which holds parts of other rows
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ambidex.core.dtypes import DType
from ambidex.core.errors import TierFullError
from ambidex.core.kv_spec import scan_bytes_per_block
from ambidex.core.units import format_size
from ambidex.kernels.cpu.bounded import BoundedPool, ScannedLayer
from ambidex.storage.host_memory import HOST_MEMORY, HostMemory
from ambidex.storage.huge_pages import advise_huge_pages
from ambidex.storage.tiled_pool import TiledKVPool


class ScanCopy:
    """Belongs to one pool; knows of which blocks it is true.

    Args:
        pool: in host memory.
        native: who makes it.
    Raises:
        TierFullError: there is not that much memory.
    """

    def __init__(self, pool: TiledKVPool, native: BoundedPool) -> None:
        self._pool = pool
        self._native = native
        spec = pool.spec
        heads = (spec.num_layers, spec.num_kv_heads, pool.num_blocks)
        rows = (*heads, spec.block_size, spec.row_size)
        self._is_made = np.zeros(pool.num_blocks, np.bool_)
        try:
            norms = torch.zeros(*heads, 2)
            if pool.k_scales is not None:
                scanned, scales, kv_rows = pool.k, pool.k_scales, None
            else:
                scanned, scales = torch.empty(rows, dtype=torch.int8), torch.empty(rows[:4])
                kv_rows = torch.empty((*rows[:4], 2 * spec.row_size), dtype=pool.k.dtype)
                self.page_refusal = advise_huge_pages(scanned) or advise_huge_pages(kv_rows)
        except RuntimeError as error:  # torch's, of its allocator
            raise TierFullError(
                f"tier {pool.tier}: no {format_size(self.num_bytes)} for what bounded attention keeps beside K and V: "
                f"ask for fewer tokens, a smaller budget or `kv_dtype` int8"
            ) from error
        self._parts = tuple(part for part in (scanned, scales, kv_rows, norms) if part is not None)
        self._layers = tuple(
            ScannedLayer(
                scanned=scanned[layer_idx],
                scales=scales[layer_idx],
                rows=None if kv_rows is None else kv_rows[layer_idx],
                v=pool.layer(layer_idx)[1],
                v_scales=pool.scales(layer_idx)[1],
                norms=norms[layer_idx],
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
        return self._pool.spec.row_size + DType.INT8.num_scale_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of K and V of one key of one layer and head that are read where it is kept."""
        spec = self._pool.spec
        value = spec.row_size * spec.dtype.num_bytes + spec.dtype.num_scale_bytes
        return value if spec.dtype is DType.INT8 else 2 * value

    def pin(self, memory: HostMemory = HOST_MEMORY) -> str | None:
        """Let a GPU read it where it lies for as long as this object lives; returns why that cannot be, or None.

        Cost: touches every page.
        """
        refusals = (memory.pin(part, self) for part in self._parts)
        return next((refusal for refusal in refusals if refusal is not None), None)

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

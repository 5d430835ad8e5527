"""`RowStore`: K and V of the requests that decode as rows in host memory, kept up with their blocks."""

import logging
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from ambidex.attention.context_rows import ContextRows
from ambidex.core.errors import TierFullError
from ambidex.core.ids import KVPart, RequestId, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.storage.host_rows import HostRows
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.row_home import IN_DRAM, RowHome

logger = logging.getLogger(__name__)

ROOM: Final = 256
"""Rows beyond what is there, at first; later as many as there are."""
_WIDE: Final = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16}
"""Numbers of so many bytes: whole rows are copied, whatever they hold."""


class RowStore:
    """Rows of each request.

    Args:
        spec: layers, KV heads and head_dim.
        pools: of both tiers, in one floating format.
        home: where rows lie.
    """

    def __init__(self, spec: ModelSpec, pools: Mapping[Tier, KVPool], home: RowHome = IN_DRAM) -> None:
        self._home = home
        pool = pools[Tier.GPU]
        self._shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
        self._device = pool.device
        self.dtype = pool.k.dtype
        self._rows: dict[RequestId, HostRows] = {}
        self._is_refused = False

    def prepare(
        self, request_id: RequestId, start: int, num_new: int, make_context: Callable[[], ContextRows]
    ) -> HostRows | None:
        """The rows of a request whose positions 0 … start − 1 are all stored, with room for `num_new` more; None: there
        is no memory for them, which is said once.

        Cost: the first time, and where steps have passed by, reads K and V of what is missing in all layers.
        """
        if self._is_refused:
            return None
        rows = self._rows.get(request_id)
        try:
            if rows is None or rows.capacity < start + num_new:
                rows = self._grow(rows, start + num_new)
                self._rows[request_id] = rows
        except (RuntimeError, TierFullError) as error:  # torch's allocator, the driver, or the kernel
            self._is_refused = True
            self._rows.clear()
            logger.warning("keys are read where they lie in their pools, which is slower: %s", error)
            return None
        rows.length = min(rows.length, start)  # what lies behind belonged to steps that are computed again
        if rows.length < start:
            self._fill(rows, start, make_context())
        return rows

    def forget(self, request_id: RequestId) -> None:
        """Give back what a request has."""
        self._rows.pop(request_id, None)

    def _grow(self, rows: HostRows | None, least: int) -> HostRows:
        room = ROOM if rows is None else rows.capacity
        larger = HostRows(self._shape, least + room, dtype=self.dtype, device=self._device, home=self._home)
        if rows is not None:
            larger.take_over(rows)
        return larger

    def _fill(self, rows: HostRows, start: int, context: ContextRows) -> None:
        first = rows.length
        for layer_idx in range(self._shape[0]):
            for part, to in ((KVPart.K, rows.k), (KVPart.V, rows.v)):
                context.copy_to_host(part, layer_idx, to[layer_idx, :, first:start], first)
        rows.length = start


def take_rows(rows: Tensor, places: Tensor, base: Tensor) -> Tensor:
    """Some rows of each head.

    Args:
        rows: [Hkv, n, D], contiguous; on a GPU it may lie in pinned host
            memory, whose rows are read over the link in pieces of 16 bytes.
        places: [Hkv, M] int64; base: [Hkv, 1], head · n.
    Returns:
        [Hkv, M, D].
    """
    num_heads, _, head_dim = rows.shape
    wide = next((kind for size, kind in _WIDE.items() if head_dim * rows.itemsize % size == 0), rows.dtype)
    taken = rows.view(wide).flatten(0, 1).index_select(0, (places + base).flatten())
    return taken.view(rows.dtype).view(num_heads, places.shape[1], head_dim)

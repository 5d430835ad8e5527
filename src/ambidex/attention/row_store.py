"""`RowStore`: K and V of the requests that decode as rows in host memory, kept up with their blocks."""

import logging
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from ambidex.attention.context_rows import ContextRows
from ambidex.core.errors import InternalError, TierFullError
from ambidex.core.ids import KVPart, RequestId, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.storage.host_rows import HostRows
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.row_home import IN_DRAM, RowHome

logger = logging.getLogger(__name__)

_WIDE: Final = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16}
"""Numbers of so many bytes: whole rows are copied, whatever they hold."""


class RowStore:
    """Rows of each request, with room for all its tokens from the first step that needs them until it ends.

    Args:
        spec: layers, KV heads and head_dim.
        pools: of both tiers, in one floating format.
        max_rows: of all requests together; who starts requests sees to it that they have no more tokens.
        home: where rows lie.

    Attributes:
        num_refusals: requests so far for whose rows the machine had no memory.
    """

    def __init__(
        self, spec: ModelSpec, pools: Mapping[Tier, KVPool], *, max_rows: int, home: RowHome = IN_DRAM
    ) -> None:
        self.home = home
        pool = pools[Tier.GPU]
        self._shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
        self._device = pool.device
        self.dtype = pool.k.dtype
        self.max_rows = max_rows
        self._rows: dict[RequestId, HostRows] = {}
        self._refused: set[RequestId] = set()
        self.num_refusals = 0

    @property
    def num_rows(self) -> int:
        """Rows there is memory for now, of all requests."""
        return sum(rows.capacity for rows in self._rows.values())

    def prepare(
        self,
        request_id: RequestId,
        start: int,
        num_new: int,
        *,
        max_tokens: int,
        make_context: Callable[[], ContextRows],
    ) -> HostRows | None:
        """The rows of a request whose positions 0 … start − 1 are all stored, with room for `num_new` more; None: there
        is no memory for them, which is counted, and said once.

        Args:
            max_tokens: that the request can have.
        Raises:
            InternalError: it has more, or all requests together have more than there is room for.
        Cost: the first time, and where steps have passed by, reads K and V of what is missing in all layers.
        """
        if request_id in self._refused:
            return None
        rows = self._rows.get(request_id) or self._open(request_id, max_tokens)
        if rows is None:
            return None
        if start + num_new > rows.capacity:
            raise InternalError(f"request {request_id} has {start + num_new} tokens: {rows.capacity} were announced")
        rows.length = min(rows.length, start)  # what lies behind belonged to steps that are computed again
        if rows.length < start:
            self._fill(rows, start, make_context())
        return rows

    def forget(self, request_id: RequestId) -> None:
        """Give back what a request has."""
        self._rows.pop(request_id, None)
        self._refused.discard(request_id)

    def _open(self, request_id: RequestId, max_tokens: int) -> HostRows | None:
        if self.num_rows + max_tokens > self.max_rows:
            raise InternalError(
                f"request {request_id} of {max_tokens} tokens was started: {self.num_rows} of {self.max_rows} rows are "
                f"taken"
            )
        try:
            rows = HostRows(self._shape, max_tokens, dtype=self.dtype, device=self._device, home=self.home)
        except TierFullError as error:
            if not self.num_refusals:
                logger.warning("keys are read where they lie in their pools, which is slower: %s", error)
            self.num_refusals += 1
            self._refused.add(request_id)
            return None
        self._rows[request_id] = rows
        return rows

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

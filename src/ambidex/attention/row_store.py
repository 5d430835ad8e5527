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
from ambidex.storage.row_arena import RowArena
from ambidex.storage.row_home import IN_DRAM, RowHome

logger = logging.getLogger(__name__)

_WIDE: Final = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16}
"""Numbers of so many bytes: whole rows are copied, whatever they hold."""


class RowStore:
    """Rows of each request, with room for all its tokens from the first step that needs them until it ends.

    The memory of all rows is taken at once, pinned on a GPU, and goes from requests that ended to those that begin.

    Args:
        spec: layers, KV heads and head_dim.
        pools: of both tiers, in one floating format.
        max_rows: of all requests together; who starts requests sees to it that they have no more tokens.
        home: where rows lie.

    Attributes:
        refusal: why the machine has no memory for rows; None: it has.
        num_refusals: requests so far that have none therefore.
    """

    def __init__(
        self, spec: ModelSpec, pools: Mapping[Tier, KVPool], *, max_rows: int, home: RowHome = IN_DRAM
    ) -> None:
        self.home = home
        self.max_rows = max_rows
        pool = pools[Tier.GPU]
        shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
        self._rows: dict[RequestId, HostRows] = {}
        self._refused: set[RequestId] = set()
        self.num_refusals = 0
        self.refusal: str | None = None
        self._arena: RowArena | None = None
        try:
            self._arena = RowArena(shape, max_rows, dtype=pool.k.dtype, device=pool.device, home=home)
        except TierFullError as error:
            self.refusal = str(error)
            logger.warning("keys are read where they lie in their pools, which is slower: %s", error)

    @property
    def num_rows(self) -> int:
        """Rows that requests have room for now."""
        return self._arena.num_taken if self._arena is not None else 0

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
        is no memory for them, which is counted.

        Rows of other requests may move: what was read of `HostRows` in an earlier step does not hold any more.

        Args:
            max_tokens: that the request can have.
        Raises:
            InternalError: it has more, or all requests together have more than there is room for.
        Cost: the first time, and where steps have passed by, waits for the device, and reads K and V of what is missing
            in all layers; see also `RowArena.open`.
        """
        if self._arena is None:
            self.num_refusals += request_id not in self._refused
            self._refused.add(request_id)
            return None
        rows = self._rows.get(request_id)
        if rows is None:
            rows = self._rows[request_id] = self._open(self._arena, request_id, max_tokens)
        if start + num_new > rows.capacity:
            raise InternalError(f"request {request_id} has {start + num_new} tokens: {rows.capacity} were announced")
        rows.length = min(rows.length, start)  # what lies behind belonged to steps that are computed again
        if rows.length < start:
            self._fill(self._arena, rows, start, make_context())
        return rows

    def forget(self, request_id: RequestId) -> None:
        """Give back what a request has. NOTE: the device may still read its rows: whoever gets them waits for it."""
        rows = self._rows.pop(request_id, None)
        if rows is not None and self._arena is not None:
            self._arena.close(rows)
        self._refused.discard(request_id)

    def _open(self, arena: RowArena, request_id: RequestId, max_tokens: int) -> HostRows:
        if self.num_rows + max_tokens > self.max_rows:
            raise InternalError(
                f"request {request_id} of {max_tokens} tokens was started: {self.num_rows} of {self.max_rows} rows are "
                f"taken"
            )
        return arena.open(max_tokens)

    def _fill(self, arena: RowArena, rows: HostRows, start: int, context: ContextRows) -> None:
        """Copy positions rows.length … start − 1 from their blocks."""
        first = rows.length
        arena.settle()  # kernels may still write blocks in host memory, and read these rows: they were another's
        for part, to in ((KVPart.K, rows.k), (KVPart.V, rows.v)):
            context.copy_to_host(part, to[:, :, first:start], first)
        arena.settle()  # the CPU may score keys that come from the device
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

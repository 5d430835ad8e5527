"""`Contexts`: the blocks of decoding requests as arrays, kept from step to step: a step costs only what is new."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ambidex.core.ids import RequestId, Tier
from ambidex.core.step import BlockRef, ScheduledRequest

_TIERS: Final = (Tier.GPU, Tier.DRAM)


class TierBlocks:
    """The blocks of one request on one tier, in ascending position: their ids, and their places in the context."""

    def __init__(self) -> None:
        self.num = 0
        self.ids: NDArray[np.int64] = np.zeros(0, np.int64)  # at least `num` long
        self.places: NDArray[np.int64] = np.zeros(0, np.int64)

    def append(self, block_id: int, place: int) -> None:
        if self.num == len(self.ids):
            self.ids, self.places = (np.resize(array, 2 * self.num + 16) for array in (self.ids, self.places))
        self.ids[self.num], self.places[self.num] = block_id, place
        self.num += 1

    def num_hidden_rows(self, first_visible: int, block_size: int) -> int:
        """Rows of the blocks, side by side, that lie before the position `first_visible`."""
        place, offset = divmod(first_visible, block_size)
        num_blocks = int(self.places[: self.num].searchsorted(place))
        is_cut = num_blocks < self.num and self.places[num_blocks] == place
        return num_blocks * block_size + (offset if is_cut else 0)


@dataclass(slots=True)
class Context:
    """The blocks of one request as they were last seen."""

    blocks: tuple[BlockRef, ...] = ()
    tiers: dict[Tier, TierBlocks] = field(default_factory=lambda: {tier: TierBlocks() for tier in _TIERS})


class Contexts:
    """The contexts of the requests that decode.

    Args:
        max_requests: of a step.
    """

    def __init__(self, *, max_requests: int) -> None:
        self._known: dict[RequestId, Context] = {}
        self._max_requests = max_requests

    def update(self, requests: Sequence[ScheduledRequest]) -> list[Context]:
        """The contexts of a step's requests, with the blocks that they have now.

        Cost: about a microsecond a request whose blocks are those of the last step.
        """
        known, found = self._known, []
        for request in requests:
            context = known.get(request.request_id)
            if context is None:
                context = known[request.request_id] = Context()
            if context.blocks is not request.blocks:
                _follow(context, request.blocks)
            found.append(context)
        if len(known) > 2 * self._max_requests:  # requests that have ended, or that decode no longer
            self._known = {request.request_id: known[request.request_id] for request in requests}
        return found


def _follow(context: Context, blocks: tuple[BlockRef, ...]) -> None:
    """Take over a request's blocks; only those behind what both have in common are looked at."""
    num_known = len(context.blocks)
    if blocks[:num_known] != context.blocks:  # moved to another tier, or computed again after a preemption
        num_known, context.tiers = 0, {tier: TierBlocks() for tier in _TIERS}
    for place in range(num_known, len(blocks)):
        context.tiers[blocks[place].tier].append(blocks[place].block_id, place)
    context.blocks = blocks

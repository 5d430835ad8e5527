"""`Residency`: which blocks of each context belong on the accelerator tier. A policy: it picks and does not act.

    blocks   0 … num_first | … elsewhere … | num_blocks - num_last … num_blocks
    wanted   sink          |               | recent, at least the newest block

When the contexts want more than the tier holds, they share it fairly, and each fills its share in this order: the
newest block (it is written in every step), the sink, then the recent region from its new end to its old one.

A block that the next step will open counts as the newest one already: so its place is kept free, or is cleared in time,
because a demotion frees its source only after its step.

Of a context that is to grow by known tokens, as a prompt that is computed in chunks, only blocks are wanted that will
be so when it has grown: others would have to leave again, too late for those that come to take their places.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ambidex.core.regions import Regions


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentBlocks:
    """Blocks of one context that belong on the accelerator tier: the first `num_first` and the last `num_last`.

    `num_blocks` includes the block that the next step will open, if it opens one.
    """

    num_blocks: int
    num_first: int
    num_last: int

    def __contains__(self, block_idx: int) -> bool:
        return block_idx < self.num_first or block_idx >= self.num_blocks - self.num_last

    def rank(self, block_idx: int) -> int:
        """Place in the order in which a share is filled: newest block, sink, then the newer the earlier."""
        age = self.num_blocks - 1 - block_idx
        if age == 0:
            return 0
        return 1 + block_idx if block_idx < self.num_first else self.num_first + age


class Residency:
    """Sink and recent region on the accelerator tier, as far as its `num_blocks` blocks reach."""

    def __init__(self, regions: Regions, num_blocks: int) -> None:
        self._regions = regions
        self._num_blocks = num_blocks

    def choose(
        self, context_lens: Sequence[int], next_lens: Sequence[int], *, num_doubles: int = 0
    ) -> list[ResidentBlocks]:
        """For each context its blocks that belong on the accelerator tier; in sum, they fit.

        Args:
            context_lens: tokens of each context after the coming step.
            next_lens: tokens to which it is to grow then, at least as many; the last of them may not be known yet.
            num_doubles: places of the tier that several contexts share, counted once less than there are contexts. When
                what is shared leaves the tier, there are fewer in the next step, until all fits.
        """
        return self.share(list(map(self.wants, context_lens, next_lens)), num_doubles=num_doubles)

    def share(self, wants: Sequence[ResidentBlocks], *, num_doubles: int = 0) -> list[ResidentBlocks]:
        """The same from what each context wants, when that is known."""
        numbers = [want.num_first + want.num_last for want in wants]
        if sum(numbers) <= self._num_blocks + num_doubles:
            return list(wants)
        shares = share_fairly(numbers, self._num_blocks + num_doubles)
        return [_within(want, share) for want, share in zip(wants, shares, strict=True)]

    def wants(self, context_len: int, next_len: int) -> ResidentBlocks:
        """What a context would have on the accelerator tier if it were alone there."""
        num_sink = self._regions.num_sink_blocks(context_len)
        num_recent = self._num_recent(context_len, max(context_len, next_len - 1))
        num_blocks = -(-context_len // self._regions.block_size)
        if next_len > num_blocks * self._regions.block_size:
            num_blocks, num_recent = num_blocks + 1, num_recent + 1
        elif num_blocks and not num_recent:  # a context shorter than the sink: its newest block still comes first
            num_sink, num_recent = num_sink - 1, 1
        return ResidentBlocks(num_blocks=num_blocks, num_first=num_sink, num_last=num_recent)

    def _num_recent(self, context_len: int, known_len: int) -> int:
        """Newest blocks behind the sink that will still be wanted when a context has `known_len` tokens; at least the
        newest one."""
        num_now = self._regions.num_recent_blocks(context_len)
        if known_len == context_len:
            return num_now
        num_coming = -(-known_len // self._regions.block_size) - -(-context_len // self._regions.block_size)
        most = self._num_blocks - self._regions.num_sink_blocks(known_len)
        num_kept = min(self._regions.num_recent_blocks(known_len), most) - num_coming
        return min(num_now, max(1, num_kept))


def share_fairly(wants: Sequence[int], capacity: int) -> list[int]:
    """Shares of `capacity` blocks: nobody gets more than it wants, and who gets less gets as much as the others, up to
    one block (the earlier ones get that).

    Source: max-min fairness by water-filling.
    """
    if sum(wants) <= capacity:
        return list(wants)
    level, left = 0, capacity
    for num_done, want in enumerate(sorted(wants)):
        level = left // (len(wants) - num_done)
        if want > level:
            break
        left -= want
    shares = [min(want, level) for want in wants]
    spare = capacity - sum(shares)
    for place, want in enumerate(wants):
        if spare and want > level:
            shares[place] += 1
            spare -= 1
    return shares


def _within(want: ResidentBlocks, share: int) -> ResidentBlocks:
    if share >= want.num_first + want.num_last:
        return want
    newest = min(share, 1)
    num_first = min(want.num_first, share - newest)
    return ResidentBlocks(num_blocks=want.num_blocks, num_first=num_first, num_last=share - num_first)

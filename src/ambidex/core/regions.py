"""Cuts a context into its regions, in blocks.

    tokens   0 … num_sink_tokens | … middle … | context_len - recent_window … context_len
    region   sink                | middle     | recent

A block belongs to the sink if any of its tokens does, else to the recent region if any of its tokens does, else to
the middle. The newest block, which is still being filled, is always recent.
"""

from dataclasses import dataclass
from enum import StrEnum


class Region(StrEnum):
    """Part of a context that is placed as one."""

    SINK = "sink"
    MIDDLE = "middle"
    RECENT = "recent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """How contexts are cut. `recent_window` None: there is no middle, everything behind the sink is recent."""

    block_size: int
    num_sink_tokens: int
    recent_window: int | None

    def num_sink_blocks(self, context_len: int) -> int:
        """Blocks of the sink region of a context of `context_len` tokens."""
        return min(-(-self.num_sink_tokens // self.block_size), self._num_blocks(context_len))

    def num_recent_blocks(self, context_len: int) -> int:
        """Blocks of the recent region; at least the newest block, none in an empty context."""
        total = self._num_blocks(context_len)
        sink = self.num_sink_blocks(context_len)
        if self.recent_window is None:
            return total - sink
        first = max(0, context_len - max(1, self.recent_window)) // self.block_size
        return total - max(sink, first) if context_len else 0

    def region_of(self, block_idx: int, context_len: int) -> Region:
        """Region of the block with index `block_idx` in a context of `context_len` tokens."""
        if block_idx < self.num_sink_blocks(context_len):
            return Region.SINK
        if block_idx >= self._num_blocks(context_len) - self.num_recent_blocks(context_len):
            return Region.RECENT
        return Region.MIDDLE

    def _num_blocks(self, context_len: int) -> int:
        return -(-context_len // self.block_size)

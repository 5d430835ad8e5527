"""Reading old keys where they lie: one reader for each order of a pool, chosen once."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ambidex.attention.metadata import OldKeys
from ambidex.attention.parts import PartAttention
from ambidex.attention.rows import RowReader
from ambidex.attention.state import AttentionState
from ambidex.attention.tiles import TileReader
from ambidex.core.errors import InternalError
from ambidex.storage.kv_pool import KVPool, RowKVPool
from ambidex.storage.tiled_pool import TiledKVPool


class Prepared(Protocol):
    """What a reader makes of the old keys of a step under one window, for all layers with that window."""

    def attend(self, layer_idx: int, q: Tensor) -> AttentionState:
        """The state of all T queries over the old keys.

        Args:
            q: [T, Hq, D] on the pool's device.
        Returns:
            `out` fp32; queries that no part names have seen no key.
        """
        ...


class Reader(Protocol):
    """Attention over the old keys in one pool."""

    reads_own: bool
    """A request with one new token finds that token's key among the old ones, where it was just stored."""

    def prepare(self, parts: Sequence[OldKeys], num_tokens: int) -> Prepared:
        """Prepare for a step of T = `num_tokens` tokens; at least one part, all on the pool's tier."""
        ...


def make_reader(pool: KVPool, *, scale: float, slopes: Sequence[float] | None = None) -> Reader:
    """The reader of a pool's order.

    Args:
        slopes: of query heads, for attention whose scores fall with distance.
    """
    if isinstance(pool, TiledKVPool):
        return TileReader(pool, PartAttention(scale, slopes, pool.device))
    if isinstance(pool, RowKVPool):
        return RowReader(pool, PartAttention(scale, slopes, pool.device))
    raise InternalError(f"no reader for {type(pool).__name__}")

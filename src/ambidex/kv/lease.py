"""`KVLease`, the blocks of one request, and `CachedBlock`, a full block that several requests may read."""

from dataclasses import dataclass, field
from typing import Final

from ambidex.core.ids import RequestId
from ambidex.core.step import BlockMove, BlockRef
from ambidex.kv.block_keys import BlockKey
from ambidex.kv.residency import ResidentBlocks

_NOTHING: Final = ResidentBlocks(num_blocks=0, num_first=0, num_last=0)


@dataclass(slots=True, eq=False)
class KVLease:
    """The blocks of one request, in the order of its tokens; opaque outside of `kv`."""

    request_id: RequestId
    blocks: list[BlockRef] = field(default_factory=list)
    on_accelerator: set[int] = field(default_factory=set)
    moving: dict[int, BlockMove] = field(default_factory=dict)
    wants: ResidentBlocks = _NOTHING
    """What residency would keep of it on the accelerator tier, if there were room for all."""
    context_len: int = 0
    table: tuple[BlockRef, ...] = ()
    """What the last step was told of `blocks`: the same object as long as nothing changes, so that it compares at once.
    Empty when a block has come or moved since."""
    copied_table: tuple[BlockRef, ...] = ()
    """What the last step was told instead, where blocks have copies; likewise the same object."""
    copied_from: tuple[tuple[BlockRef, ...], int, int, int] = ((), 0, 0, 0)
    """What that was made of: the table, the blocks of it that may have copies, and how many copies there were."""
    cached: "dict[int, CachedBlock]" = field(default_factory=dict)
    """Those of its blocks that others can find, by their place."""
    num_named: int = 0
    """Leading blocks that are full and have been offered to the cache."""


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A full block that can be found by its name. Nobody writes to it: any number of leases reads it.

    It lies at the same place of every context that it belongs to, since its name stands for all tokens before it.
    """

    name: BlockKey
    place: BlockRef
    block_idx: int
    tenant: str
    holders: set[KVLease] = field(default_factory=set)
    move: BlockMove | None = None
    last_used: int = 0
    """Number of the release that made it idle; the lower, the longer ago."""
    ticket: int | None = None
    """Its turn in the order of eviction; None: it cannot be evicted now."""
    is_listed: bool = True
    """It can still be found."""
    is_noted: bool = False
    """It has been idle once, and waits or has waited to be copied elsewhere."""

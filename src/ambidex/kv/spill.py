"""Which block leaves DRAM for the CXL tier: the oldest. Picks, and does not act."""

from collections.abc import Iterable, Mapping

from ambidex.core.ids import Tier
from ambidex.kv.lease import KVLease


def find_oldest(
    leases: Iterable[KVLease], num_computed_tokens: Mapping[KVLease, int], *, tier: Tier, block_size: int
) -> tuple[KVLease, int] | None:
    """The block of a tier that lies farthest behind the end of its context, by lease and place; None: there is none.

    Blocks that move, and those that are still written to, are left where they are.

    Args:
        num_computed_tokens: of each lease, before the coming step.
    """
    oldest: tuple[int, KVLease, int] | None = None
    for lease in leases:
        num_full = num_computed_tokens.get(lease, 0) // block_size
        for block_idx, block in enumerate(lease.blocks[:num_full]):
            if block.tier is tier and block_idx not in lease.moving:
                age = len(lease.blocks) - block_idx
                if oldest is None or age > oldest[0]:
                    oldest = (age, lease, block_idx)
                break
    return None if oldest is None else oldest[1:]

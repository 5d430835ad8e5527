"""Copies on the accelerator of blocks in host memory: they lie in free blocks, and end with what they are of."""

import pytest

from ambidex.core.errors import InternalError
from ambidex.core.ids import BlockId, RequestId, Tier
from ambidex.core.regions import Regions
from ambidex.core.step import BlockMove, BlockRef
from ambidex.kv.lease import KVLease
from ambidex.kv.manager import KVManager
from ambidex.kv.prefix_cache import PrefixCacheLimits
from ambidex.kv.tiers import TieredBlocks

SIZE = 4


def make_manager(gpu: int, dram: int, *, recent: int = 4, num_for_copies: int = 0, percent: int = 0) -> KVManager:
    regions = Regions(block_size=SIZE, num_sink_tokens=0, recent_window=recent)
    limits = PrefixCacheLimits(max_idle_percent=percent)
    return KVManager({Tier.GPU: gpu, Tier.DRAM: dram}, regions, limits, num_for_copies=num_for_copies)


def make_lease(kv: KVManager, num_tokens: int, name: str = "a") -> KVLease:
    lease = kv.open(RequestId(name))
    assert kv.try_extend(lease, num_tokens, num_known_tokens=num_tokens)
    return lease


def begin(kv: KVManager, lease: KVLease, *places: int, most: int = 9) -> tuple[BlockMove, ...]:
    """Begin to copy blocks of a lease whose tokens are all computed."""
    num_tokens = lease.context_len
    return kv.begin_copies([lease.blocks[place] for place in places], {lease: num_tokens}, most=most)


def commit(kv: KVManager, *moves: BlockMove) -> None:
    kv.finish_moves([move.move_id for move in moves], ())
    kv.check()


def test_a_copy_is_read_once_it_has_arrived_and_takes_no_free_block() -> None:
    kv = make_manager(5, 8)
    lease = make_lease(kv, 24)  # blocks 0 … 3 in DRAM, 4 and 5 near
    table, num_free = kv.table(lease, 24), kv.num_free_blocks
    (move,) = begin(kv, lease, 1)
    assert (move.source, move.keeps_source) == (table[1], True)
    assert kv.with_copies(lease, table, num_old=5) is table, "it has not arrived"
    commit(kv, move)
    found = kv.with_copies(lease, table, num_old=5)
    assert found == (table[0], move.target, *table[2:])
    assert kv.with_copies(lease, table, num_old=5) is found
    assert kv.with_copies(lease, table, num_old=1) == table, "a block that is written is no copy"
    assert kv.table(lease, 24) == table
    assert kv.num_free_blocks == num_free
    assert kv.usage()[Tier.GPU].copies == 1


def test_who_needs_a_block_gets_that_of_the_last_copy() -> None:
    kv = make_manager(4, 8)
    lease = make_lease(kv, 24)
    moves = begin(kv, lease, 0, 1)
    commit(kv, *moves)
    kv.order_copies([lease.blocks[1]])
    others = [make_lease(kv, 2, name).blocks for name in ("b", "c")]
    assert others == [[BlockRef(Tier.GPU, BlockId(3))], [moves[0].target]], "block 0 was behind block 1"
    assert list(kv.copies) == [lease.blocks[1]]
    kv.check()


def test_copies_leave_room_for_what_residency_wants() -> None:
    kv = make_manager(4, 8, recent=12)
    lease = make_lease(kv, 24)
    assert sum(block.tier is Tier.GPU for block in lease.blocks) == 3, "the next step opens a block"
    assert kv.copy_room == 0
    assert begin(kv, lease, 0, 1) == ()
    kv = make_manager(6, 8, recent=12)
    lease = make_lease(kv, 24)
    assert kv.copy_room == 2
    assert len(begin(kv, lease, 0, 1, 2)) == 2


def test_room_that_is_kept_for_copies_is_not_used_by_contexts() -> None:
    kv = make_manager(6, 8, recent=400, num_for_copies=3)
    lease = make_lease(kv, 32)
    assert sum(block.tier is Tier.GPU for block in lease.blocks) == 2  # and one that the next step opens
    assert kv.copy_room == 3
    full = make_manager(6, 2, recent=400, num_for_copies=3)
    assert sum(block.tier is Tier.GPU for block in make_lease(full, 32).blocks) == 6, "no other tier has room"


def test_blocks_that_are_not_full_that_move_or_that_nobody_reads_are_not_copied() -> None:
    kv = make_manager(8, 8)
    lease = make_lease(kv, 24)
    blocks = list(lease.blocks)
    assert kv.begin_copies(blocks[:2], {lease: 7}, most=9)[0].source == blocks[0]
    assert begin(kv, lease, 0) == (), "it is under way"
    kv.release(lease)
    assert kv.begin_copies(blocks[1:2], {}, most=9) == ()


@pytest.mark.parametrize("is_failed", [False, True])
def test_a_request_that_ends_while_its_block_is_copied_leaves_nothing(*, is_failed: bool) -> None:
    kv = make_manager(5, 8)
    lease = make_lease(kv, 24)
    arrived, late = begin(kv, lease, 0, 1)
    commit(kv, arrived)
    kv.release(lease)
    kv.check()
    assert not kv.copies
    assert kv.num_free_blocks == kv.num_blocks - 2, "source and target may still be read and written"
    kv.finish_moves(*(((), [late.move_id]) if is_failed else ([late.move_id], ())))
    kv.check()
    assert kv.num_free_blocks == kv.num_blocks
    assert not kv.copies


def test_a_copy_that_fails_is_none() -> None:
    kv = make_manager(5, 8)
    lease = make_lease(kv, 24)
    (move,) = begin(kv, lease, 0)
    kv.finish_moves((), [move.move_id])
    kv.check()
    assert not kv.copies
    assert kv.num_failed_moves == 1
    assert begin(kv, lease, 0) != ()


def test_a_shared_block_is_copied_once_and_until_nobody_reads_it() -> None:
    kv = make_manager(6, 12, percent=100)
    tokens = tuple(range(24))
    keys = kv.make_keys(tenant="", salt="")
    lease = make_lease(kv, 24)
    kv.keep_computed(lease, keys, lambda start, end: tokens[start:end], 24)
    (move,) = begin(kv, lease, 0)
    other = kv.open(RequestId("b"), kv.find_prefix(keys, lambda start, end: tokens[start:end], 24))
    commit(kv, move)
    assert kv.with_copies(other, tuple(other.blocks), num_old=5)[0] == move.target
    kv.release(lease)
    kv.check()
    assert len(kv.copies) == 1
    kv.release(other)
    kv.check()
    assert not kv.copies, "its block is idle"


def test_a_block_that_becomes_idle_while_it_is_copied_has_no_copy() -> None:
    kv = make_manager(6, 12, percent=100)
    tokens = tuple(range(24))
    lease = make_lease(kv, 24)
    kv.keep_computed(lease, kv.make_keys(tenant="", salt=""), lambda start, end: tokens[start:end], 24)
    (move,) = begin(kv, lease, 0)
    kv.release(lease)
    commit(kv, move)
    assert not kv.copies
    assert kv.num_free_blocks == kv.num_blocks


def test_a_block_that_moves_on_leaves_its_copy() -> None:
    left = []
    tiers = TieredBlocks({Tier.GPU: 2, Tier.DRAM: 1, Tier.CXL: 1})
    tiers.tell_left = left.append
    block = tiers.try_take(Tier.DRAM)
    assert block is not None
    copy = tiers.begin_copy(block, Tier.GPU)
    assert copy is not None
    assert tiers.num_moving_from(Tier.DRAM) == 0, "it does not leave"
    tiers.commit_move(copy.move_id)
    with pytest.raises(InternalError, match="is to be copied, but is not used or has a copy"):
        tiers.begin_copy(block, Tier.GPU)
    spill = tiers.begin_move(block, Tier.CXL)
    assert spill is not None
    assert tiers.copies
    tiers.commit_move(spill.move_id)
    tiers.check()
    assert not tiers.copies
    assert left == [block]
    with pytest.raises(InternalError, match="has no copy"):
        tiers.drop_copy(block)

import pytest

from ambidex.core.errors import InternalError
from ambidex.core.ids import BlockId, MoveId, Tier
from ambidex.core.step import BlockMove, BlockRef
from ambidex.kv.pool import PoolUsage
from ambidex.kv.tiers import TieredBlocks

FREE = PoolUsage(total=1, free=1, used=0, in_flight=0)
USED = PoolUsage(total=1, free=0, used=1, in_flight=0)
IN_FLIGHT = PoolUsage(total=1, free=0, used=0, in_flight=1)
GPU_0 = BlockRef(Tier.GPU, BlockId(0))
DRAM_0 = BlockRef(Tier.DRAM, BlockId(0))


def make_moving() -> tuple[TieredBlocks, BlockMove]:
    """One block on each tier; the accelerator's is on its way to DRAM."""
    tiers = TieredBlocks({Tier.GPU: 1, Tier.DRAM: 1})
    tiers.try_take(Tier.GPU)
    move = tiers.begin_move(GPU_0, Tier.DRAM)
    assert move is not None
    return tiers, move


def states(tiers: TieredBlocks) -> tuple[PoolUsage, PoolUsage]:
    tiers.check()
    usage = tiers.usage()
    return usage[Tier.GPU], usage[Tier.DRAM]


def test_tiers_without_blocks_take_no_part() -> None:
    tiers = TieredBlocks({Tier.DRAM: 2, Tier.GPU: 0})
    assert tiers.tiers == (Tier.DRAM,)
    assert tiers.try_take(Tier.GPU) is None
    assert tiers.try_take(Tier.CXL) is None
    assert tiers.num_free_on(Tier.GPU) == 0


def test_tiers_are_listed_fastest_first() -> None:
    assert TieredBlocks({Tier.CXL: 1, Tier.DRAM: 1, Tier.GPU: 1}).tiers == (Tier.GPU, Tier.DRAM, Tier.CXL)


def test_begin_move_reserves_target_and_keeps_source_used() -> None:
    tiers, move = make_moving()
    assert move == BlockMove(move_id=MoveId(0), source=GPU_0, target=DRAM_0)
    assert states(tiers) == (USED, IN_FLIGHT)
    assert tiers.num_moves == 1


def test_begin_move_when_target_full_changes_nothing() -> None:
    tiers = TieredBlocks({Tier.GPU: 1, Tier.DRAM: 1})
    tiers.try_take(Tier.GPU)
    tiers.try_take(Tier.DRAM)
    assert tiers.begin_move(GPU_0, Tier.DRAM) is None
    assert states(tiers) == (USED, USED)
    assert tiers.num_moves == 0


def test_begin_move_to_tier_without_blocks_changes_nothing() -> None:
    tiers = TieredBlocks({Tier.GPU: 1, Tier.DRAM: 1})
    tiers.try_take(Tier.GPU)
    assert tiers.begin_move(GPU_0, Tier.CXL) is None
    assert states(tiers) == (USED, FREE)


def test_begin_move_of_moving_block_raises() -> None:
    tiers, _ = make_moving()
    with pytest.raises(InternalError, match="already moving"):
        tiers.begin_move(GPU_0, Tier.DRAM)


def test_begin_move_of_target_in_flight_raises() -> None:
    tiers, _ = make_moving()
    with pytest.raises(InternalError, match="holds nothing"):
        tiers.begin_move(DRAM_0, Tier.GPU)


def test_begin_move_of_free_block_raises() -> None:
    with pytest.raises(InternalError, match="holds nothing"):
        TieredBlocks({Tier.GPU: 1, Tier.DRAM: 1}).begin_move(GPU_0, Tier.DRAM)


def test_begin_move_to_own_tier_raises() -> None:
    tiers = TieredBlocks({Tier.GPU: 2})
    tiers.try_take(Tier.GPU)
    with pytest.raises(InternalError, match="already on tier gpu"):
        tiers.begin_move(GPU_0, Tier.GPU)


def test_commit_move_frees_source_and_makes_target_used() -> None:
    tiers, move = make_moving()
    tiers.commit_move(move.move_id)
    assert states(tiers) == (FREE, USED)


def test_abort_move_frees_target_and_leaves_source_as_before() -> None:
    tiers, move = make_moving()
    tiers.abort_move(move.move_id)
    assert states(tiers) == (USED, FREE)


def test_source_of_aborted_move_can_move_again() -> None:
    tiers, move = make_moving()
    tiers.abort_move(move.move_id)
    assert tiers.begin_move(GPU_0, Tier.DRAM) == BlockMove(move_id=MoveId(1), source=GPU_0, target=DRAM_0)


def test_release_of_moving_block_frees_nothing_before_the_move_ends() -> None:
    tiers, _ = make_moving()
    tiers.release(GPU_0)
    assert states(tiers) == (USED, IN_FLIGHT)
    assert tiers.num_released(Tier.GPU) == 1


def test_commit_of_released_move_frees_both() -> None:
    tiers, move = make_moving()
    tiers.release(GPU_0)
    tiers.commit_move(move.move_id)
    assert states(tiers) == (FREE, FREE)


def test_abort_of_released_move_frees_both() -> None:
    tiers, move = make_moving()
    tiers.release(GPU_0)
    tiers.abort_move(move.move_id)
    assert states(tiers) == (FREE, FREE)


def test_second_release_of_moving_block_raises() -> None:
    tiers, _ = make_moving()
    tiers.release(GPU_0)
    with pytest.raises(InternalError, match="released twice"):
        tiers.release(GPU_0)


def test_end_of_unknown_move_raises() -> None:
    tiers, move = make_moving()
    tiers.commit_move(move.move_id)
    with pytest.raises(InternalError, match="move 0 ends"):
        tiers.abort_move(move.move_id)


def test_check_when_a_target_is_not_in_flight_raises() -> None:
    tiers, _ = make_moving()
    tiers._pools[Tier.DRAM].commit(BlockId(0))
    with pytest.raises(InternalError, match="not in flight"):
        tiers.check()


def test_check_when_a_source_holds_nothing_raises() -> None:
    tiers, _ = make_moving()
    tiers._pools[Tier.GPU].give_back(BlockId(0))
    with pytest.raises(InternalError, match="holds nothing"):
        tiers.check()


def test_check_when_a_block_flies_without_move_raises() -> None:
    tiers = TieredBlocks({Tier.GPU: 1})
    tiers._pools[Tier.GPU].try_reserve()
    with pytest.raises(InternalError, match="1 blocks are in flight for 0 moves"):
        tiers.check()

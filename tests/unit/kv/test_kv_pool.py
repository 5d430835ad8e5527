from collections.abc import Callable

import pytest

from ambidex.core.errors import InternalError
from ambidex.core.ids import BlockId, Tier
from ambidex.kv.pool import BlockPool, PoolUsage


def make_pool(num_blocks: int = 2) -> BlockPool:
    return BlockPool(Tier.DRAM, num_blocks)


def test_try_take_when_pool_is_empty_returns_none() -> None:
    pool = make_pool(2)
    assert [pool.try_take(), pool.try_take(), pool.try_take()] == [0, 1, None]


def test_pool_of_zero_blocks_is_legal_and_gives_nothing() -> None:
    pool = make_pool(0)
    assert pool.try_take() is None
    assert pool.try_reserve() is None
    pool.check()


def test_pool_of_negative_size_raises() -> None:
    with pytest.raises(InternalError, match="-1 blocks"):
        make_pool(-1)


def test_give_back_makes_the_block_free_again() -> None:
    pool = make_pool(1)
    pool.give_back(BlockId(pool.try_take() or 0))
    assert pool.usage == PoolUsage(total=1, free=1, used=0, in_flight=0)


def test_give_back_of_free_block_raises() -> None:
    with pytest.raises(InternalError, match="block 0 of tier dram is not used"):
        make_pool().give_back(BlockId(0))


def test_give_back_of_block_in_flight_raises() -> None:
    pool = make_pool()
    pool.try_reserve()
    with pytest.raises(InternalError, match="not used"):
        pool.give_back(BlockId(0))


def test_reserved_block_is_in_flight_and_not_used() -> None:
    pool = make_pool(2)
    assert pool.try_reserve() == 0
    assert pool.is_in_flight(BlockId(0))
    assert not pool.is_used(BlockId(0))
    assert pool.usage == PoolUsage(total=2, free=1, used=0, in_flight=1)


def test_commit_makes_block_in_flight_used() -> None:
    pool = make_pool()
    pool.try_reserve()
    pool.commit(BlockId(0))
    assert pool.is_used(BlockId(0))
    pool.check()


def test_cancel_makes_block_in_flight_free() -> None:
    pool = make_pool()
    pool.try_reserve()
    pool.cancel(BlockId(0))
    assert pool.num_free == 2


@pytest.mark.parametrize("end", [BlockPool.commit, BlockPool.cancel])
def test_end_of_flight_for_used_block_raises(end: Callable[[BlockPool, BlockId], None]) -> None:
    pool = make_pool()
    pool.try_take()
    with pytest.raises(InternalError, match="not in flight"):
        end(pool, BlockId(0))


def test_check_when_a_block_is_lost_raises() -> None:
    pool = make_pool()
    pool._free.pop()
    with pytest.raises(InternalError, match="has 2 blocks"):
        pool.check()


def test_check_when_a_block_is_in_two_states_raises() -> None:
    pool = make_pool()
    pool._used.add(BlockId(0))
    with pytest.raises(InternalError, match="has 2 blocks"):
        pool.check()

"""The oldest blocks of DRAM leave for the CXL tier, so that the newer ones stay near."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambidex.core.ids import RequestId, Tier
from ambidex.core.regions import Regions
from ambidex.kv.lease import KVLease
from ambidex.kv.manager import KVManager

SIZE = 4
REGIONS = Regions(block_size=SIZE, num_sink_tokens=0, recent_window=SIZE)


def make_manager(dram: int, cxl: int, *, kept_free: int = 1, gpu: int = 2) -> KVManager:
    return KVManager({Tier.GPU: gpu, Tier.DRAM: dram, Tier.CXL: cxl}, REGIONS, num_kept_free=kept_free)


def grow(manager: KVManager, lease: KVLease, num_tokens: int, *, fails: bool = False) -> bool:
    """A step that makes the lease cover `num_tokens` tokens, and the moves that come with it."""
    before = lease.context_len
    if not manager.try_extend(lease, num_tokens, num_known_tokens=num_tokens):
        return False
    moves = [move.move_id for move in manager.begin_demotions({lease: before})]
    manager.finish_moves([] if fails else moves, moves if fails else [])
    manager.check()
    return True


def tiers(lease: KVLease) -> str:
    return "".join({Tier.GPU: "g", Tier.DRAM: "d", Tier.CXL: "c"}[block.tier] for block in lease.blocks)


def test_oldest_blocks_are_spilled_and_newer_ones_stay_in_dram() -> None:
    manager = make_manager(4, 8)
    lease = manager.open(RequestId("a"))
    for num_tokens in range(1, 11 * SIZE):
        assert grow(manager, lease, num_tokens)
    assert tiers(lease).startswith("ccccc")
    assert "dc" not in tiers(lease)
    assert tiers(lease).count("d") == 3


def test_without_a_cxl_tier_nothing_is_spilled() -> None:
    manager = KVManager({Tier.GPU: 2, Tier.DRAM: 4}, REGIONS, num_kept_free=2)
    lease = manager.open(RequestId("a"))
    for num_tokens in range(1, 6 * SIZE):
        assert grow(manager, lease, num_tokens)
    assert tiers(lease) == "ddddgg"


def test_blocks_that_are_still_written_to_are_not_spilled() -> None:
    manager = make_manager(2, 4, gpu=0)
    lease = manager.open(RequestId("a"))
    assert manager.try_extend(lease, 2 * SIZE, num_known_tokens=2 * SIZE)
    assert manager.begin_demotions({lease: SIZE - 1}) == ()
    moves = manager.begin_demotions({lease: SIZE})
    assert [(move.source, move.target.tier) for move in moves] == [(lease.blocks[0], Tier.CXL)]


def test_spill_that_fails_leaves_the_block_where_it_was() -> None:
    manager = make_manager(2, 4, gpu=0)
    lease = manager.open(RequestId("a"))
    assert grow(manager, lease, 2 * SIZE)
    assert grow(manager, lease, 2 * SIZE, fails=True)
    assert tiers(lease) == "dd"
    assert manager.num_failed_moves == 1


def test_oldest_of_several_contexts_is_spilled_first() -> None:
    manager = make_manager(6, 8, gpu=0, kept_free=1)
    old, young = manager.open(RequestId("old")), manager.open(RequestId("young"))
    assert grow(manager, old, 4 * SIZE)
    assert grow(manager, young, 2 * SIZE)
    moves = manager.begin_demotions({old: 4 * SIZE, young: 2 * SIZE})
    assert [move.source for move in moves] == [old.blocks[0]]


def test_all_tiers_are_used_before_a_context_is_refused() -> None:
    manager = make_manager(3, 3, gpu=2)
    lease = manager.open(RequestId("a"))
    num_tokens = 1
    while grow(manager, lease, num_tokens):
        num_tokens += 1
    assert num_tokens - 1 == 8 * SIZE


@given(
    st.integers(0, 3), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 2 * SIZE), st.booleans()), max_size=60),
)  # fmt: skip
def test_blocks_are_conserved_whatever_grows_fails_and_ends(
    gpu: int, dram: int, cxl: int, kept_free: int, steps: list[tuple[int, int, bool]]
) -> None:
    manager = make_manager(dram, cxl, gpu=gpu, kept_free=kept_free)
    leases: dict[int, KVLease] = {}
    for who, more, fails in steps:
        lease = leases.setdefault(who, manager.open(RequestId(str(who)))) if who not in leases else leases[who]
        if not grow(manager, lease, lease.context_len + more, fails=fails):
            manager.release(leases.pop(who))
            manager.check()
    for lease in leases.values():
        manager.release(lease)
    assert manager.num_free_blocks == gpu + dram + cxl


@pytest.mark.parametrize("dram", [1, 2, 7])
def test_places_kept_free_are_at_most_half_of_dram(dram: int) -> None:
    manager = make_manager(dram, 20, gpu=0, kept_free=100)
    lease = manager.open(RequestId("a"))
    for num_tokens in range(1, 15 * SIZE):
        assert grow(manager, lease, num_tokens)
    assert tiers(lease).count("d") >= dram - dram // 2

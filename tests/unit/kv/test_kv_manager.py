import logging

import pytest

from ambidex.core.errors import ConfigError, InternalError
from ambidex.core.ids import RequestId, Tier
from ambidex.core.regions import Regions
from ambidex.kv.lease import KVLease
from ambidex.kv.manager import KVManager

BLOCK_SIZE = 4


def make_manager(gpu: int, dram: int, *, sink: int = 4, recent: int | None = None) -> KVManager:
    regions = Regions(block_size=BLOCK_SIZE, num_sink_tokens=sink, recent_window=recent)
    return KVManager({Tier.GPU: gpu, Tier.DRAM: dram}, regions)


def make_lease(kv: KVManager, num_tokens: int, *, name: str = "a", num_known: int | None = None) -> KVLease:
    lease = kv.open(RequestId(name))
    assert kv.try_extend(lease, num_tokens, num_known_tokens=num_known or num_tokens)
    return lease


def tiers_of(kv: KVManager, lease: KVLease, num_tokens: int) -> str:
    """One letter a block: g(pu) or d(ram)."""
    return "".join(block.tier[0] for block in kv.table(lease, num_tokens))


def test_manager_without_any_block_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="0 blocks of 4 tokens"):
        make_manager(0, 0)


def test_manager_names_its_size_in_blocks_and_tokens() -> None:
    kv = make_manager(2, 3)
    assert (kv.num_blocks, kv.num_free_blocks, kv.max_context_len, kv.block_size) == (5, 5, 20, 4)


def test_open_twice_for_one_request_raises() -> None:
    kv = make_manager(1, 1)
    kv.open(RequestId("a"))
    with pytest.raises(InternalError, match="already has a lease"):
        kv.open(RequestId("a"))


def test_try_extend_covers_tokens_with_whole_blocks() -> None:
    kv = make_manager(8, 0)
    lease = make_lease(kv, 5)
    assert len(kv.table(lease, 5)) == 2
    assert len(kv.table(lease, 4)) == 1
    assert kv.num_free_blocks == 6


def test_try_extend_within_the_last_block_takes_none() -> None:
    kv = make_manager(8, 0)
    lease = make_lease(kv, 5)
    assert kv.try_extend(lease, 8, num_known_tokens=8)
    assert kv.num_free_blocks == 6


def test_try_extend_when_blocks_run_out_changes_nothing() -> None:
    kv = make_manager(1, 1)
    lease = make_lease(kv, 4)
    assert not kv.try_extend(lease, 12, num_known_tokens=12)
    assert kv.num_free_blocks == 1
    assert kv.try_extend(lease, 8, num_known_tokens=8)


def test_try_extend_puts_middle_blocks_straight_into_dram() -> None:
    kv = make_manager(8, 8, recent=5)
    assert tiers_of(kv, make_lease(kv, 22), 22) == "gdddgg"


def test_try_extend_without_window_shares_what_the_accelerator_holds() -> None:
    kv = make_manager(3, 8)
    assert tiers_of(kv, make_lease(kv, 22), 22) == "gdddgg"


def test_try_extend_at_a_block_boundary_leaves_a_place_for_the_next_block() -> None:
    kv = make_manager(3, 8)
    lease = make_lease(kv, 24)
    assert tiers_of(kv, lease, 24) == "gddddg"
    kv.try_extend(lease, 25, num_known_tokens=25)
    assert tiers_of(kv, lease, 25) == "gddddgg"


def test_try_extend_of_unfinished_prefill_leaves_a_place_for_the_next_block() -> None:
    kv = make_manager(3, 8)
    lease = make_lease(kv, 10, num_known=14)
    assert tiers_of(kv, lease, 10) == "gdg"
    kv.try_extend(lease, 14, num_known_tokens=14)
    assert tiers_of(kv, lease, 14) == "gdgg"


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("recent", [16, None])
def test_prompt_in_any_number_of_chunks_ends_with_its_newest_blocks_on_the_accelerator(
    num_chunks: int, recent: int | None
) -> None:
    kv = make_manager(8, 64, recent=recent)
    lease = kv.open(RequestId("a"))
    length = 40 * num_chunks
    for num_computed in range(0, length, 40):
        assert kv.try_extend(lease, num_computed + 40, num_known_tokens=length)
        moves = kv.begin_demotions({lease: num_computed})
        kv.finish_moves([move.move_id for move in moves], [])
    tiers = tiers_of(kv, lease, length)
    assert tiers[0] == "g"
    assert tiers.endswith("gggg" if recent else "ggggg")
    kv.check()


def test_try_extend_with_full_accelerator_uses_dram() -> None:
    kv = make_manager(2, 8)
    make_lease(kv, 7, name="a")
    assert tiers_of(kv, make_lease(kv, 3, name="b"), 3) == "d"


def test_try_extend_with_full_dram_keeps_middle_blocks_on_the_accelerator() -> None:
    kv = make_manager(6, 1, recent=1)
    assert tiers_of(kv, make_lease(kv, 22), 22).count("d") == 1


def test_try_extend_without_accelerator_blocks_uses_dram() -> None:
    kv = make_manager(0, 8)
    assert tiers_of(kv, make_lease(kv, 9), 9) == "ddd"
    assert kv.begin_demotions({}) == ()


def test_table_beyond_what_is_covered_raises() -> None:
    kv = make_manager(8, 0)
    lease = make_lease(kv, 4)
    with pytest.raises(InternalError, match="does not cover 5 tokens"):
        kv.table(lease, 5)


def test_num_missing_blocks_counts_from_what_is_held() -> None:
    kv = make_manager(8, 0)
    lease = make_lease(kv, 5)
    assert [kv.num_missing_blocks(lease, num_tokens) for num_tokens in (0, 8, 9)] == [0, 0, 1]
    assert kv.num_missing_blocks(None, 9) == 3


def test_begin_demotions_picks_full_middle_blocks() -> None:
    kv = make_manager(8, 8, recent=5)
    lease = make_lease(kv, 10)
    kv.try_extend(lease, 18, num_known_tokens=18)
    (move,) = kv.begin_demotions({lease: 10})
    assert move.source == kv.table(lease, 18)[1]
    assert move.target.tier is Tier.DRAM


def test_begin_demotions_spares_blocks_written_in_this_step() -> None:
    kv = make_manager(8, 8, recent=5)
    lease = make_lease(kv, 10)
    kv.try_extend(lease, 18, num_known_tokens=18)
    assert kv.begin_demotions({lease: 7}) == ()


def test_begin_demotions_spares_blocks_that_already_move() -> None:
    kv = make_manager(8, 8, recent=5)
    lease = make_lease(kv, 10)
    kv.try_extend(lease, 18, num_known_tokens=18)
    assert len(kv.begin_demotions({lease: 10})) == 1
    assert kv.begin_demotions({lease: 10}) == ()


def test_begin_demotions_with_full_dram_moves_what_fits() -> None:
    kv = make_manager(8, 1, recent=1)
    lease = make_lease(kv, 4)
    for num_tokens in range(5, 22):
        kv.try_extend(lease, num_tokens, num_known_tokens=num_tokens)
    assert len(kv.begin_demotions({lease: 20})) == 1


def test_begin_demotions_when_a_second_request_comes_cuts_the_share_of_the_first() -> None:
    kv = make_manager(4, 8)
    first = make_lease(kv, 15, name="a")
    make_lease(kv, 15, name="b")
    moves = kv.begin_demotions({first: 15})
    assert [move.source for move in moves] == [kv.table(first, 15)[1], kv.table(first, 15)[2]]


def make_demoting() -> tuple[KVManager, KVLease, int]:
    """A lease of five blocks whose second one is on its way to DRAM."""
    kv = make_manager(8, 8, recent=5)
    lease = make_lease(kv, 10)
    kv.try_extend(lease, 18, num_known_tokens=18)
    (move,) = kv.begin_demotions({lease: 10})
    return kv, lease, move.move_id


def test_table_names_the_source_until_the_move_is_committed() -> None:
    kv, lease, _ = make_demoting()
    assert tiers_of(kv, lease, 8) == "gg"


def test_finish_moves_makes_the_target_readable() -> None:
    kv, lease, move_id = make_demoting()
    kv.finish_moves([move_id], [])
    assert tiers_of(kv, lease, 8) == "gd"
    assert kv.num_moves == kv.num_failed_moves == 0
    kv.check()


def test_failed_move_is_counted_and_leaves_the_block(caplog: pytest.LogCaptureFixture) -> None:
    kv, lease, move_id = make_demoting()
    with caplog.at_level(logging.WARNING):
        kv.finish_moves([], [move_id])
    assert tiers_of(kv, lease, 8) == "gg"
    assert kv.num_failed_moves == 1
    assert "moves failed: 1" in caplog.text
    kv.check()


def test_failed_move_is_tried_again_in_a_later_step() -> None:
    kv, lease, move_id = make_demoting()
    kv.finish_moves([], [move_id])
    assert len(kv.begin_demotions({lease: 10})) == 1


def test_finish_moves_of_unknown_move_raises() -> None:
    kv, _, move_id = make_demoting()
    with pytest.raises(InternalError, match="ends, but is not in flight"):
        kv.finish_moves([move_id], [move_id])


@pytest.mark.parametrize("is_failed", [False, True])
def test_release_while_a_move_is_in_flight_frees_all_when_it_ends(is_failed: bool) -> None:
    kv, lease, move_id = make_demoting()
    kv.release(lease)
    kv.check()
    assert kv.num_free_blocks == kv.num_blocks - 2
    kv.finish_moves([] if is_failed else [move_id], [move_id] if is_failed else [])
    kv.check()
    assert kv.num_free_blocks == kv.num_blocks


def test_released_lease_cannot_be_used() -> None:
    kv = make_manager(2, 0)
    lease = make_lease(kv, 4)
    kv.release(lease)
    with pytest.raises(InternalError, match="lease of a has ended"):
        kv.try_extend(lease, 8, num_known_tokens=8)


def test_check_when_a_block_has_two_owners_raises() -> None:
    kv = make_manager(4, 0)
    first, second = make_lease(kv, 4, name="a"), make_lease(kv, 4, name="b")
    second.blocks[0] = first.blocks[0]
    with pytest.raises(InternalError, match="two leases"):
        kv.check()


def test_check_when_a_used_block_has_no_owner_raises() -> None:
    kv = make_manager(4, 0)
    make_lease(kv, 8).blocks.pop()
    with pytest.raises(InternalError, match="2 used blocks, but 1 are owned"):
        kv.check()

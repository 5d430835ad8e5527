import pytest

from ambidex.core.regions import Regions
from ambidex.kv.residency import Residency, ResidentBlocks, share_fairly

BLOCK_SIZE = 4


def resident(
    context_len: int, *, capacity: int, sink: int = 4, recent: int | None = None, next_len: int | None = None
) -> list[int]:
    """Blocks of a lone context that belong on the accelerator; the block that is opened next is among them."""
    regions = Regions(block_size=BLOCK_SIZE, num_sink_tokens=sink, recent_window=recent)
    (chosen,) = Residency(regions, capacity).choose([context_len], [context_len if next_len is None else next_len])
    return [block_idx for block_idx in range(chosen.num_blocks) if block_idx in chosen]


@pytest.mark.parametrize(
    ("wants", "capacity", "shares"),
    [
        ([], 5, []),
        ([2, 3], 5, [2, 3]),
        ([2, 3], 0, [0, 0]),
        ([5, 5], 7, [4, 3]),
        ([1, 5, 5], 7, [1, 3, 3]),
        ([5, 1, 5], 8, [4, 1, 3]),
        ([9, 0, 9], 1, [1, 0, 0]),
        ([3, 3, 3], 2, [1, 1, 0]),
    ],
)
def test_share_fairly_fills_equally_and_leaves_what_is_not_wanted(
    wants: list[int], capacity: int, shares: list[int]
) -> None:
    assert share_fairly(wants, capacity) == shares


def test_residency_without_recent_window_wants_all_blocks() -> None:
    assert resident(18, capacity=5) == [0, 1, 2, 3, 4]


def test_residency_with_recent_window_wants_sink_and_recent() -> None:
    assert resident(38, capacity=10, recent=5) == [0, 8, 9]


def test_residency_with_recent_window_of_zero_wants_the_newest_block() -> None:
    assert resident(38, capacity=10, sink=0, recent=0) == [9]


def test_residency_of_context_inside_the_sink_wants_it() -> None:
    assert resident(6, capacity=10, sink=16, recent=1) == [0, 1]


@pytest.mark.parametrize(
    ("capacity", "blocks"), [(0, []), (1, [4]), (2, [0, 4]), (3, [0, 3, 4]), (4, [0, 2, 3, 4]), (5, [0, 1, 2, 3, 4])]
)
def test_residency_with_small_share_takes_newest_then_sink_then_recent(capacity: int, blocks: list[int]) -> None:
    assert resident(18, capacity=capacity) == blocks


def test_residency_of_context_inside_the_sink_with_small_share_takes_newest_then_first() -> None:
    assert resident(15, capacity=2, sink=16) == [0, 3]


def test_residency_counts_the_block_that_is_opened_next() -> None:
    assert resident(16, capacity=4, next_len=17) == [0, 2, 3, 4]


def test_residency_without_a_block_opened_next_counts_what_is_there() -> None:
    assert resident(15, capacity=4, next_len=16) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("context_len", "known_len", "blocks"),
    [
        (20, 40, [0, 4, 5]),  # none of it will be recent: the newest block, and the one that is opened next
        (32, 40, [0, 7, 8]),
        (35, 40, [0, 7, 8, 9]),
        (36, 40, [0, 7, 8, 9]),
        (40, 40, [0, 7, 8, 9]),
    ],
)
def test_residency_of_a_prompt_in_chunks_wants_what_it_will_want_at_its_end(
    context_len: int, known_len: int, blocks: list[int]
) -> None:
    assert resident(context_len, capacity=10, recent=10, next_len=known_len) == blocks


def test_residency_of_a_prompt_in_chunks_without_window_wants_what_the_tier_will_hold() -> None:
    assert resident(20, capacity=10, next_len=36) == [0, 1, 2, 3, 4, 5]
    assert resident(20, capacity=6, next_len=36) == [0, 4, 5]
    assert resident(28, capacity=6, next_len=36) == [0, 4, 5, 6, 7]
    assert resident(36, capacity=6, next_len=36) == [0, 4, 5, 6, 7, 8]


def test_residency_of_empty_context_is_empty() -> None:
    assert resident(0, capacity=4) == []


def test_residency_of_more_contexts_than_blocks_gives_the_earlier_ones_a_block() -> None:
    regions = Regions(block_size=BLOCK_SIZE, num_sink_tokens=4, recent_window=None)
    chosen = Residency(regions, 2).choose([10, 10, 10], [10, 10, 10])
    assert [each.num_first + each.num_last for each in chosen] == [1, 1, 0]


def test_residency_lets_a_long_context_use_what_a_short_one_leaves() -> None:
    regions = Regions(block_size=BLOCK_SIZE, num_sink_tokens=4, recent_window=None)
    chosen = Residency(regions, 6).choose([4, 40], [4, 40])
    assert [each.num_first + each.num_last for each in chosen] == [1, 5]


def test_rank_orders_newest_sink_recent_and_the_rest() -> None:
    blocks = ResidentBlocks(num_blocks=7, num_first=2, num_last=2)
    assert sorted(range(7), key=blocks.rank) == [6, 0, 1, 5, 4, 3, 2]

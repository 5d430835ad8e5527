"""Which number of exact layers is tried next, on made-up results."""

import pytest

from ambidex.eval.exact_layers import find_fewest, list_candidates, next_candidate


def search(candidates: list[int], fewest: int) -> list[int]:
    """What is tried, one after the other, where numbers from `fewest` on meet the criterion."""
    tried: dict[int, bool] = {}
    while (num := next_candidate(tried, candidates)) is not None:
        assert num not in tried, "nothing is measured twice"
        tried[num] = num >= fewest
    assert find_fewest(tried) == min((num for num in candidates if num >= fewest), default=None)
    return list(tried)


@pytest.mark.parametrize(
    ("first", "num_layers", "wanted"),
    [
        (2, 30, [2, 6, 10, 14, 18, 22, 26, 29]),
        (1, 32, [1, 5, 9, 13, 17, 21, 25, 29, 31]),
        (27, 30, [27, 29]),
        (29, 30, [29]),
        (30, 30, [29]),  # no layer's early query is good: all but the last
        (1, 4, [1, 2, 3]),
        (2, 2, [1]),
        (1, 1, [1]),
    ],
)
def test_candidates_go_from_the_first_to_all_layers_but_one(first: int, num_layers: int, wanted: list[int]) -> None:
    assert list_candidates(first, num_layers) == wanted


def test_first_number_that_does_ends_the_search() -> None:
    assert search([2, 6, 10, 14, 18, 22, 26, 29], 1) == [2]


def test_fewest_layers_are_found_by_bisection() -> None:
    candidates = [2, 6, 10, 14, 18, 22, 26, 29]
    assert search(candidates, 14) == [2, 18, 10, 14]
    assert search(candidates, 15) == [2, 18, 10, 14]
    assert search(candidates, 29) == [2, 18, 26, 29]
    for fewest in range(1, 31):
        assert len(search(candidates, fewest)) <= 4


def test_no_number_that_does_is_found_out() -> None:
    assert search([2, 6, 10, 14, 18, 22, 26, 29], 99) == [2, 18, 26, 29]
    assert search([3], 99) == [3], "what is set by hand is tried alone"


def test_results_that_do_not_rise_still_end_with_one_that_meets_the_criterion() -> None:
    """Noise: 18 fails although 10 would do; nobody asks 10, and 22 does."""
    results = {2: False, 10: True, 18: False, 22: True, 26: True}
    tried: dict[int, bool] = {}
    while (num := next_candidate(tried, [2, 6, 10, 14, 18, 22, 26, 29])) is not None:
        tried[num] = results[num]
    assert list(tried) == [2, 18, 26, 22]
    assert find_fewest(tried) == 22

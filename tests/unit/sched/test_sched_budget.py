import pytest

from ambidex.core.errors import InternalError
from ambidex.sched.budget import TokenBudget


def test_offer_is_cut_to_what_is_left_and_takes_nothing() -> None:
    budget = TokenBudget(5)
    assert [budget.offer(3), budget.offer(8), budget.num_left] == [3, 5, 5]


def test_take_lowers_what_is_left() -> None:
    budget = TokenBudget(5)
    budget.take(3)
    assert budget.num_left == 2


def test_take_of_more_than_is_left_raises() -> None:
    with pytest.raises(InternalError, match="6 tokens are taken from a budget that has 5"):
        TokenBudget(5).take(6)

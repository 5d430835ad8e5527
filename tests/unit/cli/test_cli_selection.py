"""What statistics say of a policy, to people and to scripts."""

from ambidex.cli.show import hot_rows, selection_rows, stats_json, stats_rows
from ambidex.core.hot import HotFigures
from ambidex.core.step import SelectionFigures
from ambidex.engine.stats import EngineStats

KNOWN = SelectionFigures(
    num_choices=10, num_visible=1000, num_attended=250, num_bounded=10, sum_dropped_mass=0.05, max_dropped_mass=0.01,
    max_error_bound=0.75, num_verified=3, max_error=0.5,
)  # fmt: skip


def test_without_a_policy_nothing_is_said() -> None:
    assert selection_rows(EngineStats()) == []
    assert stats_json(EngineStats())["selection"] is None


def test_a_policy_that_knows_its_error_says_it() -> None:
    stats = EngineStats(selection=KNOWN)
    assert selection_rows(stats) == [
        ("keys attended", "25.0 % of those that decode steps could see"),
        ("mass dropped", "5.00e-03, at most 1.00e-02"),
        ("error bound", "at most 0.75 in an attention output"),
        ("bounds verified", "3, largest error 0.5"),
    ]
    assert set(selection_rows(stats)) < set(stats_rows(stats))
    assert stats_json(stats)["selection"]["num_attended"] == 250


def test_a_policy_that_does_not_know_says_only_what_it_attended() -> None:
    stats = EngineStats(selection=SelectionFigures(num_choices=4, num_visible=10, num_attended=10))
    assert selection_rows(stats) == [("keys attended", "100.0 % of those that decode steps could see")]


def test_figures_of_steps_are_added_up_and_their_maxima_kept() -> None:
    other = SelectionFigures(num_choices=5, num_visible=10, num_attended=10, max_dropped_mass=0.005, max_error=0.7)
    both = KNOWN.join(other)
    assert (both.num_choices, both.num_visible, both.num_attended) == (15, 1010, 260)
    assert (both.max_dropped_mass, both.max_error, both.sum_dropped_mass) == (0.01, 0.7, 0.05)
    assert both.mean_dropped_mass == 0.005
    assert SelectionFigures().mean_dropped_mass == 0.0


def test_what_came_of_hot_blocks_is_said() -> None:
    stats = EngineStats(
        hot=HotFigures(num_blocks=3, num_promoted=10, num_dropped=7, num_looks=4, num_kept=80, num_hits=20)
    )
    assert hot_rows(stats) == [
        ("hot blocks copied", "10, 7 of them given up, 3 there now"),
        ("kept keys of blocks in DRAM", "25.0 % in blocks with a copy, in 4 looks"),
    ]
    assert set(hot_rows(stats)) < set(stats_rows(stats))
    assert stats_json(stats)["hot"]["num_hits"] == 20
    assert hot_rows(EngineStats()) == []
    assert stats_json(EngineStats())["hot"] is None

"""HybridGen's feedback on recorded stage times: what it does to the number of keys and to the mode."""

import itertools
from dataclasses import replace

import pytest

from ambidex.core.policy import HybridGenMode
from ambidex.core.selection import SelectionDecision, SelectionLimits, SelectionSetting, StageTimes
from ambidex.sched.feedback import STEPS_UNTIL_POST, SelectionFeedback, find_patience, next_setting

POST, PRE = HybridGenMode.POST, HybridGenMode.PRE
LIMITS = SelectionLimits(floor=100, ceiling=2000)


def times(share: float, *, transfer: float = 0.25) -> StageTimes:
    """A step whose CPU part and transfer take this share of the GPU's 10 ms."""
    return StageTimes(gpu_s=0.01, cpu_s=0.01 * share * (1 - transfer), transfer_s=0.01 * share * transfer)


def follow(setting: SelectionSetting, shares: list[float], limits: SelectionLimits = LIMITS) -> SelectionSetting:
    for share in shares:
        setting = next_setting(setting, times(share), limits)
    return setting


@pytest.mark.parametrize(
    ("share", "wanted"),
    [(0.5, 440), (0.89, 440), (0.9, 400), (0.95, 400), (1.0, 400), (1.01, 360), (1.2, 133), (5.0, 100)],
)
def test_hidden_work_selects_more_and_work_that_shows_less(share: float, wanted: int) -> None:
    got = follow(SelectionSetting(num_selected=400), [share])
    assert (got.num_selected, got.mode) == (wanted, POST)


def test_transfer_counts_as_much_as_scores() -> None:
    late = StageTimes(gpu_s=0.01, cpu_s=0.001, transfer_s=0.0095)
    assert next_setting(SelectionSetting(num_selected=400), late, LIMITS).num_selected == 360


def test_number_stays_between_floor_and_ceiling() -> None:
    assert follow(SelectionSetting(num_selected=400), [0.1] * 100).num_selected == 2000
    got = follow(SelectionSetting(num_selected=400), [2.0] * 100, replace(LIMITS, may_switch=False))
    assert (got.num_selected, got.mode) == (100, POST)


def test_mode_changes_only_at_the_floor_and_comes_back_after_roomy_steps() -> None:
    setting = SelectionSetting(num_selected=400)
    trace = []
    for _ in range(20):
        setting = next_setting(setting, times(1.5), LIMITS)
        trace.append((setting.num_selected, setting.mode))
    switched = [mode for _, mode in trace].index(PRE)
    assert trace[switched - 1] == (100, POST)
    assert all(mode is POST for _, mode in trace[:switched])
    assert trace[-1] == (100, PRE)
    back = follow(setting, [0.3] * 2)
    assert back.mode is PRE, "the running mean still remembers"
    assert follow(setting, [0.3] * (STEPS_UNTIL_POST + 6)).mode is POST
    assert follow(setting, [0.7] * 100).mode is PRE, "hidden, but no room for all scores"


def test_one_late_step_among_many_does_not_change_the_direction() -> None:
    setting = follow(SelectionSetting(num_selected=400), [0.5] * 3)
    assert follow(setting, [1.6]).num_selected > setting.num_selected


def test_variants_of_the_ablation_keep_what_they_fix() -> None:
    shares = [0.2] * 10 + [3.0] * 30 + [0.2] * 30
    fixed = SelectionLimits(floor=100, ceiling=2000, may_resize=False, may_switch=False)
    for mode in (PRE, POST):
        got = follow(SelectionSetting(num_selected=400, mode=mode), shares, fixed)
        assert (got.num_selected, got.mode) == (400, mode)
    setting, modes = SelectionSetting(num_selected=400), set()
    for share in shares:
        setting = next_setting(setting, times(share), replace(fixed, may_switch=True))
        modes.add(setting.mode)
        assert setting.num_selected == 400
    assert modes == {PRE, POST}


def test_function_is_pure() -> None:
    setting = SelectionSetting(num_selected=400, times=times(0.5))
    assert next_setting(setting, times(0.7), LIMITS) == next_setting(setting, times(0.7), LIMITS)
    assert setting == SelectionSetting(num_selected=400, times=times(0.5))


def test_a_step_without_times_changes_nothing() -> None:
    feedback = SelectionFeedback(SelectionSetting(num_selected=400), LIMITS)
    feedback.update(None)
    assert feedback.setting == SelectionSetting(num_selected=400)
    feedback.update(times(0.5))
    assert feedback.setting.num_selected == 440


def test_scoring_all_again_is_tried_less_often_where_it_does_not_last() -> None:
    """In post the CPU takes twice the accelerator's time, in pre next to none: each return lasts one step."""
    setting = SelectionSetting(num_selected=100)
    modes = []
    for _ in range(400):
        setting = next_setting(setting, times(2.0 if setting.mode is POST else 0.1), LIMITS)
        modes.append(setting.mode)
    returns = [place for place, (a, b) in enumerate(itertools.pairwise(modes)) if (a, b) == (PRE, POST)]
    gaps = [b - a for a, b in itertools.pairwise(returns)]
    assert gaps == [18, 34, 66, 130], "16, 32, … roomy steps in pre, then two in post: one to lower, one to see"
    assert modes.count(POST) < 0.03 * len(modes)


def test_patience_is_short_again_once_scoring_all_has_lasted() -> None:
    setting = SelectionSetting(num_selected=100, mode=PRE, num_returns=3)
    setting = follow(setting, [0.1] * 64)
    assert (setting.mode, find_patience(setting)) == (POST, 128)
    setting = follow(setting, [0.95] * 130)
    assert setting.mode is POST
    setting = follow(setting, [20.0] * 10, replace(LIMITS, may_resize=False))
    assert (setting.mode, find_patience(setting)) == (PRE, STEPS_UNTIL_POST)


def test_held_setting_stays_whatever_is_measured_and_is_let_go() -> None:
    told: list[SelectionDecision] = []
    feedback = SelectionFeedback(SelectionSetting(num_selected=400), LIMITS, tell=told.append)
    held = SelectionSetting(num_selected=7, mode=PRE)
    feedback.hold(held)
    feedback.update(times(0.1))
    assert feedback.setting == held
    assert not told
    feedback.follow(SelectionSetting(num_selected=400))
    feedback.update(times(0.1))
    assert feedback.setting.num_selected == 440
    assert [decision.after for decision in told] == [feedback.setting]

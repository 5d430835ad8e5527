"""How many keys HybridGen selects and in which mode, from measured stage times: a pure function, and who applies it.

Source: arXiv:2604.18529, as digests tell it: work of the CPU that hides behind the GPU's is an occasion to select more;
work that shows is a reason to select less, down to a floor; if it still shows, keys are chosen before they are scored.
Step sizes, smoothing and the way back are not published, and are this project's.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ambidex.core.policy import HybridGenMode
from ambidex.core.selection import SelectionDecision, SelectionLimits, SelectionSetting, StageTimes

logger = logging.getLogger(__name__)

HIDDEN: Final = 0.9
"""CPU and transfer below this share of the GPU's time are hidden; between it and 1 nothing changes."""
ROOMY: Final = 0.6
"""Below this share there is room for scoring all keys, which costs more than scoring a few."""
STEP: Final = 0.1
"""Share by which the number of keys changes at once."""
SMOOTHING: Final = 0.3
"""Weight of the newest times in the running mean."""
STEPS_UNTIL_POST: Final = 8
"""Roomy steps one after the other before all keys are scored again."""
MOST_PATIENCE: Final = 512
"""Where that does not last as many steps, it takes twice as many the next time, up to this."""


def next_setting(setting: SelectionSetting, times: StageTimes, limits: SelectionLimits) -> SelectionSetting:
    """The setting of the next step, from this one's and its times."""
    mean = times if setting.times is None else mean_times(setting.times, times)
    share = (mean.cpu_s + mean.transfer_s) / mean.gpu_s if mean.gpu_s > 0 else float("inf")
    num_roomy = setting.num_roomy_steps + 1 if share < ROOMY else 0
    setting = replace(setting, times=mean, num_roomy_steps=num_roomy, num_steps=setting.num_steps + 1)
    if share > 1:
        return _lower(setting, mean, limits)
    if share >= HIDDEN:
        return setting
    if setting.mode is HybridGenMode.PRE and limits.may_switch and setting.num_roomy_steps >= find_patience(setting):
        return replace(
            setting,
            mode=HybridGenMode.POST,
            times=None,
            num_roomy_steps=0,
            num_steps=0,
            num_returns=setting.num_returns + 1,
        )
    if not limits.may_resize:
        return setting
    more = max(setting.num_selected + 1, round(setting.num_selected * (1 + STEP)))
    return replace(setting, num_selected=min(more, max(limits.ceiling, limits.floor)))


def find_patience(setting: SelectionSetting) -> int:
    """Roomy steps in a row after which all keys are scored again."""
    return min(STEPS_UNTIL_POST << min(setting.num_returns, 32), MOST_PATIENCE)


def _lower(setting: SelectionSetting, mean: StageTimes, limits: SelectionLimits) -> SelectionSetting:
    """Fewer keys, by a step or by as many as the times say: only the transfer takes less with fewer. At the floor,
    choose before scores are made."""
    if limits.may_resize and setting.num_selected > limits.floor:
        fitting = 0.0
        if mean.transfer_s > 0:
            fitting = setting.num_selected * (mean.gpu_s - mean.cpu_s) / mean.transfer_s
        fewer = min(setting.num_selected - 1, round(setting.num_selected * (1 - STEP)), int(max(0.0, fitting)))
        return replace(setting, num_selected=max(fewer, limits.floor))
    if limits.may_switch and setting.mode is not HybridGenMode.PRE:
        lasted = setting.num_steps > find_patience(setting)
        return replace(
            setting,
            mode=HybridGenMode.PRE,
            times=None,
            num_roomy_steps=0,
            num_steps=0,
            num_returns=0 if lasted else setting.num_returns,
        )
    return setting


def mean_times(past: StageTimes, newest: StageTimes) -> StageTimes:
    """The running mean."""
    return StageTimes(
        gpu_s=_mean(past.gpu_s, newest.gpu_s),
        cpu_s=_mean(past.cpu_s, newest.cpu_s),
        transfer_s=_mean(past.transfer_s, newest.transfer_s),
    )


class SelectionFeedback:
    """The setting of the next step, which follows the stage times of those before.

    Args:
        first: before anything is measured.
        tell: is told each decision; None: nobody is.
    """

    def __init__(
        self,
        first: SelectionSetting,
        limits: SelectionLimits,
        *,
        tell: Callable[[SelectionDecision], None] | None = None,
    ) -> None:
        self.setting = first
        self.limits = limits
        self._tell = tell
        self._is_held = False

    def tell_to(self, tell: Callable[[SelectionDecision], None] | None) -> None:
        """Whom to tell from now on."""
        self._tell = tell

    def hold(self, setting: SelectionSetting) -> None:
        """Keep to a setting, whatever times are measured."""
        self.setting, self._is_held = setting, True

    def follow(self, setting: SelectionSetting) -> None:
        """Go on from a setting as times have it."""
        self.setting, self._is_held = setting, False

    def update(self, times: StageTimes | None) -> None:
        """Take in a step's times; None: none were measured, nothing changes."""
        if times is None or self._is_held:
            return
        before, self.setting = self.setting, next_setting(self.setting, times, self.limits)
        if self._tell is not None:
            self._tell(SelectionDecision(before=before, times=times, limits=self.limits, after=self.setting))
        if (before.num_selected, before.mode) != (self.setting.num_selected, self.setting.mode):
            logger.debug(
                "selection: %d keys, %s (accelerator %.6f s, scores %.6f s, transfer %.6f s)",
                self.setting.num_selected, self.setting.mode, times.gpu_s, times.cpu_s, times.transfer_s,
            )  # fmt: skip


def _mean(past: float, newest: float) -> float:
    return (1 - SMOOTHING) * past + SMOOTHING * newest

"""How many keys HybridGen selects and in which mode, from measured stage times: a pure function.

Source: arXiv:2604.18529, as digests tell it: work of the CPU that hides behind the GPU's is an occasion to select more;
work that shows is a reason to select less, down to a floor; if it still shows, keys are chosen before they are scored.
Step sizes, smoothing and the way back are not published, and are this project's.
"""

from dataclasses import dataclass, replace
from typing import Final

from ambidex.core.policy import HybridGenMode

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


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one step: the GPU's stage, the CPU's scores, and the transfer of scores and values."""

    gpu_s: float
    cpu_s: float
    transfer_s: float

    def mean_with(self, newest: "StageTimes") -> "StageTimes":
        """The running mean."""
        return StageTimes(
            gpu_s=_mean(self.gpu_s, newest.gpu_s),
            cpu_s=_mean(self.cpu_s, newest.cpu_s),
            transfer_s=_mean(self.transfer_s, newest.transfer_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSetting:
    """What holds for the next step. `times` is the running mean since the last change of mode."""

    num_selected: int
    mode: HybridGenMode = HybridGenMode.POST
    times: StageTimes | None = None
    num_roomy_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionLimits:
    """Between `floor` (what accuracy needs) and `ceiling` (the keys that there are). Variants of the paper's ablation:
    `may_resize` and `may_switch` False fix the number and the mode."""

    floor: int
    ceiling: int
    may_resize: bool = True
    may_switch: bool = True


def next_setting(setting: SelectionSetting, times: StageTimes, limits: SelectionLimits) -> SelectionSetting:
    """The setting of the next step, from this one's and its times."""
    mean = times if setting.times is None else setting.times.mean_with(times)
    share = (mean.cpu_s + mean.transfer_s) / mean.gpu_s if mean.gpu_s > 0 else float("inf")
    setting = replace(setting, times=mean, num_roomy_steps=setting.num_roomy_steps + 1 if share < ROOMY else 0)
    if share > 1:
        return _lower(setting, limits)
    if share >= HIDDEN:
        return setting
    if setting.mode is HybridGenMode.PRE and limits.may_switch and setting.num_roomy_steps >= STEPS_UNTIL_POST:
        return replace(setting, mode=HybridGenMode.POST, times=None, num_roomy_steps=0)
    if not limits.may_resize:
        return setting
    more = max(setting.num_selected + 1, round(setting.num_selected * (1 + STEP)))
    return replace(setting, num_selected=min(more, max(limits.ceiling, limits.floor)))


def _lower(setting: SelectionSetting, limits: SelectionLimits) -> SelectionSetting:
    if limits.may_resize and setting.num_selected > limits.floor:
        fewer = min(setting.num_selected - 1, round(setting.num_selected * (1 - STEP)))
        return replace(setting, num_selected=max(fewer, limits.floor))
    if limits.may_switch and setting.mode is not HybridGenMode.PRE:
        return replace(setting, mode=HybridGenMode.PRE, times=None, num_roomy_steps=0)
    return setting


def _mean(past: float, newest: float) -> float:
    return (1 - SMOOTHING) * past + SMOOTHING * newest

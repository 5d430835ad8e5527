"""How many keys a selecting policy takes and in which mode: what the control plane tells the data plane, and the stage
times that come back."""

from dataclasses import dataclass

from ambidex.core.policy import HybridGenMode


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of one step: the GPU's stage, the CPU's scores, and the transfer of scores and values."""

    gpu_s: float
    cpu_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionSetting:
    """What holds for the next step: keys of each KV head, and how they are found. `times` is the running mean since the
    last change of mode."""

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

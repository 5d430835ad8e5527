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
    num_steps: int = 0
    """Steps since the last change of mode."""
    num_returns: int = 0
    """Times that all keys were scored again, since that lasted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionLimits:
    """Between `floor` (what accuracy needs) and `ceiling` (the keys that there are). Variants of the paper's ablation:
    `may_resize` and `may_switch` False fix the number and the mode."""

    floor: int
    ceiling: int
    may_resize: bool = True
    may_switch: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionDecision:
    """What became of a setting by a step's times."""

    before: SelectionSetting
    times: StageTimes
    limits: SelectionLimits
    after: SelectionSetting


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareState:
    """Which share of the keys in DRAM the stream lane reads, the next step's size, and the last one's direction (1
    more, −1 less, 0 none yet)."""

    share: float
    step: float
    direction: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareDecision:
    """What became of a share: `cpu_last` is the share of the step's layers in which the CPU lane ended last, `achieved`
    the share that the stream lane really took."""

    before: ShareState
    cpu_last: float
    achieved: float
    after: ShareState

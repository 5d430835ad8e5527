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
class LaneTimes:
    """Seconds of a step on the accelerator, and what the link and the CPU lane would need for all its keys in DRAM, by
    their rates."""

    step_s: float
    link_s: float
    dram_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareSeen:
    """What a step shows: `cpu_last` is the share of its layers in which the CPU lane ended last (None: it had no keys),
    `asked` the share of the keys in DRAM that was asked for, `achieved` what the stream lane really took: less where
    its buffer is full. `times` None: nobody has timed it."""

    cpu_last: float | None
    asked: float
    achieved: float
    times: LaneTimes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareState:
    """Which share of the keys in DRAM the stream lane reads, the next step's size, and the last one's direction (1
    more, −1 less, 0 none yet).

    What is known of about as many keys as the link needs `link_s` for: mean seconds of steps of both lanes, since the
    share has settled, and of those where all keys travelled; how many steps of the last form count, the share before
    it, and whether it may be had.
    """

    share: float
    step: float
    direction: int
    link_s: float | None = None
    mixed_s: float | None = None
    alone_s: float | None = None
    num_steps: int = 0
    mixed_share: float = 0.0
    may_be_alone: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareDecision:
    """What became of a share by what a step showed."""

    before: ShareState
    seen: ShareSeen
    after: ShareState

"""The predicted time of a decode step under a placement.

    ── layer ───────────────────────────────────────────────────────────────
    GPU    norms   q,k,v,o of its rows     attention over its keys    MLP of its neurons
    CPU            q,k,v,o of its rows     attention over its keys    MLP of its neurons
    link   weights and keys of the streamed parts, through the whole step

A layer's phases follow each other; in each, GPU and CPU work side by side. So a step takes the longest of

    path   fixed + Σ over layers and phases of max(GPU, CPU + handover)
    link   streamed bytes / copy rate
    dram   idle + (bytes that the CPU reads + streamed bytes − what copies bring while the CPU idles) / rate of both
"""

from dataclasses import dataclass
from typing import Final

from ambidex.core.errors import InternalError
from ambidex.core.placement import Placement, WeightSplit
from ambidex.cost.units import LayerUnits, StepUnits
from ambidex.cost.workload import KVShares

ATTENTION_WEIGHTS: Final = "attention's weights"
ATTENTION: Final = "attention"
MLP_WEIGHTS: Final = "MLP's weights"
HEAD: Final = "head"
FIXED: Final = "norms, activations, launches; scheduling"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPrediction:
    """Seconds of a step and of what it consists of.

    `path_s`, `link_s` and `dram_s` are the three of which the longest is the step. `gpu_s` and `cpu_s` are how long
    each works in all; `terms` are the same by what is done, those of CPU and link among them.
    """

    path_s: float
    link_s: float
    dram_s: float
    gpu_s: float
    cpu_s: float
    cpu_phase_s: float
    """Of the path: phases in which the CPU ends last."""
    terms: tuple[tuple[str, float], ...]
    batch: int
    accelerator: str
    """GPU, or CPU where that is the accelerator."""

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return max(self.path_s, self.link_s, self.dram_s)

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together."""
        return self.batch / self.step_s

    @property
    def binds(self) -> str:
        """What the step waits for most."""
        if self.step_s == self.path_s:
            return "CPU" if self.cpu_phase_s > self.path_s / 2 else self.accelerator
        return "link" if self.step_s == self.link_s else "DRAM, read by the CPU and by copies at once"


@dataclass(frozen=True, slots=True)
class _Phase:
    """One phase of the path: seconds of both sides; `handover_s` counts if the CPU has work."""

    name: str
    gpu_s: float
    cpu_s: float
    handover_s: float

    @property
    def cpu_total_s(self) -> float:
        return self.cpu_s + self.handover_s if self.cpu_s > 0 else 0.0

    @property
    def path_s(self) -> float:
        return max(self.gpu_s, self.cpu_total_s)


def predict_step(units: StepUnits, placement: Placement, kv: KVShares) -> StepPrediction:
    """Predict a decode step.

    Raises:
        InternalError: the placement is of another number of layers, or has parts off an accelerator that is the CPU.
    """
    if len(placement.layers) != len(units.layers):
        raise InternalError(f"a placement of {len(placement.layers)} layers for a model of {len(units.layers)}")
    if not units.has_link and not (placement.is_all_on_gpu and kv.on_gpu == 1.0):
        raise InternalError("the accelerator is the CPU: there is no other place for weights and keys")
    phases = [
        phase
        for layer, where in zip(units.layers, placement.layers, strict=True)
        for phase in _layer_phases(units, layer, where.attention, where.mlp, kv)
    ]
    head = placement.head
    phases.append(
        _Phase(
            HEAD, (head.on_gpu + head.streamed) * units.gpu_head_s, head.on_cpu * units.cpu_head_s,
            units.head_handover_s,
        )
    )  # fmt: skip
    fixed = units.fixed_s
    path = fixed + sum(phase.path_s for phase in phases)
    idle = fixed + sum(phase.handover_s if phase.cpu_s > 0 else phase.gpu_s for phase in phases)
    weights_read, weights_streamed = _weights_bytes(units, placement)
    kv_bytes = sum(layer.kv_bytes for layer in units.layers)
    streamed = weights_streamed + kv.streamed * kv_bytes
    read = weights_read + kv.on_cpu * kv_bytes
    return StepPrediction(
        path_s=path,
        link_s=streamed * units.link_s_per_byte,
        dram_s=idle * (1 - units.copies_share) + (read + streamed) * units.beside_s_per_byte if units.has_link else 0.0,
        gpu_s=fixed + sum(phase.gpu_s for phase in phases),
        cpu_s=sum(phase.cpu_s for phase in phases),
        cpu_phase_s=sum(phase.path_s for phase in phases if phase.cpu_total_s > phase.gpu_s),
        terms=_sum_terms(units, fixed, phases, weights_streamed, kv.streamed * kv_bytes),
        batch=units.batch,
        accelerator=units.accelerator,
    )


def _layer_phases(
    units: StepUnits, layer: LayerUnits, attention: WeightSplit, mlp: WeightSplit, kv: KVShares
) -> tuple[_Phase, _Phase, _Phase]:
    return (
        _Phase(
            ATTENTION_WEIGHTS,
            (attention.on_gpu + attention.streamed) * layer.gpu_attention_s,
            attention.on_cpu * layer.cpu_attention_s,
            units.attention_handover_s,
        ),
        _Phase(ATTENTION, (kv.on_gpu + kv.streamed) * layer.gpu_kv_s, kv.on_cpu * layer.cpu_kv_s, units.kv_handover_s),
        _Phase(
            MLP_WEIGHTS,
            (mlp.on_gpu + mlp.streamed) * layer.gpu_mlp_s,
            mlp.on_cpu * layer.cpu_mlp_s,
            units.mlp_handover_s,
        ),
    )


def _weights_bytes(units: StepUnits, placement: Placement) -> tuple[float, float]:
    """Bytes that the CPU reads, and bytes that are streamed."""
    read, streamed = placement.head.on_cpu * units.head_bytes, placement.head.streamed * units.head_bytes
    for layer, where in zip(units.layers, placement.layers, strict=True):
        read += where.attention.on_cpu * layer.attention_bytes
        read += where.mlp.on_cpu * layer.mlp_bytes * layer.cpu_mlp_read
        streamed += where.attention.streamed * layer.attention_bytes + where.mlp.streamed * layer.mlp_bytes
    return read, streamed


def _sum_terms(
    units: StepUnits, fixed_s: float, phases: list[_Phase], weights_streamed: float, kv_streamed: float
) -> tuple[tuple[str, float], ...]:
    near = units.accelerator
    found = {f"{near}: {FIXED}": fixed_s}
    for phase in phases:
        for side, seconds in ((near, phase.gpu_s), ("CPU", phase.cpu_s)):
            found[f"{side}: {phase.name}"] = found.get(f"{side}: {phase.name}", 0.0) + seconds
        handover = phase.handover_s if phase.cpu_s > 0 else 0.0
        found["CPU: handovers"] = found.get("CPU: handovers", 0.0) + handover
    found["link: weights"] = weights_streamed * units.link_s_per_byte
    found["link: keys and values"] = kv_streamed * units.link_s_per_byte
    return tuple((name, seconds) for name, seconds in found.items() if seconds > 0)

"""`PlacementProblem`: what is to be placed, what it costs where, how much fits, and what the user has pinned."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from ambidex.core.errors import ConfigError
from ambidex.core.placement import Placement, WeightSplit
from ambidex.core.units import MIB
from ambidex.cost.units import StepUnits
from ambidex.cost.workload import KVShares

ROUNDING: Final = 1e-6
"""Of shares."""
MARGIN_BYTES: Final = MIB
"""Of each budget that is not given out: fractions of matrices are rounded to rows, and programs solved to 1e-7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """What the user has decided; the rest is solved around it. Attention and MLP are by layer."""

    attention: Mapping[int, WeightSplit] = field(default_factory=dict)
    mlp: Mapping[int, WeightSplit] = field(default_factory=dict)
    head: WeightSplit | None = None
    kv: KVShares | None = None

    def check(self, num_layers: int) -> None:
        """Refuse layers that are not there.

        Raises:
            ConfigError: names them and the last layer.
        """
        unknown = sorted(idx for idx in {*self.attention, *self.mlp} if not 0 <= idx < num_layers)
        if unknown:
            names = ", ".join(map(str, unknown[:8]))
            raise ConfigError(f"layers {names} are pinned: the model has the layers 0 to {num_layers - 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementProblem:
    """One workload on one machine.

    `gpu_bytes` and `dram_bytes` are the budgets (`dram_bytes` None: as much as is needed); of the first, what is not
    divided takes `gpu_fixed_bytes`: embedding, norms, workspace, graphs, buffers of keys. `ring_bytes` are buffers
    through which weights in DRAM travel, if any lie there. `is_head_whole`: the head is the table of
    tokens, which lies on the GPU.
    """

    units: StepUnits
    gpu_bytes: int
    gpu_fixed_bytes: int = 0
    ring_bytes: int = 0
    least_kv_bytes: int = 0
    """Of GPU memory kept for keys, whatever this workload's: other traffic will need them."""
    dram_bytes: int | None = None
    most_kv_streamed: float = 1.0
    """Share of all keys that buffers on the GPU let travel in a step, unless keys are pinned."""
    is_head_whole: bool = False
    pins: Pins = Pins()

    @property
    def pinned_head(self) -> WeightSplit | None:
        """Where the head must lie."""
        return WeightSplit() if self.is_head_whole else self.pins.head


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of a placement on each tier, by what they are."""

    gpu: Mapping[str, int]
    dram: Mapping[str, int]

    @property
    def gpu_bytes(self) -> int:
        """All on the GPU."""
        return sum(self.gpu.values())

    @property
    def dram_bytes(self) -> int:
        """All in DRAM."""
        return sum(self.dram.values())


def measure_memory(problem: PlacementProblem, placement: Placement, kv: KVShares) -> MemoryUse:
    """Bytes that a placement takes."""
    units, head = problem.units, placement.head
    on_gpu, on_cpu, streamed = (share * units.head_bytes for share in (head.on_gpu, head.on_cpu, head.streamed))
    for layer, where in zip(units.layers, placement.layers, strict=True):
        parts = ((layer.attention_bytes, where.attention), (layer.mlp_bytes, where.mlp))
        on_gpu += sum(size * split.on_gpu for size, split in parts)
        on_cpu += sum(size * split.on_cpu for size, split in parts)
        streamed += sum(size * split.streamed for size, split in parts)
    return MemoryUse(
        gpu={
            "weights": round(on_gpu),
            "embedding, norms, workspace": problem.gpu_fixed_bytes,
            "buffers of weights on their way": 0 if placement.is_all_on_gpu else problem.ring_bytes,
            "keys and values": max(problem.least_kv_bytes, round(kv.on_gpu * units.kv_gpu_bytes)),
        },
        dram={
            "weights, multiplied there": round(on_cpu),
            "weights, streamed": round(streamed),
            "keys and values": round((kv.on_cpu + kv.streamed) * units.kv_dram_bytes),
        },
    )


def fits(problem: PlacementProblem, placement: Placement, kv: KVShares) -> bool:
    """Whether a placement is within both budgets, and what keys travel within their buffers."""
    use = measure_memory(problem, placement, kv)
    dram_fits = problem.dram_bytes is None or use.dram_bytes <= problem.dram_bytes
    keys_fit = problem.pins.kv is not None or kv.streamed <= problem.most_kv_streamed + ROUNDING
    return use.gpu_bytes <= problem.gpu_bytes and dram_fits and keys_fit

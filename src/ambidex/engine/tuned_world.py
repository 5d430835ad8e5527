"""`EngineWorld`: the tuner's questions, answered for a built engine: its memory for weights and for keys is fixed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from ambidex.core.placement import Placement
from ambidex.cost.fit import LaneTerms, lane_terms
from ambidex.cost.step import predict_step
from ambidex.cost.units import Coefficients, make_units
from ambidex.cost.workload import KVShares
from ambidex.engine.auto_placement import AutoPlacement
from ambidex.sched.tuner import Bucket, Where
from ambidex.solver.problem import MARGIN_BYTES, Pins, PlacementProblem
from ambidex.solver.solve import solve_placement

CACHED: Final = 256
"""Problems that are kept: a step asks for a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedMemory:
    """What an engine has once it is built.

    `weight_bytes`: of divided weights on the GPU; `kv_gpu_tokens`: of all requests; `stream_share`: of keys in DRAM.
    """

    weight_bytes: int
    kv_gpu_tokens: int
    stream_share: float


class EngineWorld:
    """One engine.

    Args:
        auto: model, machine, and what was solved at start.
        fixed: its memory.
        reach: the nearest placement that its chunks of weights can make.
    """

    def __init__(self, auto: AutoPlacement, fixed: FixedMemory, reach: Callable[[Placement], Placement]) -> None:
        self._auto, self._fixed, self._reach = auto, fixed, reach
        self._problem = lru_cache(CACHED)(self._make_problem)

    def keys(self, batch: int, context: int) -> KVShares:
        """Where keys of a workload lie."""
        on_gpu = min(1.0, self._fixed.kv_gpu_tokens / max(1, batch * context))
        streamed = (1.0 - on_gpu) * self._fixed.stream_share
        return KVShares(on_gpu=on_gpu, on_cpu=1.0 - on_gpu - streamed, streamed=streamed)

    def solve(self, bucket: Bucket, coefficients: Coefficients) -> Where:
        """The best placement for a bucket, as chunks can make it.

        Raises:
            ConfigError: nothing fits.
        """
        solution = solve_placement(self._problem(*bucket, coefficients))
        return Where(placement=self._reach(solution.placement), kv=self.keys(*bucket))

    def predict_s(self, bucket: Bucket, coefficients: Coefficients, where: Where) -> float:
        """Seconds of a step of a bucket."""
        return predict_step(self._problem(*bucket, coefficients).units, where.placement, self.keys(*bucket)).step_s

    def terms(self, batch: int, context: int, where: Where) -> LaneTerms:
        """Terms of each lane."""
        return lane_terms(
            self._problem(batch, context, Coefficients()).units, where.placement, self.keys(batch, context)
        )

    def move_s(self, old: Where, new: Where) -> float:
        """Seconds of the link for weights that come to the GPU; what leaves it is only given up."""
        link = self._auto.profile.link
        if link is None:
            return 0.0
        units = self._problem(1, 1, Coefficients()).units
        sizes = [size for layer in units.layers for size in (layer.attention_bytes, layer.mlp_bytes)]
        pairs = zip([*sizes, units.head_bytes], old.placement.splits(), new.placement.splits(), strict=True)
        return sum(size * max(0.0, to.on_gpu - was.on_gpu) for size, was, to in pairs) / link.to_gpu_bytes_per_s

    def _make_problem(self, batch: int, context: int, coefficients: Coefficients) -> PlacementProblem:
        auto = self._auto
        workload = replace(auto.workload, batch=batch, context=context)
        units = make_units(auto.spec, auto.weights, auto.profile, workload, dtype=auto.dtype, coefficients=coefficients)
        kv = self.keys(batch, context)
        head = units.head_bytes if auto.problem.is_head_whole else 0
        room = self._fixed.weight_bytes + head + round(kv.on_gpu * units.kv_gpu_bytes) + auto.problem.ring_bytes
        return replace(
            auto.problem, units=units, gpu_bytes=room + 2 * MARGIN_BYTES, gpu_fixed_bytes=0, least_kv_bytes=0,
            dram_bytes=None, pins=Pins(kv=kv),
        )  # fmt: skip

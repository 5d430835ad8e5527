"""`PlanWorld`: the tuner's questions, answered by the cost model and the solver."""

from dataclasses import replace
from functools import lru_cache
from typing import Final

from ambidex.core.placement import Placement, WeightSplit
from ambidex.cost.fit import LaneTerms, lane_terms
from ambidex.cost.step import StepPrediction, predict_step
from ambidex.cost.units import Coefficients
from ambidex.cost.workload import KVShares
from ambidex.sched.tuner import Bucket, Where
from ambidex.solver.planning import PlanRequest, make_problem
from ambidex.solver.problem import PlacementProblem, measure_memory
from ambidex.solver.solve import solve_placement

ROUNDING: Final = 1e-6
CACHED: Final = 256
"""Problems and predictions that are kept: a step asks for a few, an hour of traffic for some dozens."""


class PlanWorld:
    """One model on one machine.

    Args:
        request: model, machine and budgets; its workload is replaced by each question's.
    """

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self.problem = lru_cache(CACHED)(self._make_problem)
        self.predict = lru_cache(CACHED)(self._predict)

    def solve(self, bucket: Bucket, coefficients: Coefficients) -> Where:
        """The best placement for a bucket.

        Raises:
            ConfigError: nothing fits.
        """
        solution = solve_placement(self.problem(*bucket, coefficients))
        return Where(placement=solution.placement, kv=solution.kv)

    def predict_s(self, bucket: Bucket, coefficients: Coefficients, where: Where) -> float:
        """Seconds of a step of a bucket; infinite if the weights' placement leaves no room for its keys."""
        found = self.predict(*bucket, coefficients, where)
        return float("inf") if found is None else found.step_s

    def terms(self, batch: int, context: int, where: Where) -> LaneTerms:
        """Terms of each lane; none if the placement does not fit."""
        problem = self.problem(batch, context, Coefficients())
        kv = keys_that_fit(problem, where)
        return {} if kv is None else lane_terms(problem.units, where.placement, kv)

    def move_s(self, old: Where, new: Where) -> float:
        """Seconds of the link for weights that come to the GPU or leave it, the larger of both ways."""
        link = self._request.profile.link
        if link is None:
            return 0.0
        to_gpu, from_gpu = self.moved_bytes(old.placement, new.placement)
        return max(to_gpu / link.to_gpu_bytes_per_s, from_gpu / link.from_gpu_bytes_per_s)

    def moved_bytes(self, old: Placement, new: Placement) -> tuple[float, float]:
        """Bytes of weights that come to the GPU, and that leave it."""
        units = self.problem(1, 1, Coefficients()).units
        sizes = [size for layer in units.layers for size in (layer.attention_bytes, layer.mlp_bytes)]
        changes = [
            size * (after.on_gpu - before.on_gpu)
            for size, before, after in zip([*sizes, units.head_bytes], old.splits(), new.splits(), strict=True)
        ]
        to_gpu, from_gpu = (sum(max(0.0, sign * change) for change in changes) for sign in (1, -1))
        return (float(round(to_gpu)), float(round(from_gpu)))

    def _make_problem(self, batch: int, context: int, coefficients: Coefficients) -> PlacementProblem:
        workload = replace(self._request.workload, batch=batch, context=context)
        return make_problem(replace(self._request, workload=workload), coefficients)

    def _predict(self, batch: int, context: int, coefficients: Coefficients, where: Where) -> StepPrediction | None:
        problem = self.problem(batch, context, coefficients)
        kv = keys_that_fit(problem, where)
        return None if kv is None else predict_step(problem.units, where.placement, kv)


def keys_that_fit(problem: PlacementProblem, where: Where) -> KVShares | None:
    """The shares of keys that weights leave room for: those wanted, or fewer on the GPU and the rest divided likewise.

    None: there is no room for those that must lie on the GPU.
    """
    kv, units = where.kv, problem.units
    nothing = measure_memory(problem, where.placement, KVShares(on_gpu=0.0, on_cpu=1.0))
    kept = nothing.gpu["keys and values"]
    share = max(0.0, problem.gpu_bytes - nothing.gpu_bytes + kept) / units.kv_gpu_bytes
    if share < units.least_kv_on_gpu * (1 - ROUNDING):
        return None
    on_gpu = min(max(kv.on_gpu, units.least_kv_on_gpu), max(share, units.least_kv_on_gpu), 1.0)
    away = kv.on_cpu + kv.streamed
    on_cpu = (1 - on_gpu) * (kv.on_cpu / away if away else 1.0)
    return KVShares(on_gpu=on_gpu, on_cpu=on_cpu, streamed=1 - on_gpu - on_cpu)


def redirect(old: Placement, new: Placement) -> Placement:
    """What can change at once: weights in DRAM are divided between CPU and link as `new` has them, none moves."""

    def split(before: WeightSplit, after: WeightSplit) -> WeightSplit:
        away, wanted = 1.0 - before.on_gpu, after.on_cpu + after.streamed
        streamed = away * after.streamed / wanted if wanted else before.streamed
        return WeightSplit(on_gpu=before.on_gpu, on_cpu=away - streamed, streamed=streamed)

    layers = tuple(
        replace(layer, attention=split(layer.attention, to.attention), mlp=split(layer.mlp, to.mlp))
        for layer, to in zip(old.layers, new.layers, strict=True)
    )
    return Placement(layers=layers, head=split(old.head, new.head))

"""`placement` auto: where weights lie is solved for the traffic that the settings allow, and steps are predicted."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from ambidex.core.config import EngineConfig
from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError
from ambidex.core.model_spec import ModelSpec
from ambidex.core.placement import Placement
from ambidex.core.units import format_size
from ambidex.cost.step import StepPrediction, predict_step
from ambidex.cost.units import BLOCK_SIZE, kv_specs, make_units, most_streamed
from ambidex.cost.weights import ModelWeights, Residence, count_weights
from ambidex.cost.workload import KVShares, Workload
from ambidex.engine.report import ReportRow
from ambidex.hw.profile import Curve, HardwareProfile
from ambidex.sched.plan_world import keys_that_fit
from ambidex.sched.tuner import Where
from ambidex.solver.problem import Pins, PlacementProblem
from ambidex.solver.published import RULES, batches_up_to, choose_batch, rule_name
from ambidex.solver.solve import Solution, solve_placement

AUTO: Final = "auto"
"""In place of a file's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes: of both tiers, of what else the accelerator holds beside weights and keys, of buffers for weights on their
    way."""

    gpu: int
    dram: int
    gpu_fixed: int
    ring: int
    stream_blocks: int
    """Of keys of one layer and all requests, on their way in a decode step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoPlacement:
    """A solved placement, and what steps should take with it."""

    spec: ModelSpec
    weights: ModelWeights
    dtype: DType
    profile: HardwareProfile
    workload: Workload
    problem: PlacementProblem
    solution: Solution
    mlp_reads: Curve | None = None
    """See `make_units`."""

    @property
    def is_by_rule(self) -> bool:
        """The rule of a policy has chosen, batch and placement, and not this engine's solver."""
        return self.solution.how in {rule_name(name) for name in RULES}

    @property
    def placement(self) -> Placement:
        """Where weights lie."""
        return self.solution.placement

    @property
    def why(self) -> str:
        """In a few words."""
        step, workload = self.solution.step, self.workload
        how = self.solution.how if self.is_by_rule else "solved"
        return (
            f"{how} for {workload.batch} x {workload.context} tokens: {1e3 * step.step_s:.2f} ms a step predicted, "
            f"which waits for {step.binds}"
        )

    def predict_step_s(self, batch: int, context: int) -> float | None:
        """Seconds of a decode step of other traffic; None if its keys do not fit beside the weights."""
        step = self.predict_step(batch, context)
        return None if step is None else step.step_s

    def predict_step(self, batch: int, context: int) -> StepPrediction | None:
        """A decode step of other traffic; None if its keys do not fit beside the weights."""
        workload = replace(self.workload, batch=max(1, batch), context=max(1, context))
        units = make_units(self.spec, self.weights, self.profile, workload, dtype=self.dtype, mlp_reads=self.mlp_reads)
        problem = replace(self.problem, units=units)
        kv = keys_that_fit(problem, Where(placement=self.placement, kv=self.solution.kv))
        return None if kv is None else predict_step(units, self.placement, kv)

    def rows(self) -> list[ReportRow]:
        """What `ambidex plan` says, for the engine's report."""
        step, memory, kv = self.solution.step, self.solution.memory, self.solution.kv
        facts = [
            ("workload", f"{self.workload.batch} x {self.workload.context} tokens", "half of the longest context, as "
             f"many running requests as the {'rule has chosen' if self.is_by_rule else 'budgets hold'}"),
            ("step", f"{1e3 * step.step_s:.2f} ms, {step.tokens_per_s:.1f} tokens/s", f"waits for {step.binds}"),
            ("lanes", f"GPU {1e3 * step.gpu_s:.2f} ms, CPU {1e3 * step.cpu_s:.2f} ms, link {1e3 * step.link_s:.2f} ms",
             "side by side"),
            ("keys", f"{100 * kv.on_gpu:.0f} % on the GPU, {100 * kv.on_cpu:.0f} % by the CPU, "
             f"{100 * kv.streamed:.0f} % over the link", "predicted: the engine measures its own shares"),
            ("gpu", format_size(memory.gpu_bytes), f"of {format_size(self.problem.gpu_bytes)}"),
            ("dram", format_size(memory.dram_bytes), f"of {format_size(self.problem.dram_bytes or 0)}"),
            ("rates", self.profile.source, self.profile.date),
        ]  # fmt: skip
        return [ReportRow(section="plan", name=name, value=value, why=why) for name, value, why in facts]


def solve_weights(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    dtype: DType,
    profile: HardwareProfile,
    budgets: Budgets,
    residence: Residence,
    kind: str | None = None,
    mlp_reads: Curve | None = None,
) -> AutoPlacement:
    """Solve for half of the longest context and for as many running requests as both budgets hold; where a policy has a
    rule of its own (`solver/published.py`), for as many as that says.

    Args:
        dtype: of activations and of matrices that are not quantised.
        residence: which quantised matrices the engine keeps; kind: the type of all of them, of dummy weights.
        mlp_reads: as in `make_units`.
    Raises:
        ConfigError: not even one request fits; says which capacity binds.
    """
    weights = count_weights(spec, residence=residence, dtype=dtype, kind=kind)
    context = max(1, (config.max_context_len or spec.max_context_len) // 2)
    gpu_kv, host_kv = kv_specs(spec, dtype=dtype, kv_dtypes=config.kv_dtypes, has_gpu=profile.gpu is not None)

    def workload_of(batch: int) -> Workload:
        return Workload(
            batch=batch, context=context, prompt=context, chunk=config.max_tokens_per_step, kv_dtypes=config.kv_dtypes
        )

    def problem_of(batch: int) -> PlacementProblem:
        return PlacementProblem(
            units=make_units(spec, weights, profile, workload_of(batch), dtype=dtype, mlp_reads=mlp_reads),
            gpu_bytes=budgets.gpu,
            gpu_fixed_bytes=weights.other_bytes + budgets.gpu_fixed,
            least_kv_bytes=(config.kv_gpu_tokens or 0) * gpu_kv.bytes_per_token,
            ring_bytes=budgets.ring,
            dram_bytes=budgets.dram if profile.gpu is not None else None,
            most_kv_streamed=most_streamed(
                spec,
                gpu_kv,
                host_kv,
                step_blocks=budgets.stream_blocks * config.block_size // BLOCK_SIZE,
                num_blocks=batch * -(-context // BLOCK_SIZE),
            ),
            is_head_whole=spec.tie_embeddings,
            pins=_pinned_keys(config, batch * context),
        )

    if config.policy in RULES and profile.link is not None:
        batches = batches_up_to(config.max_running_requests)
        batch, solution = choose_batch(config.policy, ((batch, problem_of(batch)) for batch in batches))
    else:
        batch, solution = _solve(problem_of, config.max_running_requests)
    return AutoPlacement(
        spec=spec, weights=weights, dtype=dtype, profile=profile, workload=workload_of(batch),
        problem=problem_of(batch), solution=solution, mlp_reads=mlp_reads,
    )  # fmt: skip


def _solve(problem_of: Callable[[int], PlacementProblem], batch: int) -> tuple[int, Solution]:
    """The fastest placement, for half as many requests as long as they do not fit."""
    while True:
        try:
            return batch, solve_placement(problem_of(batch))
        except ConfigError:
            if batch == 1:
                raise
            batch //= 2


Predict = Callable[[int, int], float | None]
"""Seconds of a decode step by requests and tokens of each."""


def _pinned_keys(config: EngineConfig, num_tokens: int) -> Pins:
    """Keys whose number on the GPU the user has set."""
    if config.kv_gpu_tokens is None:
        return Pins()
    share = min(1.0, config.kv_gpu_tokens / num_tokens)
    return Pins(kv=KVShares(on_gpu=share, on_cpu=1.0 - share))

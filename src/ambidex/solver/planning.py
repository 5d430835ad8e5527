"""From a model, a machine and a workload to a problem, and from its solution to a plan: what `ambidex plan` prints."""

from dataclasses import dataclass, field, replace
from typing import Final

from ambidex.core.dtypes import DType
from ambidex.core.kv_spec import StreamBuffers
from ambidex.core.model_spec import ModelSpec
from ambidex.core.step import make_buckets
from ambidex.core.units import GIB, MIB
from ambidex.cost.prefill import PrefillPrediction, predict_prefill
from ambidex.cost.units import BLOCK_SIZE, LEAST_GPU_BLOCKS, Coefficients, kv_specs, make_units, most_streamed
from ambidex.cost.weights import ModelWeights
from ambidex.cost.workload import Workload
from ambidex.cost.workspace import STEP_STREAM_SHARE, graph_bytes, workspace_bytes
from ambidex.hw.profile import Curve, HardwareProfile
from ambidex.solver.problem import Pins, PlacementProblem
from ambidex.solver.solve import Solution, gain_of_memory, solve_placement

RING_SHARE: Final = 0.05
"""Of the GPU's budget, at most, for weights on their way from DRAM."""
RING_BYTES: Final = 4 * 64 * MIB
"""For them, at most: four chunks that take a PCIe 5 x16 link 1.2 ms each."""
SHARE_OF_GPU: Final = 0.9
"""Of a GPU's memory, where no budget is named: the engine's default for free memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is asked. `gpu_bytes` None: most of the GPU. Without a GPU `dram_bytes` is the budget; None: no limit."""

    spec: ModelSpec
    weights: ModelWeights
    dtype: DType
    profile: HardwareProfile
    workload: Workload
    gpu_bytes: int | None = None
    dram_bytes: int | None = None
    most_batch: int = 1
    """Requests that must find room for their first and newest keys on the GPU, also if this workload has fewer."""
    pins: Pins = field(default_factory=Pins)
    mlp_reads: Curve | None = None
    """Shares of an MLP's bytes that the CPU reads where neurons are left out, by tokens; None: all are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer. `gain_s`: seconds a step that one more GiB of GPU memory would save."""

    request: PlanRequest
    problem: PlacementProblem
    solution: Solution
    prefill: PrefillPrediction
    gain_s: float

    @property
    def kv_gpu_tokens(self) -> int:
        """Tokens of all requests in GPU memory, in whole blocks."""
        workload = self.request.workload
        blocks = -(-workload.context // BLOCK_SIZE) * workload.batch
        return int(self.solution.kv.on_gpu * blocks) * BLOCK_SIZE

    @property
    def stream_percent(self) -> int:
        """Of the keys in DRAM, that travel to the GPU."""
        kv = self.solution.kv
        away = kv.on_cpu + kv.streamed
        return round(100 * kv.streamed / away) if away else 0


def make_problem(
    request: PlanRequest, coefficients: Coefficients | None = None, *, streams_keys: bool = True
) -> PlacementProblem:
    """The problem of a request.

    Args:
        streams_keys: keys in DRAM may travel to the GPU in decode steps, which takes buffers there.
    Raises:
        ConfigError: the profile has no rate for a format.
    """
    spec, profile, workload = request.spec, request.profile, request.workload
    gpu = profile.gpu
    if gpu is None:
        budget = request.dram_bytes if request.dram_bytes is not None else 1 << 62
    else:
        budget = request.gpu_bytes if request.gpu_bytes is not None else int(SHARE_OF_GPU * gpu.memory_bytes)
    number_bytes = request.dtype.num_bytes if gpu is not None else DType.FP32.num_bytes
    most_context, most_batch = max(workload.context, workload.prompt), max(request.most_batch, workload.batch)
    fixed = request.weights.other_bytes + workspace_bytes(
        spec,
        max_tokens=workload.chunk,
        max_rows=max(request.most_batch, workload.batch),
        max_context_len=most_context,
        num_bytes=number_bytes,
    )
    gpu_kv, host_kv = kv_specs(spec, dtype=request.dtype, kv_dtypes=workload.kv_dtypes, has_gpu=gpu is not None)
    stream_share = 0.0
    if gpu is not None:
        fixed += graph_bytes(spec, make_buckets(most_batch), num_bytes=number_bytes)
        num_blocks = workload.batch * host_kv.num_blocks(workload.context)
        can_stream = streams_keys and most_streamed(spec, gpu_kv, host_kv, step_blocks=1, num_blocks=1) > 0
        stream = StreamBuffers.of(
            host_kv, max_context_len=most_context, number_bytes=number_bytes, max_requests=most_batch,
            step_bytes=int(STEP_STREAM_SHARE * budget) if can_stream else 0,
        )  # fmt: skip
        fixed += stream.num_bytes
        stream_share = most_streamed(spec, gpu_kv, host_kv, step_blocks=stream.step_blocks, num_blocks=num_blocks)
    return PlacementProblem(
        units=make_units(
            spec, request.weights, profile, workload, dtype=request.dtype, coefficients=coefficients,
            mlp_reads=request.mlp_reads,
        ),
        gpu_bytes=budget,
        gpu_fixed_bytes=fixed,
        least_kv_bytes=0 if most_batch == workload.batch else most_batch * LEAST_GPU_BLOCKS * gpu_kv.bytes_per_block,
        ring_bytes=int(min(RING_BYTES, RING_SHARE * budget)) if gpu is not None else 0,
        dram_bytes=request.dram_bytes if gpu is not None else None,
        most_kv_streamed=stream_share,
        is_head_whole=spec.tie_embeddings,
        pins=request.pins,
    )  # fmt: skip


def make_plan(request: PlanRequest) -> Plan:
    """Solve a request.

    Raises:
        ConfigError: nothing fits; says which capacity binds.
    """
    problem = make_problem(request)
    solution = solve_placement(problem)
    gain_s = gain_of_memory(problem, solution, more_bytes=GIB)
    kv = solution.kv
    if problem.units.has_link and kv.on_cpu > 0 and kv.streamed == 0:  # what buffers would have taken is for weights
        problem = replace(make_problem(request, streams_keys=False), pins=replace(request.pins, kv=kv))
        solution = solve_placement(problem)
    return Plan(
        request=request,
        problem=problem,
        solution=solution,
        prefill=predict_prefill(
            request.spec, request.weights, request.profile, request.workload, solution.placement, solution.kv,
            dtype=request.dtype,
        ),
        gain_s=gain_s,
    )  # fmt: skip

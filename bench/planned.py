"""What `predictions.py` and `solver_grid.py` share: a configuration is planned, run in a process of its own, and what
was predicted of it stands beside what was measured.

A model has the layers of a real shape, but may have fewer of them, so that dozens of configurations fit into minutes.
Weights are random; prompts are not computed, their keys and values are random numbers: decode steps are computed as
always. After the timed steps one chunk of prompts is computed and sampled from, so that the peak of memory is that of
an engine in use.
"""

import argparse
import gc
import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import decode_gpu
from ambidex import EngineConfig, SamplingParams
from ambidex.bench.memory_use import MemoryWatch
from ambidex.bench.workload import MOST_WARMUP_STEPS, end, warm_up
from ambidex.core.config import DeviceKind, DTypeChoice, LoadFormat
from ambidex.core.dtypes import DType
from ambidex.core.errors import AmbidexError, InternalError
from ambidex.core.ids import Lane, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.placement import Placement
from ambidex.core.regions import Regions
from ambidex.core.request import Request
from ambidex.core.units import MIB
from ambidex.cost.step import predict_step
from ambidex.cost.units import BLOCK_SIZE, make_units
from ambidex.cost.weights import DIVIDED_ON_GPU, PLAIN, count_weights
from ambidex.cost.workload import KVShares, Workload
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec
from ambidex.hw.presets import make_profile
from ambidex.hw.profile import HardwareProfile
from ambidex.hw.profile_file import default_path, read_profile
from ambidex.mlp.split_site import Level
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.decode import DecodeForm
from ambidex.runner.device import choose_device
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import call_model
from ambidex.solver.placement_file import placement_json
from ambidex.solver.planning import Plan, PlanRequest, make_plan, make_problem
from ambidex.solver.problem import MemoryUse, Pins, PlacementProblem, measure_memory
from decode_hybrid import RandomPrompts
from harness import Quantiles, significant

SINK: Final = 64
NEAR_BLOCKS: Final = 3
"""Of a request's share of the GPU's blocks, beside sink and recent window: the one being filled, one that leaves, one
that the window's place in its blocks may cost."""
SLACK: Final = 0.004
"""Of the GPU's budget that is not planned for: the engine rounds rows, parts and blocks."""
DRAM_SLACK_BYTES: Final = 64 * MIB
CHUNK: Final = 2048
"""Tokens of a step of prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What is run. `kind`: GGUF type of the matrices; None: 16 bits. `gpu_memory`: bytes of the budget."""

    shape: str
    layers: int
    batch: int
    context: int
    gpu_memory: int
    kind: str | None = None
    kv: KVShares | None = None
    """Where keys are attended; None: as the solver says."""
    placement: Placement | None = None
    """Where weights lie; None: as the solver says. A placement needs `kv` beside it."""

    @property
    def name(self) -> str:
        """In a few words."""
        return f"{self.shape}/{self.layers} {self.kind or '16 bits'}, {self.batch} x {self.context}"

    def record(self) -> dict[str, Any]:
        """For a JSON record."""
        facts = asdict(replace(self, placement=None))
        del facts["placement"]
        return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How all are run."""

    device: DeviceKind
    dtype: DType
    profile: HardwareProfile
    steps: int

    @property
    def is_cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device is DeviceKind.CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A configuration, ready to be run; `memory` is what is predicted of it."""

    spec: ModelSpec
    request: PlanRequest
    problem: PlacementProblem
    placement: Placement
    kv: KVShares
    memory: MemoryUse
    plan: Plan | None

    @property
    def kv_gpu_tokens(self) -> int:
        """Of all requests, in whole blocks."""
        workload = self.request.workload
        blocks = -(-workload.context // BLOCK_SIZE) * workload.batch
        return int(self.kv.on_gpu * blocks + 1e-6) * BLOCK_SIZE

    @property
    def recent_window(self) -> int | None:
        """Tokens of each request that stay on the GPU beside the sink; None: all do."""
        if self.kv.on_gpu == 1.0:
            return None
        near = self.kv_gpu_tokens // self.request.workload.batch
        return max(1, near - -(-SINK // BLOCK_SIZE) * BLOCK_SIZE - NEAR_BLOCKS * BLOCK_SIZE)

    def kv_at(self, context: int) -> KVShares:
        """The shares that sink and window make of a context of so many tokens."""
        if self.recent_window is None:
            return KVShares()
        regions = Regions(block_size=BLOCK_SIZE, num_sink_tokens=SINK, recent_window=self.recent_window)
        blocks = regions.num_sink_blocks(context) + regions.num_recent_blocks(context)
        on_gpu = min(1.0, blocks * BLOCK_SIZE / (-(-context // BLOCK_SIZE) * BLOCK_SIZE))
        away = self.kv.on_cpu + self.kv.streamed
        streamed = (1.0 - on_gpu) * self.kv.streamed / away
        return KVShares(on_gpu=on_gpu, on_cpu=1.0 - on_gpu - streamed, streamed=streamed)


class PromptsOnDemand(RandomPrompts):
    """Random prompts until they are to be computed."""

    def __init__(self, width: int) -> None:
        super().__init__(width, None)
        self.computes = False

    def __call__(self, model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        if self.computes:
            return call_model(model, batch, attention)
        return super().__call__(model, batch, attention)


def make_model(folder: Path, shape: str, layers: int) -> ModelSpec:
    """A folder with a config.json of the shape, with so many layers."""
    decode_gpu.make_model_folder(folder, shape)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": layers}))
    return read_spec(find_model(str(folder)))


def longest_context(configuration: Configuration, settings: Settings) -> int:
    """Tokens that a request has at most: some decode while the prompts of the others come in."""
    num_chunks = configuration.batch * -(-configuration.context // CHUNK)
    return configuration.context + 2 * num_chunks + MOST_WARMUP_STEPS + settings.steps + 8


def plan(configuration: Configuration, spec: ModelSpec, settings: Settings) -> Planned:
    """Solve a configuration, or take the placement that it names.

    Raises:
        ConfigError: it does not fit.
    """
    context = longest_context(configuration, settings)
    request = PlanRequest(
        spec=spec,
        weights=count_weights(
            spec, residence=DIVIDED_ON_GPU if configuration.kind else PLAIN, dtype=settings.dtype,
            kind=configuration.kind,
        ),
        dtype=settings.dtype,
        profile=settings.profile,
        workload=Workload(batch=configuration.batch, context=context, prompt=context, chunk=CHUNK),
        gpu_bytes=int(configuration.gpu_memory * (1 - SLACK)),
        pins=Pins(kv=configuration.kv),
    )  # fmt: skip
    if configuration.placement is None:
        found = make_plan(request)
        solution = found.solution
        return Planned(
            spec=spec, request=request, problem=found.problem, placement=solution.placement, kv=solution.kv,
            memory=solution.memory, plan=found,
        )  # fmt: skip
    kv = configuration.kv
    assert kv is not None, "a placement of weights has one of keys beside it"
    problem = make_problem(request, streams_keys=kv.streamed > 0)
    memory = measure_memory(problem, configuration.placement, kv)
    return Planned(
        spec=spec, request=request, problem=problem, placement=configuration.placement, kv=kv, memory=memory, plan=None
    )


def run(configuration: Configuration, settings: Settings, *, limit_s: float) -> dict[str, Any]:
    """Run a configuration in a process of its own; what went wrong is in `error`."""
    context = _forking()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, configuration, settings))
    process.start()
    sender.close()
    try:
        found = receiver.recv() if receiver.poll(limit_s) else {"error": f"no answer within {limit_s:.0f} s"}
    except EOFError:
        process.join()
        found = {"error": f"the process ended with {process.exitcode}"}
    process.kill()
    process.join()
    return {**configuration.record(), **found}


@cache
def _forking() -> ForkServerContext:
    """Processes are forked from one that has imported all this, and has neither threads nor touched the GPU."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return context


def _work(sender: Connection, configuration: Configuration, settings: Settings) -> None:
    try:
        sender.send(measure(configuration, settings))
    except (AmbidexError, RuntimeError) as error:  # recorded: the others run all the same
        sender.send({"error": f"{type(error).__name__}: {error}"})


def measure(configuration: Configuration, settings: Settings) -> dict[str, Any]:
    """Build the engine, fill its contexts, time its steps, compute one chunk."""
    began = time.perf_counter()
    device = choose_device(settings.device)
    watch = MemoryWatch(device)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = make_model(folder, configuration.shape, configuration.layers)
        planned = plan(configuration, spec, settings)
        plan_s = time.perf_counter() - began
        prompts = PromptsOnDemand(spec.hidden_size)
        engine = build_engine(
            make_config(folder, configuration, planned, settings),
            forward=prompts,
            decode_form=None if settings.is_cuda else DecodeForm.FIXED,
            cpu_levels=[Level(most_tokens=configuration.batch, cpu_share=1.0)],
            dummy_kind=configuration.kind,
        )
    if settings.is_cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    watch.engine_is_ready()
    build_s = time.perf_counter() - began
    requests = fill(engine, configuration, longest_context(configuration, settings))
    warm_up(engine, lambda: step(engine, configuration))
    kv_before, replayed = dict(engine.stats.lane_bytes), engine.stats.num_replayed_steps
    lens = [request.num_tokens for request in requests]
    seconds = []
    for _ in range(settings.steps):
        start = time.perf_counter()
        step(engine, configuration)
        seconds.append(time.perf_counter() - start)
    kv_bytes = {
        lane: (size - kv_before.get(lane, 0)) // settings.steps for lane, size in engine.stats.lane_bytes.items()
    }
    context = round(sum(lens) / len(lens) + settings.steps / 2)
    compute_a_chunk(engine, requests, configuration, prompts)
    return {
        **_compare_times(planned, context, Quantiles.of(seconds), settings),
        **_compare_memory(engine, planned, watch, settings),
        "mean_context": context,
        "placement": placement_json(planned.placement, planned.kv),
        "kv_lane_bytes": {lane.value: num for lane, num in kv_bytes.items()},
        "weight_lane_bytes": _weight_lane_bytes(engine, configuration),
        "num_replayed_steps": engine.stats.num_replayed_steps - replayed,
        "num_graph_failures": engine.stats.num_graph_failures,
        "fallbacks": {str(kind): num for kind, num in engine.stats.fallbacks.items()},
        "facts": {row.name: f"{row.value} ({row.why})" for row in engine.report.facts
                  if row.name in ("weights_cpu_share", "stream_share", "decode")},
        "plan_s": significant(plan_s, 3),
        "build_s": significant(build_s, 3),
        "all_s": significant(time.perf_counter() - began, 3),
    }  # fmt: skip


def make_config(folder: Path, configuration: Configuration, planned: Planned, settings: Settings) -> EngineConfig:
    """An engine that does what was planned."""
    path = folder / "placement.json"
    content = placement_json(planned.placement, KVShares())
    del content["kv"]  # settings say where keys lie
    path.write_text(json.dumps(content))
    is_whole = planned.placement.is_all_on_gpu and configuration.kind is None
    away = planned.kv.on_cpu + planned.kv.streamed
    stream = None if not away or not settings.is_cuda else round(100 * planned.kv.streamed / away)
    window = planned.recent_window
    return EngineConfig(
        model=str(folder),
        device=settings.device,
        dtype=DTypeChoice(settings.dtype.value),
        load_format=LoadFormat.DUMMY,
        block_size=BLOCK_SIZE,
        max_context_len=planned.request.workload.context,
        max_tokens_per_step=CHUNK,
        max_running_requests=configuration.batch,
        gpu_memory=configuration.gpu_memory,
        kv_gpu_tokens=planned.kv_gpu_tokens,
        dram_memory=int(1.02 * planned.memory.dram_bytes) + DRAM_SLACK_BYTES,
        num_sink_tokens=SINK,
        recent_window=window,
        stream_percent=stream,
        placement=None if is_whole else str(path),
        prefix_cache_percent=0,
    )


def fill(engine: Engine, configuration: Configuration, longest: int) -> list[Request]:
    """Queue prompts and step until each request has its first token."""
    params = SamplingParams(max_output_tokens=longest - configuration.context, temperature=0.0, ignore_eos=True)
    requests = [
        engine.make_request([3 + idx % 100] * configuration.context, params) for idx in range(configuration.batch)
    ]
    for request in requests:
        engine.core.scheduler.add(request)
    while not all(request.output_token_ids for request in requests):
        engine.core.step()
    return requests


def step(engine: Engine, configuration: Configuration) -> None:
    """One decode step of all requests.

    Raises:
        InternalError: a request failed or ended, so that the step was not what is to be measured.
    """
    _, tokens = engine.core.step()
    if len(tokens) != configuration.batch:
        raise InternalError(f"a step gave {len(tokens)} tokens for {configuration.batch} requests")


def compute_a_chunk(
    engine: Engine, requests: list[Request], configuration: Configuration, prompts: PromptsOnDemand
) -> None:
    """End the requests, then compute a step as large as they may be, with random choices for all rows."""
    end(engine, requests)
    prompts.computes = True
    num_tokens = min(configuration.context, max(1, CHUNK // configuration.batch))
    params = SamplingParams(max_output_tokens=2, temperature=1.0, top_p=0.9, ignore_eos=True)
    for _ in range(configuration.batch):
        engine.core.scheduler.add(engine.make_request([3] * num_tokens, params))
    while engine.has_work:
        engine.core.step()


def _compare_times(planned: Planned, context: int, took: Quantiles, settings: Settings) -> dict[str, Any]:
    workload = replace(planned.request.workload, context=context)
    units = make_units(planned.spec, planned.request.weights, settings.profile, workload, dtype=settings.dtype)
    kv = planned.kv_at(context)
    predicted = predict_step(units, planned.placement, kv)
    return {
        "step_s": took.record(),
        "predicted_s": significant(predicted.step_s),
        "error": significant(predicted.step_s / took.median - 1, 3),
        "binds": predicted.binds,
        "kv_shares": [significant(share, 3) for share in (kv.on_gpu, kv.on_cpu, kv.streamed)],
        "terms_s": {name: significant(seconds) for name, seconds in predicted.terms},
        "lanes_s": {name: significant(getattr(predicted, name)) for name in ("path_s", "link_s", "dram_s")},
    }


def _compare_memory(engine: Engine, planned: Planned, watch: MemoryWatch, settings: Settings) -> dict[str, Any]:
    """On a GPU the planned bytes beside the most that torch has reserved there; without one those of weights beside
    what the engine has taken for them, since a small model is nothing beside an interpreter."""
    ledger = engine.figures.ledger
    use = watch.read(ledger)
    predicted, measured = planned.memory.gpu_bytes, use.gpu_peak or 0
    if not settings.is_cuda:
        predicted = planned.request.weights.num_bytes
        entries = [entry for tier in (Tier.GPU, Tier.DRAM) for entry in ledger.entries(tier)]
        measured = sum(entry.num_bytes for entry in entries if entry.owner == "weights")
    return {
        "memory": {
            "predicted": predicted,
            "measured": measured,
            "error": significant(predicted / max(1, measured) - 1, 3),
            "what": "most that torch reserved on the GPU" if settings.is_cuda else "weights on both tiers",
            "planned_gpu": dict(planned.memory.gpu),
            "planned_dram": dict(planned.memory.dram),
            "ledger_gpu": {entry.owner: entry.num_bytes for entry in ledger.entries(Tier.GPU)},
            "ledger_dram": {entry.owner: entry.num_bytes for entry in ledger.entries(Tier.DRAM)},
            "allocated_gpu": torch.cuda.max_memory_allocated() if settings.is_cuda else None,
            "host_peak": use.host_peak,
        }
    }


def _weight_lane_bytes(engine: Engine, configuration: Configuration) -> dict[str, int]:
    steps = engine.core.executor.decode_steps  # type: ignore[attr-defined]  # the runner's
    lanes = steps.weight_lanes.num_bytes(configuration.batch) if steps is not None and steps.weight_lanes else {}
    return {lane.value: lanes.get(lane, 0) for lane in (Lane.CPU, Lane.STREAM)}


def make_settings(args: argparse.Namespace) -> Settings:
    """This machine's, or those of a trial.

    Args:
        args: `quick`, `profile` (a file or None) and `steps` of the command line.
    Raises:
        ConfigError: there is no profile of this machine.
    """
    if args.quick:
        profile = make_profile("rtx3060-12g", "ddr4-2ch", "pcie3x16")
        return Settings(device=DeviceKind.CPU, dtype=DType.FP32, profile=profile, steps=args.steps)
    profile = find_profile(args.profile)
    return Settings(device=DeviceKind.CUDA, dtype=DType.BF16, profile=profile, steps=args.steps)


def find_profile(path: Path | None) -> HardwareProfile:
    """The profile of this machine, as `ambidex calibrate` wrote it.

    Raises:
        ConfigError: there is none.
    """
    return read_profile(path if path is not None else default_path(os.environ))

"""How fast is decode when the weights do not fit into GPU memory, against what the memories and the link allow?

    .venv/bin/python bench/decode_weights.py --placement ours                # OPT-30B's shape, 24 GiB of GPU memory
    .venv/bin/python bench/decode_weights.py --placement ours,layer_split,streamed,flexgen --batches 64,8,1 --blocks 1,2
    .venv/bin/python bench/decode_weights.py --shape llama-2-70b --kind Q4_0 --gpu-memory 16GiB --batches 16,8,1 \
        --prefill 1024
    .venv/bin/python bench/decode_weights.py --shape llama-2-70b --kind Q4_0 --gpu-memory 16GiB --batches 8,1 \
        --context 16384
    .venv/bin/python bench/decode_weights.py --shape llama-2-70b --layers 40 # bf16, as many layers as DRAM holds
    .venv/bin/python bench/decode_weights.py --shape tiny --device cpu --dtype fp32 --gpu-memory 20MiB --steps 4
    OMP_WAIT_POLICY=passive .venv/bin/python bench/decode_weights.py --batches 1,64 --steps 24 \
        --sparsity off,relu,relu-screened,relu-screened+static,relu-screened+dynamic      # OPT with a pattern

Random weights, each byte in memory of its own. Prompts are not computed: their keys and values are random numbers; with
--prefill one prompt of so many tokens is, in one chunk, after another one of that length. One engine for each batch,
since keys and values share the GPU budget with the weights; older ones lie in DRAM where they would take more than 35 %
of it. Weights in DRAM have the same memory in all engines, so name the batch with the most keys first. Placements, all
in this engine:

    ours         what the engine does by itself: the rest is divided between CPU and link, by rates measured at start
    auto         what the solver finds with this machine's profile (run `ambidex calibrate` first)
    layer_split  whole layers on the GPU or on the CPU, one after the other (llama.cpp's -ngl)
    streamed     the rest of the weights travels to the GPU in every step; keys in DRAM are shared as ours are
    flexgen      FlexGen's streaming (--policy flexgen): weights and keys that lie in DRAM travel, for several batches
                 at once (below)
    cpu          all weights that can be divided are multiplied by the CPU
    gpu          all weights and keys on the GPU, whatever --gpu-memory says: what more memory would bring

FlexGen's zig-zag computes a layer for some batches, its block, before the next layer's weights come (arXiv:2303.06865,
section 4.2). Here a step multiplies each chunk of weights with the tokens of the whole block, once: as many bytes
travel, and no ring has to hold a layer. --blocks 1,4 measures flexgen with blocks of 1 and of 4 batches; tokens/s are
of all requests of the block, so those of 4 are a throughput that the batch alone does not have.

With --sparsity the model has an activation pattern as in real OPT (bench/activation_pattern.py), and each batch is
measured once for each form of --mlp-sparsity, with --neuron-cache behind a +: off is the dense division of the same
model, static PowerInfer's placement by an offline profile. Tokens are sampled there: the likeliest ones
of random weights repeat themselves, and so would the neurons. torch's threads must not spin: OMP_WAIT_POLICY is
passive unless it is set.

Floor of a step: the slowest lane's bytes over its rate, measured in the same run: GPU memory (its weights, keys and
values), DRAM read by the lane's threads (weights that the CPU multiplies), pinned copies (weights that travel), or DRAM
by both at once. What a run is doing, and for how long, goes to stderr. Appends one JSON line to
bench/results/decode_weights.jsonl.
"""

import argparse
import gc
import itertools
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import decode_gpu
from activation_pattern import PATTERN_CONFIG, Pattern
from ambidex import EngineConfig, SamplingParams
from ambidex.bench.floor import Rates
from ambidex.bench.links import measure_rates
from ambidex.bench.workload import end
from ambidex.calibrate.cpu import make_buffer
from ambidex.calibrate.gpu import measure_beside
from ambidex.core.config import DeviceKind, DTypeChoice, LoadFormat
from ambidex.core.dtypes import DType
from ambidex.core.errors import AmbidexError, ConfigError
from ambidex.core.ids import Lane, Tier
from ambidex.core.kv_spec import StreamBuffers
from ambidex.core.model_spec import ModelSpec
from ambidex.core.placement import LayerPlacement, Placement, WeightSizes, WeightSplit
from ambidex.core.policy import PolicyName
from ambidex.core.sparsity import NeuronCache, NeuronFigures, parse_sparsity
from ambidex.core.step import make_buckets
from ambidex.core.units import MIB, parse_size
from ambidex.cost.units import kv_specs
from ambidex.cost.workload import KVShares
from ambidex.cost.workspace import STEP_STREAM_SHARE
from ambidex.engine.compose import build_engine, default_num_threads
from ambidex.engine.engine import Engine
from ambidex.engine.lane_preset import most_streamed_share
from ambidex.engine.memory import fixed_bytes, most_requests
from ambidex.engine.weights_plan import chunk_bytes_for, fill_placement
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec
from ambidex.kernels.cpu.native import ThreadPool
from ambidex.kernels.reference.quantized import RECORD_BYTES
from ambidex.layers.linear import Linear
from ambidex.mlp.sparse_side import SparseSide
from ambidex.mlp.split_site import Level
from ambidex.models.registry import build_model
from ambidex.models.site_plans import measure_weights
from ambidex.runner.capture import CudaCapture
from ambidex.runner.decode import DecodeForm
from ambidex.runner.device import choose_device
from ambidex.solver.placement_file import placement_json
from ambidex.storage.host_memory import HostMemory
from ambidex.storage.pinned import register_pinned
from harness import Quantiles, append_record, environment, significant
from planned import PromptsOnDemand
from stages import KernelWatch, Stages


@dataclass(frozen=True, slots=True)
class Variant:
    """What is left out of MLPs, and which neurons lie on the GPU."""

    sparsity: str
    cache: NeuronCache = NeuronCache.OFF

    @classmethod
    def parse(cls, word: str) -> "Variant":
        """`relu-screened+dynamic` or `relu`."""
        sparsity, plus, cache = word.partition("+")
        parse_sparsity(sparsity)
        return cls(sparsity, NeuronCache(cache) if plus else NeuronCache.OFF)

    def __str__(self) -> str:
        return self.sparsity if self.cache is NeuronCache.OFF else f"{self.sparsity}+{self.cache}"


DENSE: Final = Variant("off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one engine is built for."""

    placement: str
    batch: int
    context: int
    variant: Variant = DENSE
    num_batches: int = 1
    """That `batch` consists of: FlexGen's block."""

    def __str__(self) -> str:
        block = "" if self.num_batches == 1 else f" (a block of {self.num_batches} x {self.batch // self.num_batches})"
        return f"{self.placement}, {self.batch} x {self.context}{block}, {self.variant}"

    def record(self) -> dict[str, Any]:
        """For a JSON record."""
        return {
            "placement": self.placement, "batch": self.batch, "num_batches": self.num_batches, "context": self.context,
            "sparsity": str(self.variant),
        }  # fmt: skip


NUM_WARMUP_STEPS: Final = 3
"""The first compiles and captures, the second is the first replay."""
PROFILE_NAME: Final = "neurons.npz"
FLEXGEN: Final = "flexgen"
BASELINES: Final = ("layer_split", "streamed", "cpu")
"""Whose placement is made here; the engine has rules for the others."""
PLACEMENTS: Final = ("ours", "auto", FLEXGEN, "gpu", *BASELINES)
BLOCK_SIZE: Final = 16
DRAM_BYTES: Final = 1024 * MIB
"""That threads read while copies run."""
MOST_KV_SHARE: Final = 0.35
"""Of the GPU budget, for keys and values: where all of them would leave nothing for weights, older ones lie in DRAM."""
DRAM_SLACK_BYTES: Final = 256 * MIB
"""Of DRAM's budget, for what is rounded."""
GPU_SLACK_BYTES: Final = 64 * MIB
"""The same of the GPU budget, where the placement is made here: a part of a place is aligned to 256 bytes."""


def main() -> int:
    """Measure, print, record."""
    args = parse_args()
    opening = environment()
    device = choose_device(args.device)
    num_threads = default_num_threads(device)
    began = time.perf_counter()
    rates = measure_rates(device, num_threads=num_threads).rates()
    beside = measure_both(device, num_threads)
    print(f"rates measured in {time.perf_counter() - began:.1f} s", flush=True)
    points: list[dict[str, Any]] = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a time limit: what was measured is recorded
    try:
        measure(args, device, FloorRates(rates, beside), points)
    except AmbidexError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        append_record(
            args.output, {**make_record(args, opening, FloorRates(rates, beside), num_threads), "points": points}
        )
    return 0


@dataclass(frozen=True, slots=True)
class FloorRates:
    """Bytes/s that floors are taken from; `beside`: of DRAM by threads and copies together, None without a GPU."""

    one: Rates
    beside: float | None


def measure_both(device: torch.device, num_threads: int) -> float | None:
    """Bytes/s that DRAM gives in all while threads read it and copies to the GPU run."""
    if device.type != "cuda":
        return None
    return measure_beside(device, ThreadPool(num_threads), make_buffer(DRAM_BYTES))


def measure(args: argparse.Namespace, device: torch.device, rates: FloorRates, points: list[dict[str, Any]]) -> None:
    """All engines, one after the other; adds their figures to `points`."""
    memory = KeptMemory()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), args)
        pattern = make_pattern(Path(folder)) if args.sparsity != [DENSE] else None
        for run in make_runs(args):
            points.append(try_batch(Path(folder), run, args, device, rates, pattern, memory))
            forget_engine(device)
        if args.prefill:
            prefill = Run(placement=args.placement[0], batch=1, context=args.prefill)
            points.append(try_batch(Path(folder), prefill, args, device, rates, pattern, memory))


def make_runs(args: argparse.Namespace) -> list[Run]:
    """What is measured, in this order: the same batches with each placement, FlexGen's once for each size of block."""
    return [
        Run(placement=placement, batch=batch * num, context=args.context, variant=variant, num_batches=num)
        for placement, batch, variant in itertools.product(args.placement, args.batches, args.sparsity)
        for num in (args.blocks if placement == FLEXGEN else (1,))
    ]


def make_record(
    args: argparse.Namespace, opening: dict[str, object], rates: FloorRates, num_threads: int
) -> dict[str, Any]:
    """All but the points."""
    return {
        "bench": "decode_weights", **opening,
        "settings": {"shape": args.shape, "layers": args.layers, "dtype": args.dtype.value, "kind": args.kind,
                     "context": args.context,
                     "placement": args.placement, "gpu_memory": args.gpu_memory, "steps": args.steps,
                     "sparsity": [str(variant) for variant in args.sparsity], "blocks": args.blocks,
                     "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
                     "block_size": BLOCK_SIZE, "chunk": args.chunk, "kv_gpu_percent": args.kv_gpu_percent,
                     "prompts": "not computed: random K and V", "prefill": args.prefill,
                     "threads": num_threads, "warmup": f"{NUM_WARMUP_STEPS} steps of each batch"},
        "rates": {"unit": "bytes/s", "dram": rates.one.dram, "gpu": rates.one.gpu, "link": rates.one.link,
                  "dram_beside_copies": rates.beside},
    }  # fmt: skip


def make_pattern(folder: Path) -> Pattern:
    """The activation pattern of the model, with its profile in the folder."""
    spec = read_spec(find_model(str(folder)))
    pattern = Pattern.of(spec.num_layers, spec.intermediate_size)
    pattern.write_profile(folder, folder / PROFILE_NAME)
    return pattern


def try_batch(
    folder: Path,
    run: Run,
    args: argparse.Namespace,
    device: torch.device,
    rates: FloorRates,
    pattern: Pattern | None,
    memory: "KeptMemory",
) -> dict[str, Any]:
    """Figures of a run, or why there are none: the others are recorded all the same."""
    stages = Stages()
    kernels = KernelWatch() if device.type == "cuda" else None
    print(f"{run}:", file=sys.stderr, flush=True)
    try:
        point = measure_batch(folder, run, args, rates, pattern, memory, stages)
    except (AmbidexError, RuntimeError) as error:
        print(f"{run}: {error}", file=sys.stderr, flush=True)
        return {**run.record(), "error": str(error), "stages_s": stages.record()}
    point["stages_s"] = stages.record()
    if kernels is not None:
        print(f"   {kernels.words()}", file=sys.stderr, flush=True)
        point["kernels"] = kernels.record()
    print_point(run, point)
    return point


def forget_engine(device: torch.device) -> None:
    """Give back what the last engine took: the next one needs it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class KeptMemory:
    """DRAM in which one engine after the other has its weights: to touch and pin tens of gigabytes takes seconds."""

    class _Owner:
        """Of memory that is pinned as long as it lives."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._owner: KeptMemory._Owner | None = None

    def allocate(self, num_bytes: int) -> Tensor:
        """Memory [n] uint8 that holds anything; no engine that had it before is alive."""
        if self._memory.numel() < num_bytes:
            self._owner = None
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory[:num_bytes]

    def pin(self, tensor: Tensor, owner: object) -> str | None:
        """Pin this memory as long as it is kept, other memory as long as its owner lives; see `register_pinned`."""
        if tensor.data_ptr() != self._memory.data_ptr():
            return register_pinned(tensor, owner)
        if self._owner is not None:
            return None
        self._owner = KeptMemory._Owner()
        refusal = register_pinned(self._memory, self._owner)
        if refusal is not None:
            self._owner = None
        return refusal


def parse_args() -> argparse.Namespace:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    decode_gpu.add_model_options(parser, output="decode_weights.jsonl", shape="opt-30b")
    parser.add_argument("--layers", type=int, help="of the model; default: the shape's")
    parser.add_argument("--placement", default="ours", help=f"of the weights: some of {','.join(PLACEMENTS)}")
    parser.add_argument("--sparsity", default="off", help="forms to compare, such as off,relu,relu-screened+dynamic; "
                        "the shape must be an OPT, unless it is off alone")  # fmt: skip
    parser.add_argument("--gpu-memory", type=parse_size, default="24GiB", help="budget of the GPU")
    parser.add_argument("--batches", default="1,8,64", help="requests of a step, in this order")
    parser.add_argument("--blocks", default="1", help="flexgen: batches that share a pass over weights: 1,4")
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=12, help="measured steps of each batch")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens of a prefill step")
    parser.add_argument("--prefill", type=int, default=0, help="tokens of a prompt that is computed, in one chunk")
    parser.add_argument("--kv-gpu-percent", type=int, default=100, help="of keys and values, on the GPU")
    parser.add_argument("--kind", choices=RECORD_BYTES, help="GGUF type of the matrices; default: numbers of --dtype")
    args = parser.parse_args()
    try:
        args.sparsity = [Variant.parse(word) for word in args.sparsity.split(",")]
    except (ConfigError, ValueError) as error:
        parser.error(f"--sparsity: {error}")
    is_opt = "OPTForCausalLM" in decode_gpu.SHAPES[args.shape].get("architectures", ())  # type: ignore[operator]
    if args.sparsity != [DENSE] and (not is_opt or args.kind is not None):
        parser.error("--sparsity is for the OPT shapes, without --kind")
    args.placement = args.placement.split(",")
    if unknown := set(args.placement) - set(PLACEMENTS):
        parser.error(f"--placement {', '.join(sorted(unknown))}: there are {', '.join(PLACEMENTS)}")
    args.chunk = max(args.chunk, args.prefill)
    for name in ("batches", "blocks"):
        words = getattr(args, name)
        try:
            setattr(args, name, [int(word) for word in words.split(",")])
        except ValueError:
            parser.error(f"--{name} {words!r} are not numbers such as 1,8,64")
    least = min(*args.batches, *args.blocks, args.steps, args.context, args.chunk)
    if least < 1 or not 0 <= args.kv_gpu_percent <= 100:
        parser.error("--batches, --blocks, --steps, --context, --chunk must be at least 1, --kv-gpu-percent 0 to 100")
    return args


def make_model(folder: Path, args: argparse.Namespace) -> None:
    """A folder with a config.json of the shape, with as many layers as asked for."""
    decode_gpu.make_model_folder(folder, args.shape)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if args.layers is not None:
        config["num_hidden_layers"] = args.layers
    if args.sparsity != [DENSE]:
        config |= PATTERN_CONFIG
    if "OPTForCausalLM" not in config.get("architectures", ()):  # rotary positions have no table that would grow
        config["max_position_embeddings"] = max(config["max_position_embeddings"], 2 * args.context, 2 * args.prefill)
    path.write_text(json.dumps(config))


def measure_batch(
    folder: Path,
    run: Run,
    args: argparse.Namespace,
    rates: FloorRates,
    pattern: Pattern | None,
    memory: KeptMemory,
    stages: Stages,
) -> dict[str, Any]:
    """Build an engine for a run, fill its contexts and time its steps, or the one prompt that is computed."""
    config, batch = make_config(folder, run, args), run.batch
    form = DecodeForm.FIXED if args.device is DeviceKind.CPU else None
    # Others leave to the CPU what is the CPU's, however many tokens a step has; prompts' chunks go over the link here.
    levels = [Level(most_tokens=max(128, batch), cpu_share=1.0)] if run.placement in ("layer_split", "cpu") else None
    prompts = PromptsOnDemand(read_spec(find_model(str(folder))).hidden_size)
    with stages.stage("build"):
        engine = build_engine(
            config, decode_form=form, dummy_kind=args.kind, cpu_levels=levels, forward=prompts,
            shape_dummy=None if pattern is None else pattern.shape_biases,
            host_memory=HostMemory(pin=memory.pin, allocate=memory.allocate),
            capture=stages.timed_capture(CudaCapture),
        )  # fmt: skip
    load_s = stages.seconds["build"]
    check_room(engine, run, args)
    if args.prefill and run.context == args.prefill:
        with stages.stage("prompts"):
            return {**run.record(), "load_s": significant(load_s, 3), **measure_prefill(engine, prompts, run.context)}
    options = decode_gpu.Options(
        shape=args.shape, points=(decode_gpu.Point(batch=batch, context=run.context),), steps=args.steps,
        chunk=args.chunk, device=args.device, dtype=args.dtype, graphs=config.graphs, profile=False, output=args.output,
    )  # fmt: skip
    point = options.points[0]
    with stages.stage("prompts"):
        requests, _ = decode_gpu.fill(engine, point, options, temperature=0.0 if pattern is None else 1.0)
    with stages.stage("first step"):
        decode_gpu.step(engine, point)
    with stages.stage("warm-up"):
        for _ in range(NUM_WARMUP_STEPS - 1):
            decode_gpu.step(engine, point)
    neurons_before = engine.stats.neurons
    kv_before, replayed = dict(engine.stats.lane_bytes), engine.stats.num_replayed_steps
    seconds = []
    with stages.stage("measured steps"):
        for _ in range(args.steps):
            start = time.perf_counter()
            decode_gpu.step(engine, point)
            seconds.append(time.perf_counter() - start)
    kv = {lane: (size - kv_before.get(lane, 0)) // args.steps for lane, size in engine.stats.lane_bytes.items()}
    lanes = lane_bytes(engine, batch, kv)
    neurons = neurons_between(neurons_before, engine.stats.neurons)
    lanes["cpu"] = lanes["cpu"] - bytes_left_out(engine, batch, neurons)
    one = rates.one
    lane_s = {
        "gpu": lanes["gpu"] / (one.gpu or one.dram),
        "cpu": lanes["cpu"] / one.dram,
        "link": lanes["link"] / (one.link or one.dram),
        "dram": (lanes["cpu"] + lanes["link"]) / (rates.beside or one.dram),
    }
    floor_s, took = max(lane_s.values()), Quantiles.of(seconds)
    compared = engine.compare_decode()
    end(engine, requests)
    facts = {  # without the folder of the placement file, which is this machine's
        row.name: f"{row.value} ({row.why.replace(str(Path(tempfile.gettempdir())), '')})"
        for row in engine.report.facts
        if row.section == "compute" and row.name.startswith(("weights_", "mlp_sparsity", "neuron_cache"))
    }
    return {
        **run.record(),
        "neurons": neurons,
        "step_s": took.record(),
        "tokens_per_s": significant(batch / took.median),
        "floor_s": significant(floor_s),
        "predicted_s": None if compared is None else significant(compared[0]),
        "times_floor": significant(took.median / floor_s, 3),
        "lane_s": {lane: significant(value) for lane, value in lane_s.items()},
        "lane_bytes": lanes,
        "load_s": significant(load_s, 3),
        "num_replayed_steps": engine.stats.num_replayed_steps - replayed,
        "num_graph_failures": engine.stats.num_graph_failures,
        "weights": {tier: sum(e.num_bytes for e in engine.figures.ledger.entries(tier) if e.owner.startswith("weight"))
                    for tier in (Tier.GPU, Tier.DRAM)},
        "facts": facts,
        "fallbacks": {str(kind): num for kind, num in engine.stats.fallbacks.items()},
    }  # fmt: skip


def measure_prefill(engine: Engine, prompts: PromptsOnDemand, num_tokens: int) -> dict[str, Any]:
    """Seconds of a prompt in one chunk, to its first token; the second of two, which differ."""
    prompts.computes = True
    params = SamplingParams(max_output_tokens=1, temperature=0.0, ignore_eos=True)
    seconds = 0.0
    for token in (3, 4):
        engine.core.scheduler.add(engine.make_request([token] * num_tokens, params))
        start = time.perf_counter()
        while engine.has_work:
            engine.core.step()
        seconds = time.perf_counter() - start
    return {"prefill_s": significant(seconds), "prefill_tokens_per_s": significant(num_tokens / seconds)}


def make_config(folder: Path, run: Run, args: argparse.Namespace) -> EngineConfig:
    """An engine whose tiers hold the batch, with the weights where the placement says."""
    batch, variant = run.batch, run.variant
    tokens = batch * num_blocks(run, args) * BLOCK_SIZE
    spec = read_spec(find_model(str(folder)))
    kv_bytes = 2 * spec.num_layers * spec.num_kv_heads * (-(-spec.head_dim // 32) * 32) * number_bytes(args)
    dtype = torch.float32 if args.dtype is DTypeChoice.FP32 else torch.bfloat16
    model = build_model(spec, device=torch.device("meta"), dtype=dtype)
    linears = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Linear)]
    sizes = measure_weights(model, dtype.itemsize, kinds=dict.fromkeys(linears, args.kind) if args.kind else {})
    config = EngineConfig(
        model=str(folder),
        device=args.device,
        dtype=args.dtype,
        load_format=LoadFormat.DUMMY,
        block_size=BLOCK_SIZE,
        max_context_len=longest_context(run, args),
        max_tokens_per_step=args.chunk,
        max_running_requests=batch,
        gpu_memory=args.gpu_memory,
        prefix_cache_percent=0,
        policy=PolicyName.FLEXGEN if run.placement == FLEXGEN else PolicyName.EXACT,
    )
    ring = 4 * chunk_bytes_for(args.gpu_memory)
    beside = bytes_beside(config, spec, args) + ring + sizes.whole + GPU_SLACK_BYTES
    divided = sum(sizes.attention) + sum(sizes.mlp) + sizes.head
    if run.placement == "gpu":
        config = replace(config, gpu_memory=beside + divided + (tokens + batch * BLOCK_SIZE) * kv_bytes, dram_memory=0)
    assert config.gpu_memory is not None, "it is set above"
    near = min(tokens * args.kv_gpu_percent // 100, int(MOST_KV_SHARE * args.gpu_memory) // kv_bytes)
    near = tokens if run.placement == "gpu" else near
    left = config.gpu_memory - near * kv_bytes - beside
    path: Path | str | None = "auto" if run.placement == "auto" else None
    if run.placement in BASELINES:
        placement = make_placement(run.placement, sizes, left)
        path = folder / "placement.json"
        content = placement_json(placement, KVShares())
        del content["kv"]  # settings say where keys and values lie
        path.write_text(json.dumps(content))
    settings: dict[str, Any] = {}
    if near < tokens:
        window = max(BLOCK_SIZE, near // batch - 4 * BLOCK_SIZE)
        settings = {"num_sink_tokens": BLOCK_SIZE, "recent_window": window}
        settings["dram_memory"] = dram_bytes(run, sizes, left) + (tokens - near + batch * BLOCK_SIZE) * kv_bytes
    elif run.placement == FLEXGEN:  # else the policy has all whole blocks in DRAM
        settings = {"recent_window": config.max_context_len}
    if args.device is DeviceKind.CPU and run.placement in ("ours", FLEXGEN):  # nothing else divides weights there
        settings["weights_gpu_memory"] = args.gpu_memory // 2
    if variant != DENSE:
        settings |= {
            "mlp_sparsity": variant.sparsity, "neuron_cache": variant.cache,
            "neuron_profile": str(folder / PROFILE_NAME),
        }  # fmt: skip
    return replace(config, kv_gpu_tokens=near, placement=None if path is None else str(path), **settings)


def bytes_beside(config: EngineConfig, spec: ModelSpec, args: argparse.Namespace) -> int:
    """Bytes of the GPU budget that an engine takes beside weights, their ring, keys and values, at most."""
    number = DType.FP32 if args.dtype is DTypeChoice.FP32 else DType.BF16
    is_cuda = args.device is not DeviceKind.CPU
    stream = None
    if is_cuda:
        _, host_kv = kv_specs(spec, dtype=number, kv_dtypes=None)
        stream = StreamBuffers.of(
            host_kv,
            max_context_len=config.max_context_len or spec.max_context_len,
            number_bytes=number.num_bytes,
            max_requests=most_requests(config),
            step_bytes=int(args.gpu_memory * STEP_STREAM_SHARE),
            most_share=most_streamed_share(config),
        )
    return fixed_bytes(
        config,
        spec,
        activations=number if is_cuda else DType.FP32,
        graph_buckets=make_buckets(config.max_running_requests) if is_cuda else (),
        stream=stream,
    ).total


def longest_context(run: Run, args: argparse.Namespace) -> int:
    """Tokens that a request may have at most: more than any gets."""
    num_chunks = -(-run.batch * run.context // args.chunk) + run.batch
    return run.context + 2 * num_chunks + NUM_WARMUP_STEPS + args.steps + 16


def num_blocks(run: Run, args: argparse.Namespace) -> int:
    """Blocks of a request at its end: those that come first decode while the prompts of the others come in."""
    num_left = args.chunk - run.batch  # tokens of a step for prompts
    num_fills = -(-run.batch * run.context // num_left) + 1 if num_left > 0 else 2 * run.batch
    longest = min(longest_context(run, args), run.context + num_fills + NUM_WARMUP_STEPS + args.steps + 1)
    return -(-longest // BLOCK_SIZE) + 1


def dram_bytes(run: Run, sizes: WeightSizes, on_gpu: int) -> int:
    """Bytes of DRAM that weights and what belongs to them take at most, beside keys and values.

    Args:
        on_gpu: what the GPU has for matrices, but for what is rounded.
    """
    total, mlp = sum(sizes.attention) + sum(sizes.mlp) + sizes.head, sum(sizes.mlp)
    is_whole = run.placement in ("cpu", "auto")
    weights = total if is_whole else min(total, max(0, total - max(0, on_gpu)) + total // 10)
    return weights + (0 if run.variant == DENSE else 3 * mlp // 10) + DRAM_SLACK_BYTES


def check_room(engine: Engine, run: Run, args: argparse.Namespace) -> None:
    """See to it that keys and values of all requests find room: those that wait for it would never decode together.

    Raises:
        ConfigError: they do not.
    """
    has, needs = sum(engine.figures.num_blocks.values()), run.batch * (num_blocks(run, args) - 1)
    if has < needs:
        raise ConfigError(
            f"{run.batch} requests need {needs} blocks of {BLOCK_SIZE} tokens in the end, both tiers have {has}: take "
            f"fewer requests or shorter prompts, or a machine with more DRAM"
        )


def number_bytes(args: argparse.Namespace) -> int:
    """Bytes of a weight."""
    return 4 if args.dtype is DTypeChoice.FP32 else 2


def make_placement(name: str, sizes: WeightSizes, gpu_bytes: int) -> Placement:
    """One of the baselines, with so many bytes on the GPU at most."""
    if name == "streamed":
        return fill_placement(sizes, gpu_bytes, streamed_share=1.0)
    if name == "cpu":
        return fill_placement(sizes, 0, streamed_share=0.0)
    of_layer = [attention + mlp for attention, mlp in zip(sizes.attention, sizes.mlp, strict=True)]
    num, left = 0, gpu_bytes - sizes.head
    while num < len(of_layer) and left >= of_layer[num]:
        left -= of_layer[num]
        num += 1
    on_cpu = WeightSplit(on_gpu=0.0, on_cpu=1.0)
    elsewhere = LayerPlacement(attention=on_cpu, mlp=on_cpu)
    return Placement(layers=(elsewhere,) * (len(of_layer) - num) + (LayerPlacement(),) * num)


def lane_bytes(engine: Engine, batch: int, kv: dict[Lane, int]) -> dict[str, int]:
    """Bytes that each lane reads in a step: weights, and keys and values."""
    held = {entry.owner: entry.num_bytes for entry in engine.figures.ledger.entries(Tier.GPU)}
    spec, size = engine.figures.spec, engine.figures.dtype.num_bytes
    looked_up = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size * size
    steps = engine.core.executor.decode_steps  # type: ignore[attr-defined]  # the runner's
    rows = next((rows for rows in make_buckets(batch) if rows >= batch), batch)
    lanes = steps.weight_lanes.num_bytes(rows) if steps is not None and steps.weight_lanes is not None else {}
    return {
        "gpu": held["weights"] - looked_up + kv.get(Lane.GPU, 0),
        "cpu": lanes.get(Lane.CPU, 0) + kv.get(Lane.CPU, 0),
        "link": lanes.get(Lane.STREAM, 0) + kv.get(Lane.STREAM, 0),
    }


def neurons_between(before: NeuronFigures | None, after: NeuronFigures | None) -> dict[str, float] | None:
    """Shares in the measured steps alone; None: nothing can be left out."""
    if before is None or after is None:
        return None

    def share(part: str, whole: str, one: Any = before, other: Any = after) -> float:
        return significant(
            (getattr(other, part) - getattr(one, part)) / max(1, getattr(other, whole) - getattr(one, whole)), 4
        )

    figures = {
        "active_share": share("num_active", "num_neurons"),
        "columns_read_share": share("num_rows_read", "num_rows"),
        "candidate_share": share("num_candidates", "num_screened"),
        "screened_share": share("num_screened", "num_rows"),
    }
    if before.cache is not None and after.cache is not None:
        figures["hit_rate"] = share("num_hits", "num_active", before.cache, after.cache)
        figures["moved_pairs"] = after.cache.num_moved - before.cache.num_moved
    return figures


def bytes_left_out(engine: Engine, batch: int, neurons: dict[str, float] | None) -> int:
    """Bytes a step of the CPU's parts of MLPs that it did not read: columns, and rows in front of them that a screen
    ruled out, less what the screen reads itself (34 bytes for 32 numbers)."""
    steps = engine.core.executor.decode_steps  # type: ignore[attr-defined]  # the runner's
    if neurons is None or steps is None or steps.weight_lanes is None:
        return 0
    rows = next((rows for rows in make_buckets(batch) if rows >= batch), batch)
    sides = [place.side for place in steps.weight_lanes.places(rows) if isinstance(place.side, SparseSide)]
    whole = sum(part.num_bytes for side in sides for part in side.parts)
    size = engine.figures.dtype.num_bytes
    columns = 1.0 - neurons["columns_read_share"]
    in_front = neurons["screened_share"] * (1.0 - neurons["candidate_share"] - 34 / 32 / size)
    return int(whole / 2 * (columns + in_front))


def print_point(run: Run, point: dict[str, Any]) -> None:
    """Lines for people."""
    if "prefill_s" in point:
        print(f"{run}: a prompt takes {point['prefill_s']} s, {point['prefill_tokens_per_s']} tokens/s", flush=True)
        return
    took, lanes = point["step_s"], point["lane_bytes"]
    print(
        f"{run}: {took['median'] * 1e3:8.1f} ms a step "
        f"({took['q20'] * 1e3:.1f} … {took['q80'] * 1e3:.1f}), floor {point['floor_s'] * 1e3:.1f} ms "
        f"(times {point['times_floor']}), {point['tokens_per_s']} tokens/s; GB a step: "
        + ", ".join(f"{lane} {size / 1e9:.2f}" for lane, size in lanes.items())
        + "; ms at least: "
        + ", ".join(f"{lane} {seconds * 1e3:.0f}" for lane, seconds in point["lane_s"].items())
        + f"; replayed {point['num_replayed_steps']}, {point['num_graph_failures']} captures failed",
        flush=True,
    )
    if point["neurons"] is not None:
        print("      " + ", ".join(f"{name} {value}" for name, value in point["neurons"].items()), flush=True)
    for name, fact in point["facts"].items():
        print(f"      {name}: {fact}", flush=True)


if __name__ == "__main__":
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        os.execv(sys.executable, [sys.executable, *sys.argv])  # torch has read it as it was
    sys.exit(main())

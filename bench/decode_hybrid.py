"""How fast is decode when most of the KV cache lies in DRAM, against what the lanes' links allow?

    .venv/bin/python bench/decode_hybrid.py                          # Llama-3.1-8B's shape, random weights, bf16
    .venv/bin/python bench/decode_hybrid.py --shape tiny --device cpu --dtype fp32 --points 2x600 --steps 4

Sink and recent window lie on the GPU, the rest in DRAM. Prompts are not computed: K and V are random numbers, so that
long contexts cost no device time; decode steps are computed as always. Floor of a step: the slower of the two lanes,

    GPU    weights (all but the embedding) and K and V of its tier, over its measured read bandwidth
    CPU    K and V of DRAM, over the DRAM read bandwidth that the lane's own threads reach in the same run; the stream
           lane takes a share of them off it over the link, so that a step may be below this floor
    DRAM   K and V of DRAM, over what DRAM gives in all while those threads and the copy engine read it at once

and beside it the sum of both, which is the floor of one request whose layers follow each other. `lane_s`: what the CPU
lane takes for all layers when nothing keeps it waiting. Appends one JSON line to bench/results/decode_hybrid.jsonl.
"""

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import decode_gpu
from ambidex import EngineConfig
from ambidex.attention.selective import SelectiveAttention
from ambidex.attention.tiered import TieredAttention
from ambidex.bench.workload import WARMUP, end, warm_up
from ambidex.core.config import DeviceKind, DTypeChoice, Graphs, KVDTypeChoice, LoadFormat
from ambidex.core.dtypes import DType
from ambidex.core.errors import AmbidexError
from ambidex.core.ids import Lane
from ambidex.core.kv_spec import KeptRows, KVOrder, KVSpec, scan_bytes_per_block
from ambidex.core.policy import PolicyName
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.models.weights import DUMMY_SCORE_STD
from ambidex.runner.decode import DecodeForm
from ambidex.runner.graphs import DecodeSteps
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import call_model
from harness import Quantiles, append_record, environment, significant

DRAM_PROBE_BYTES: Final = 4 * 2**30
COPY_BYTES: Final = 256 * 2**20
NUM_LANE_RUNS: Final = 12
DUMMY_STD: Final = 0.02
"""Of dummy weights."""
INT8_STD: Final = 30.0


class RandomPrompts:
    """Calls the model for decode steps alone; in others, K and V are what the pools were filled with at the first.

    Args:
        width: of hidden states.
        score_spread: standard deviation of scores in nats; None: that of dummy weights (`models/weights.py`).
    """

    def __init__(self, width: int, score_spread: float | None) -> None:
        self._width = width
        spread = DUMMY_SCORE_STD if score_spread is None else score_spread
        self._key_std = DUMMY_STD * width**0.5 * spread / DUMMY_SCORE_STD
        self._is_filled = False

    def __call__(self, model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        has_prompts = isinstance(attention, TieredAttention) or (
            isinstance(attention, SelectiveAttention) and attention.has_prompts
        )
        if not has_prompts:
            return call_model(model, batch, attention)
        assert isinstance(attention, TieredAttention | SelectiveAttention), "others have no prompts"
        if not self._is_filled:
            self._is_filled = True
            fill_pools(attention, key_std=self._key_std)
        if isinstance(attention, SelectiveAttention):
            attention.skip_prompts()
        dtype = next(model.parameters()).dtype
        return torch.zeros(len(batch.token_ids), self._width, dtype=dtype, device=batch.token_ids.device)


def fill_pools(attention: TieredAttention | SelectiveAttention, *, key_std: float) -> None:
    """Fill the pools of both tiers with numbers of a normal distribution, the same for every few blocks.

    With the spread of keys that dummy weights give, scores have theirs, too (`models/weights.py`).
    """
    for pool in attention.pools.values():
        for part, std in zip(pool.tensors, (key_std, 1.0, key_std, 1.0), strict=False):
            flat = part.view(-1)
            if not flat.numel():
                continue
            pattern = torch.randn(min(flat.numel(), 2**22), device=part.device)
            if part.dtype == torch.int8:
                pattern = (pattern * INT8_STD).round().clamp(-127, 127)
            elif pool.tensors[0].dtype == torch.int8:
                pattern = torch.full_like(pattern, std / INT8_STD)  # scales
            else:
                pattern *= std
            pattern = pattern.to(part.dtype)
            whole = flat.numel() // pattern.numel()
            flat[: whole * pattern.numel()].view(whole, -1).copy_(pattern)
            flat[whole * pattern.numel() :].copy_(pattern[: flat.numel() - whole * pattern.numel()])


def main() -> int:
    """Measure, print, record."""
    options, args = parse_options()
    opening = environment()
    watch = decode_gpu.watch_memory(options.device)
    try:
        with tempfile.TemporaryDirectory() as folder:
            decode_gpu.make_model_folder(Path(folder), options.shape)
            width = decode_gpu.shape_number(options.shape, "hidden_size")
            form = None if options.device is DeviceKind.CUDA else DecodeForm.FIXED
            start = time.perf_counter()
            engine = build_engine(
                make_config(folder, options, args), forward=RandomPrompts(width, args.score_spread), decode_form=form
            )
            load_s = time.perf_counter() - start
            weight_bytes = decode_gpu.count_weight_bytes(folder, options.dtype)
    except AmbidexError as error:
        print(error, file=sys.stderr)
        return 2
    is_cuda = torch.device(engine.report.value("compute", "device")).type == "cuda"
    gpu = decode_gpu.read_gpu_bandwidth() if is_cuda else decode_gpu.read_cpu_bandwidth()
    lane = CpuLane(engine)
    dram = lane.read_bandwidth()
    both = lane.read_beside_copies() if is_cuda else dram
    share, why = (find("compute", "stream_share") for find in (engine.report.value, engine.report.why))
    print(f"decode: {engine.report.value('compute', 'decode')}; stream lane {share} ({why}); built in "
          f"{load_s:.1f} s; weights of a step "
          f"{weight_bytes / 1e9:.2f} GB; GPU memory is read at {gpu.median / 1e9:.0f} GB/s, DRAM by "
          f"{lane.num_threads} threads at {dram.median / 1e9:.1f} GB/s, by them and the copy engine at once at "
          f"{both.median / 1e9:.1f} GB/s", flush=True)  # fmt: skip
    points = []
    decode_gpu.forget_probes(watch)
    for point in options.points:
        figures = measure(engine, point, options, lane, gpu=gpu, dram=dram, both=both, weight_bytes=weight_bytes)
        points.append(figures)
        print_point(figures)
    memory = watch.read(engine.figures.ledger)
    print(memory.words(), flush=True)
    record = {
        "bench": "decode_hybrid", **opening,
        "settings": {"shape": options.shape, "dtype": options.dtype.value, "kv_dtype": args.kv_dtype.value,
                     "policy": args.policy.value, "max_dropped_mass": args.max_dropped_mass,
                     "score_spread": args.score_spread, "hot": args.hot, "exact_layers": args.exact_layers,
                     "steps": options.steps, "block_size": decode_gpu.BLOCK_SIZE, "sink": args.sink,
                     "recent": args.recent, "stream_share": engine.report.value("compute", "stream_share"),
                     "stream_why": engine.report.why("compute", "stream_share"), "threads": lane.num_threads,
                     "decode": engine.report.value("compute", "decode"), "prompts": "not computed: random K and V",
                     "warmup": WARMUP},
        "load_s": significant(load_s, 3), "weight_bytes": weight_bytes,
        "gpu_read_bandwidth": {"unit": "bytes/s", **gpu.record()},
        "dram_read_bandwidth": {"unit": "bytes/s", **dram.record()},
        "dram_read_bandwidth_beside_copies": {"unit": "bytes/s", **both.record()},
        "memory": memory.record(),
        "num_graph_failures": engine.stats.num_graph_failures, "points": points,
        "hot": None if engine.stats.hot is None else dataclasses.asdict(engine.stats.hot),
    }  # fmt: skip
    print(append_record(options.output, record))
    return 0


def parse_options() -> tuple[decode_gpu.Options, argparse.Namespace]:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    decode_gpu.add_model_options(parser, output="decode_hybrid.jsonl")
    add_step_options(parser, points="1x2048,1x8192,1x16384,1x32768")
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each point")
    parser.add_argument("--policy", type=PolicyName, default=PolicyName.EXACT, help="which keys are attended",
                        choices=[PolicyName.EXACT, PolicyName.BOUNDED, PolicyName.INFINIGEN,
                                 PolicyName.HYBRIDGEN])  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="list the kernels that take the most time")
    args = parser.parse_args()
    return read_step_options(parser, args, steps=args.steps, profile=args.profile), args


def add_step_options(parser: argparse.ArgumentParser, *, points: str) -> None:
    """What `make_config` looks at beside the model; points: what is measured if nothing is asked for."""
    parser.add_argument("--points", default=points, help="BATCHxCONTEXT, in this order")
    parser.add_argument("--sink", type=int, default=64, help="first tokens on the GPU")
    parser.add_argument("--recent", type=int, default=1024, help="last tokens on the GPU")
    parser.add_argument("--kv-dtype", type=KVDTypeChoice, choices=list(KVDTypeChoice), default=KVDTypeChoice.AUTO,
                        help="number format of K and V in DRAM")  # fmt: skip
    parser.add_argument("--stream-percent", type=int, help="of keys in DRAM, for the stream lane; default: measured")
    parser.add_argument("--max-dropped-mass", type=float, default=0.01, help="of each softmax, with bounded")
    parser.add_argument("--hot", type=int, default=0, help="tokens of each request on the GPU for copies of hot "
                        "blocks, with bounded; they come a few blocks a step, so ask for some hundred "
                        "steps")  # fmt: skip
    parser.add_argument("--exact-layers", type=int, help="first layers that attend all keys, with infinigen and "
                        "hybridgen; default: 2")  # fmt: skip
    parser.add_argument("--score-spread", type=float, help="standard deviation of scores in nats, of a normal "
                        "distribution; default: that of dummy weights, 4.5")  # fmt: skip


def read_step_options(
    parser: argparse.ArgumentParser, args: argparse.Namespace, *, steps: int, profile: bool = False
) -> decode_gpu.Options:
    """Options of a run of so many counted steps; ends the program with code 2 if some are wrong."""
    try:
        points = tuple(decode_gpu.Point.parse(word) for word in args.points.split(","))
    except ValueError as error:
        parser.error(f"--points: {error}, as in 1x2048,16x8192")
    if args.score_spread is not None and not args.score_spread > 0:
        parser.error(f"--score-spread: expected more than 0, got {args.score_spread}")
    if min(steps, args.recent) < 1 or args.sink < 0:
        parser.error("--steps and --recent must be at least 1, --sink at least 0")
    return decode_gpu.Options(
        shape=args.shape, points=points, steps=steps, chunk=8192, device=args.device, dtype=args.dtype,
        graphs=Graphs.AUTO, profile=profile, output=args.output,
    )  # fmt: skip


def make_config(folder: str, options: decode_gpu.Options, args: argparse.Namespace) -> EngineConfig:
    """An engine whose DRAM tier holds the largest point, and whose GPU tier holds sinks and recent windows."""
    more = decode_gpu.num_output_tokens(options, options.points)
    batch = max(point.batch for point in options.points)
    near = args.sink + args.recent + 3 * decode_gpu.BLOCK_SIZE
    config = EngineConfig(
        model=folder,
        device=options.device,
        dtype=options.dtype,
        kv_dtype=args.kv_dtype,
        load_format=LoadFormat.DUMMY,
        block_size=decode_gpu.BLOCK_SIZE,
        max_context_len=max(point.context for point in options.points) + more,
        max_tokens_per_step=options.chunk,
        max_running_requests=batch,
        kv_gpu_tokens=batch * (near + args.hot),
        num_sink_tokens=args.sink,
        recent_window=args.recent,
        stream_percent=args.stream_percent,
        policy=args.policy,
        **(
            {"max_dropped_mass": args.max_dropped_mass, "hot_tokens": batch * args.hot}
            if args.policy is PolicyName.BOUNDED
            else {}
        ),
        exact_layers=args.exact_layers if args.policy.looks_ahead else None,
    )
    num_tokens = max(point.batch * (point.context + more + decode_gpu.BLOCK_SIZE) for point in options.points)
    kv = kv_in_dram(options, args)
    block_bytes = kv.bytes_per_block
    if args.policy is PolicyName.BOUNDED:
        block_bytes += scan_bytes_per_block(kv)
    num_blocks = -(-num_tokens // decode_gpu.BLOCK_SIZE)
    chooses = not args.policy.attends_all and args.policy is not PolicyName.BOUNDED
    kept = kept_row_bytes(options, num_tokens + batch * (near + decode_gpu.BLOCK_SIZE)) if chooses else 0
    return dataclasses.replace(config, dram_memory=num_blocks * block_bytes + kept)


def kept_row_bytes(options: decode_gpu.Options, num_tokens: int) -> int:
    """Bytes in host memory of what HybridGen, which keeps most, has of so many tokens beside their blocks."""
    num_layers, num_kv_heads, head_dim = decode_gpu.kv_sizes(options.shape)
    rows = KeptRows(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim,
        number_bytes=4 if options.dtype is DTypeChoice.FP32 else 2,
        num_q_heads=decode_gpu.shape_number(options.shape, "num_attention_heads"),
    )  # fmt: skip
    return num_tokens * (2 * num_layers * rows.part_bytes_per_layer + rows.score_bytes)


def kv_in_dram(options: decode_gpu.Options, args: argparse.Namespace) -> KVSpec:
    """The KV cache of the shape as the DRAM tier keeps it."""
    num_layers, num_kv_heads, head_dim = decode_gpu.kv_sizes(options.shape)
    return KVSpec(
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=DType((options.dtype if args.kv_dtype is KVDTypeChoice.AUTO else args.kv_dtype).value),
        block_size=decode_gpu.BLOCK_SIZE,
        order=KVOrder.TILES,
    )


class CpuLane:
    """The engine's CPU lane by itself."""

    def __init__(self, engine: Engine) -> None:
        steps = engine.core.executor.decode_steps  # type: ignore[attr-defined]  # the runner's
        assert steps is not None, "there is no GPU tier, or graphs are off"
        self._steps = steps
        self._threads = steps.dram_threads
        self.is_alone = isinstance(steps, DecodeSteps)
        """It has nothing but keys to attend; HybridGen has it score keys, too."""

    @property
    def num_threads(self) -> int:
        """Threads that attend."""
        return int(self._threads.num_threads)

    def read_bandwidth(self) -> Quantiles:
        """Bytes/s at which the lane's threads read DRAM."""
        buffer = torch.zeros(DRAM_PROBE_BYTES if torch.cuda.is_available() else 2**28, dtype=torch.uint8)
        buffer.fill_(1)
        samples = []
        for _ in range(7):
            start = time.perf_counter()
            self._threads.read(buffer)
            samples.append(buffer.numel() / (time.perf_counter() - start))
        return Quantiles.of(samples[1:])

    def read_beside_copies(self) -> Quantiles:
        """Bytes/s that DRAM gives in all while the lane's threads read it and the copy engine brings it to the GPU."""
        buffer = torch.ones(DRAM_PROBE_BYTES, dtype=torch.uint8)
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
        target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        samples = []
        for _ in range(5):
            ends = []
            for _ in range(2 * DRAM_PROBE_BYTES // COPY_BYTES):
                target.copy_(source, non_blocking=True)
                ends.append(torch.cuda.current_stream().record_event())
            start, num_before = time.perf_counter(), sum(end.query() for end in ends)
            self._threads.read(buffer)
            num_bytes = buffer.numel() + COPY_BYTES * (sum(end.query() for end in ends) - num_before)
            samples.append(num_bytes / (time.perf_counter() - start))
            torch.cuda.synchronize()
        return Quantiles.of(samples[1:])

    def layers_s(self, num_rows: int) -> Quantiles:
        """Seconds of all layers of the last step's keys, its queries all there at once."""
        samples = []
        for _ in range(NUM_LANE_RUNS):
            start = time.perf_counter()
            self._steps.answer_alone(num_rows)
            samples.append(time.perf_counter() - start)
        return Quantiles.of(samples[2:])


def measure(
    engine: Engine,
    point: decode_gpu.Point,
    options: decode_gpu.Options,
    lane: CpuLane,
    *,
    gpu: Quantiles,
    dram: Quantiles,
    both: Quantiles,
    weight_bytes: int,
) -> dict[str, Any]:
    """Fill the contexts of a point, time its steps and end its requests."""
    requests, fill_s = decode_gpu.fill(engine, point, options)
    num_warmup = warm_up(engine, lambda: decode_gpu.step(engine, point))
    before = dict(engine.stats.lane_bytes)
    replayed_before, sections_before = engine.stats.num_replayed_steps, dict(engine.stats.seconds)
    seconds = []
    for _ in range(options.steps):
        start = time.perf_counter()
        decode_gpu.step(engine, point)
        seconds.append(time.perf_counter() - start)
    read = {
        name: (engine.stats.lane_bytes[name] - before.get(name, 0)) // options.steps
        for name in (Lane.GPU, Lane.CPU, Lane.STREAM)
    }
    step_s = Quantiles.of(seconds)
    gpu_s = (weight_bytes + read[Lane.GPU]) / gpu.median
    cpu_s = (read[Lane.CPU] + read[Lane.STREAM]) / dram.median
    both_s = (read[Lane.CPU] + read[Lane.STREAM]) / max(dram.median, both.median)
    is_split = read[Lane.CPU] > 0
    lane_s = lane.layers_s(point.batch) if is_split and lane.is_alone else None
    chosen = engine.stats.selection
    figures = {
        "selection": dataclasses.asdict(chosen) if chosen is not None else None,
        "batch": point.batch, "context": point.context, "fill_s": significant(fill_s, 3),
        "num_warmup": num_warmup,
        "step_s": step_s.record(), "lane_s": lane_s.record() if lane_s else None,
        "lane_bytes": {str(name): num for name, num in read.items()},
        "floor_gpu_s": significant(gpu_s), "floor_cpu_s": significant(cpu_s), "floor_dram_s": significant(both_s),
        "times_floor": significant(step_s.median / max(gpu_s, both_s), 3),
        "share_of_slower_lane": significant(max(gpu_s, cpu_s) / step_s.median, 3),
        "share_of_sum": significant((gpu_s + cpu_s) / step_s.median, 3),
        "lane_bytes_per_s": significant(read[Lane.CPU] / lane_s.median) if lane_s else None,
        "num_replayed_steps": engine.stats.num_replayed_steps - replayed_before,
        "sections_s": {name: significant((total - sections_before.get(name, 0.0)) / options.steps, 3)
                       for name, total in engine.stats.seconds.items()},
        "kernels": decode_gpu.profile(engine, point) if options.profile else None,
    }  # fmt: skip
    end(engine, requests)
    return figures


def print_point(figures: Mapping[str, Any]) -> None:
    """A line for a point, and its kernels."""
    took, lane = figures["step_s"], figures["lane_s"]
    alone = f"{lane['median'] * 1e3:.3f} ms at {figures['lane_bytes_per_s'] / 1e9:.1f} GB/s" if lane else "idle"
    print(
        f"{figures['batch']:3} x {figures['context']:6}: {took['median'] * 1e3:8.3f} ms a step "
        f"({took['q20'] * 1e3:.3f} … {took['q80'] * 1e3:.3f}); floors GPU {figures['floor_gpu_s'] * 1e3:.3f}, CPU "
        f"{figures['floor_cpu_s'] * 1e3:.3f}, DRAM by both {figures['floor_dram_s'] * 1e3:.3f} ms: "
        f"{figures['times_floor']:.2f} times the slower; bytes {figures['lane_bytes']}; share of the slower "
        f"{figures['share_of_slower_lane']:.2f}, of the sum "
        f"{figures['share_of_sum']:.2f}; CPU lane alone {alone}; replayed {figures['num_replayed_steps']} of "
        f"{took['num']}; filled in {figures['fill_s']:.1f} s; sections {figures['sections_s']}",
        flush=True,
    )
    if chosen := figures["selection"]:
        print(f"      attended {chosen['num_attended'] / chosen['num_visible']:.1%} of keys; dropped mass at most "
              f"{chosen['max_dropped_mass']:.4f}", flush=True)  # fmt: skip
    for name, seconds in (figures["kernels"] or {}).items():
        print(f"      {seconds * 1e6:9.1f} µs  {name[:120]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""How fast is decode on a GPU whose memory holds the whole KV cache, against what its memory bandwidth allows?

    .venv/bin/python bench/decode_gpu.py                              # Llama-3.1-8B's shape, random weights, bf16
    .venv/bin/python bench/decode_gpu.py --points 1x2048 --profile    # where the time of a step goes

Each point is BATCHxCONTEXT. Random prompts are computed in large chunks, then steps are timed, from the scheduler to
the chosen tokens on the host. Floor: every weight but the embedding once, and K and V that the attention reads, over
the read bandwidth measured in the same run. Appends one JSON line to bench/results/decode_gpu.jsonl.
"""

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models

from ambidex import EngineConfig, SamplingParams
from ambidex.bench.memory_use import MemoryWatch
from ambidex.bench.workload import MOST_WARMUP_STEPS, WARMUP, end, warm_up
from ambidex.core.config import DeviceKind, DTypeChoice, Graphs, LoadFormat
from ambidex.core.errors import AmbidexError
from ambidex.core.ids import Lane
from ambidex.core.request import Request
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec
from ambidex.models.registry import build_model
from harness import (
    REPO,
    Quantiles,
    append_record,
    environment,
    gpu_read_rate,
    probe_bytes,
    read_bandwidth,
    significant,
)
from peers import shapes

SHAPES: Final[Mapping[str, Mapping[str, object]]] = {
    **shapes.SHAPES,
    "llama-3.1-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    },
    "qwen2.5-7b": {
        "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "max_position_embeddings": 1048576, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6,
    },
    "opt-30b": {
        "model_type": "opt", "hidden_size": 7168, "ffn_dim": 28672,
        "num_hidden_layers": 48, "num_attention_heads": 56, "vocab_size": 50272, "max_position_embeddings": 2048,
        "word_embed_proj_dim": 7168, "do_layer_norm_before": True, "activation_function": "relu",
        "tie_word_embeddings": True,
    },
    "llama-2-70b": {
        "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096, "rope_theta": 10000.0,
    },
    "tiny-opt": {
        "model_type": "opt", "hidden_size": 512, "ffn_dim": 4096,
        "num_hidden_layers": 4, "num_attention_heads": 8, "vocab_size": 512, "max_position_embeddings": 2048,
        "word_embed_proj_dim": 512, "do_layer_norm_before": True, "activation_function": "relu",
        "tie_word_embeddings": True,
    },
    "tiny": {  # to try the script
        "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 4096, "rope_theta": 10000.0,
    },
}  # fmt: skip
"""Name → what its config.json says, beside what all of them share: those of the peers, and others."""
ARCHITECTURES: Final[Mapping[object, str]] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "opt": "OPTForCausalLM",
}
"""Of a model type."""
NUM_PROFILED_STEPS: Final = 5
NUM_KERNELS: Final = 14
"""Kernels that a profile lists; the rest is summed up."""
BLOCK_SIZE: Final = 64
MOST_FILL_S: Final = 300.0
"""Of a point's prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A batch of requests and the tokens that each has before its first measured step."""

    batch: int
    context: int

    @classmethod
    def parse(cls, word: str) -> "Point":
        """`16x8192`.

        Raises:
            ValueError: the word has another form.
        """
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", word)
        if found is None:
            raise ValueError(f"{word!r} is not BATCHxCONTEXT")
        return cls(batch=int(found[1]), context=int(found[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    shape: str
    points: tuple[Point, ...]
    steps: int
    chunk: int
    device: DeviceKind
    dtype: DTypeChoice
    graphs: Graphs
    profile: bool
    output: Path


def main() -> int:
    """Measure, print, record."""
    options = parse_options()
    opening = environment()
    watch = watch_memory(options.device)
    try:
        with tempfile.TemporaryDirectory() as folder:
            make_model_folder(Path(folder), options.shape)
            start = time.perf_counter()
            engine = build_engine(make_config(folder, options))
            load_s = time.perf_counter() - start
            weight_bytes = count_weight_bytes(folder, options.dtype)
    except AmbidexError as error:
        print(error, file=sys.stderr)
        return 2
    is_cuda = torch.device(engine.report.value("compute", "device")).type == "cuda"
    bandwidth = read_gpu_bandwidth() if is_cuda else read_cpu_bandwidth()
    print(f"decode: {engine.report.value('compute', 'decode')}; built in {load_s:.1f} s; weights of a step "
          f"{weight_bytes / 1e9:.2f} GB; memory is read at {bandwidth.median / 1e9:.0f} GB/s", flush=True)  # fmt: skip
    points = []
    forget_probes(watch)
    for point in options.points:
        points.append(measure(engine, point, options, weight_bytes=weight_bytes, bytes_per_s=bandwidth.median))
        print_point(points[-1])
    memory = watch.read(engine.figures.ledger)
    print(memory.words(), flush=True)
    record = {
        "bench": "decode_gpu", **opening,
        "settings": {"shape": options.shape, "dtype": options.dtype.value, "steps": options.steps,
                     "chunk": options.chunk, "block_size": BLOCK_SIZE, "graphs": options.graphs.value,
                     "decode": engine.report.value("compute", "decode"),
                     "warmup": WARMUP},
        "load_s": significant(load_s, 3), "weight_bytes": weight_bytes,
        "read_bandwidth": {"unit": "bytes/s", **bandwidth.record()},
        "memory": memory.record(),
        "num_graph_failures": engine.stats.num_graph_failures, "points": points,
    }  # fmt: skip
    print(append_record(options.output, record))
    return 0


def add_model_options(parser: argparse.ArgumentParser, *, output: str, shape: str = "llama-3.1-8b") -> None:
    """--shape, --device, --dtype and --output, as all benchmarks over a shape have them.

    Args:
        output: file in bench/results that gets a line; shape: of the model, if none is asked for.
    """
    parser.add_argument("--shape", choices=SHAPES, default=shape, help="of the model")
    parser.add_argument("--device", type=DeviceKind, choices=list(DeviceKind), default=DeviceKind.CUDA, help="where")
    parser.add_argument("--dtype", type=DTypeChoice, choices=[c for c in DTypeChoice if c is not DTypeChoice.AUTO],
                        default=DTypeChoice.BF16, help="number format")  # fmt: skip
    parser.add_argument("--output", type=Path, default=REPO / "bench/results" / output, help="gets a line")


def shape_number(shape: str, *names: str) -> int:
    """A number of a shape: the first of these fields that it has."""
    fields = SHAPES[shape]
    value = next(fields[name] for name in names if name in fields)
    if not isinstance(value, int):
        raise TypeError(f"{names} of {shape}: expected a whole number, got {value!r}")
    return value


def kv_sizes(shape: str) -> tuple[int, int, int]:
    """Layers, KV heads and head_dim of a shape."""
    heads = shape_number(shape, "num_attention_heads")
    kv_heads = shape_number(shape, "num_key_value_heads", "num_attention_heads")
    return shape_number(shape, "num_hidden_layers"), kv_heads, shape_number(shape, "hidden_size") // heads


def parse_options() -> Options:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    add_model_options(parser, output="decode_gpu.jsonl")
    parser.add_argument("--points", default="1x2048,1x8192,1x16384,16x8192", help="what to measure, in this order")
    parser.add_argument("--steps", type=int, default=40, help="measured steps of each point")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a step while prompts are computed")
    parser.add_argument("--graphs", type=Graphs, choices=list(Graphs), default=Graphs.AUTO, help="use")
    parser.add_argument("--profile", action="store_true", help="list the kernels that take the most time")
    args = parser.parse_args()
    try:
        points = tuple(Point.parse(word) for word in args.points.split(","))
    except ValueError as error:
        parser.error(f"--points: {error}, as in 1x2048,16x8192")
    if min(args.steps, args.chunk) < 1:
        parser.error("--steps and --chunk must be at least 1")
    return Options(**{**vars(args), "points": points})


def make_model_folder(folder: Path, shape: str) -> None:
    """A config.json of the shape and the smallest tokenizer that loads: no text is read or written here."""
    family = SHAPES[shape].get("model_type", "llama")
    config = {"architectures": [ARCHITECTURES[family]], "model_type": "llama", "hidden_act": "silu",
              "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
              "bos_token_id": 1, "eos_token_id": 2, **SHAPES[shape]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    Tokenizer(models.BPE(vocab={"<unk>": 0, "a": 1, "b": 2}, merges=[], unk_token="<unk>")).save(
        str(folder / "tokenizer.json")
    )


def make_config(folder: str, options: Options) -> EngineConfig:
    """An engine whose accelerator tier holds the largest point whole."""
    longest = max(point.context for point in options.points) + num_output_tokens(options, options.points)
    return EngineConfig(
        model=folder,
        device=options.device,
        dtype=options.dtype,
        load_format=LoadFormat.DUMMY,
        block_size=BLOCK_SIZE,
        max_context_len=longest,
        max_tokens_per_step=options.chunk,
        max_running_requests=max(point.batch for point in options.points),
        kv_gpu_tokens=max(
            point.batch * (point.context + num_output_tokens(options, options.points) + BLOCK_SIZE)
            for point in options.points
        ),
        dram_memory=0,
        graphs=options.graphs,
    )


def num_output_tokens(options: Options, points: Sequence[Point]) -> int:
    """More than any request gives: those that come first decode while the prompts of the others are computed."""
    num_chunks = max(point.batch * -(-point.context // options.chunk) for point in points)
    return 2 * num_chunks + MOST_WARMUP_STEPS + options.steps + NUM_PROFILED_STEPS + 8


def count_weight_bytes(folder: str, dtype: DTypeChoice) -> int:
    """Bytes of weights that one decode step reads: all but the embedding, of which it reads a row a token."""
    spec = read_spec(find_model(folder))
    size = 4 if dtype is DTypeChoice.FP32 else 2
    skeleton = build_model(spec, device=torch.device("meta"), dtype=torch.float32)
    looked_up = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size  # tied: read whole for the logits
    return size * (sum(p.numel() for p in skeleton.parameters()) - looked_up)


def watch_memory(device: DeviceKind) -> MemoryWatch:
    """Made before the engine; what CUDA takes by itself, on the GPU and on the host, is taken before."""
    is_cuda = device is not DeviceKind.CPU and torch.cuda.is_available()
    if is_cuda:
        torch.zeros(1, device="cuda")
    return MemoryWatch(torch.device("cuda" if is_cuda else "cpu"))


def forget_probes(watch: MemoryWatch) -> None:
    """Buffers that rates were measured with are none of the engine's: peaks count from here on."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # pinned buffers; what torch offers for it
        torch.cuda.reset_peak_memory_stats()
    watch.engine_is_ready()


def read_gpu_bandwidth() -> Quantiles:
    """Bytes/s at which the GPU reads a large buffer."""
    return gpu_read_rate(torch.device("cuda"))


def read_cpu_bandwidth() -> Quantiles:
    """Bytes/s at which this machine's DRAM is read, for runs without a GPU."""
    return read_bandwidth(num_threads=torch.get_num_threads(), num_bytes=min(probe_bytes(), 2**28))


def measure(engine: Engine, point: Point, options: Options, *, weight_bytes: int, bytes_per_s: float) -> dict[str, Any]:
    """Fill the contexts of a point, time its steps and end its requests."""
    requests, fill_s = fill(engine, point, options)
    num_warmup = warm_up(engine, lambda: step(engine, point))
    before = engine.stats.lane_bytes[Lane.GPU]
    replayed_before, sections_before = engine.stats.num_replayed_steps, dict(engine.stats.seconds)
    seconds = []
    for _ in range(options.steps):
        start = time.perf_counter()
        step(engine, point)
        seconds.append(time.perf_counter() - start)
    kv_bytes = (engine.stats.lane_bytes[Lane.GPU] - before) // options.steps
    quantiles = Quantiles.of(seconds)
    floor_s = (weight_bytes + kv_bytes) / bytes_per_s
    figures = {
        "batch": point.batch, "context": point.context,
        "fill_s": significant(fill_s, 3), "num_warmup": num_warmup,
        "step_s": quantiles.record(),
        "kv_bytes": kv_bytes,
        "floor_s": significant(floor_s), "share_of_floor": significant(floor_s / quantiles.median, 3),
        "num_replayed_steps": engine.stats.num_replayed_steps - replayed_before,
        "sections_s": {name: significant((total - sections_before.get(name, 0.0)) / options.steps, 3)
                       for name, total in engine.stats.seconds.items()},
        "kernels": profile(engine, point) if options.profile else None,
    }  # fmt: skip
    end(engine, requests)
    return figures


def fill(engine: Engine, point: Point, options: Options, *, temperature: float = 0.0) -> tuple[list[Request], float]:
    """Queue a point's prompts and step until each has its first token; returns them and the seconds that took.

    Raises:
        RuntimeError: a request failed, ended or had to give up its blocks, or the prompts do not come to an end.
    """
    before = engine.core.scheduler.num_preemptions
    rng = random.Random(point.batch * 1_000_003 + point.context)
    vocab_size = shape_number(options.shape, "vocab_size")
    params = SamplingParams(
        max_output_tokens=num_output_tokens(options, options.points), temperature=temperature, ignore_eos=True
    )
    start = time.perf_counter()
    requests = []
    for _ in range(point.batch):
        prompt = [rng.randrange(3, vocab_size) for _ in range(point.context)]
        requests.append(engine.make_request(prompt, params))
        engine.core.scheduler.add(requests[-1])
    while not all(request.output_token_ids for request in requests):
        engine.core.step()
        if ended := [request for request in requests if request.finish_reason is not None]:
            raise RuntimeError(f"a request ended before all had a token: {ended[0].error or ended[0].finish_reason}")
        if engine.core.scheduler.num_preemptions > before:
            raise RuntimeError(f"the blocks of keys and values do not hold {len(requests)} requests at a time")
        if time.perf_counter() - start > MOST_FILL_S:
            waiting = sum(not request.output_token_ids for request in requests)
            raise RuntimeError(f"{waiting} of {len(requests)} requests have no token after {MOST_FILL_S:.0f} s")
    return requests, time.perf_counter() - start


def step(engine: Engine, point: Point) -> None:
    """One decode step of all requests of a point.

    Raises:
        RuntimeError: a request failed or ended, so that the step was not what is to be measured.
    """
    _, tokens = engine.core.step()
    if len(tokens) != point.batch:
        raise RuntimeError(f"a step gave {len(tokens)} tokens for {point.batch} requests")


def profile(engine: Engine, point: Point) -> dict[str, float]:
    """Seconds a step of each of the kernels that take the most time on the device, and of all others together."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(NUM_PROFILED_STEPS):
            step(engine, point)
    kernels = [
        (f"{event.key} ×{event.count / NUM_PROFILED_STEPS:g}", event.self_device_time_total / 1e6 / NUM_PROFILED_STEPS)
        for event in profiler.key_averages()
        if event.self_device_time_total > 0 and event.device_type != torch.autograd.DeviceType.CPU
    ]
    kernels.sort(key=lambda kernel: kernel[1], reverse=True)
    shown = {name: significant(seconds) for name, seconds in kernels[:NUM_KERNELS]}
    shown["others"] = significant(sum(seconds for _, seconds in kernels[NUM_KERNELS:]))
    shown["all"] = significant(sum(seconds for _, seconds in kernels))
    return shown


def print_point(figures: Mapping[str, Any]) -> None:
    """A line for a point, and its kernels."""
    took = figures["step_s"]
    print(
        f"{figures['batch']:3} x {figures['context']:6}: {took['median'] * 1e3:8.3f} ms a step "
        f"({took['q20'] * 1e3:.3f} … {took['q80'] * 1e3:.3f}), floor {figures['floor_s'] * 1e3:.3f} ms, "
        f"share {figures['share_of_floor']:.2f}, replayed {figures['num_replayed_steps']} of {took['num']}; "
        f"filled in {figures['fill_s']:.1f} s; sections {figures['sections_s']}",
        flush=True,
    )
    for name, seconds in (figures["kernels"] or {}).items():
        print(f"      {seconds * 1e6:9.1f} µs  {name[:120]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

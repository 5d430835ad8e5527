"""How much slower is a long prompt whose keys lie in DRAM, all but sink and recent ones, than one with all on the GPU?

    .venv/bin/python bench/prefill_gpu.py                            # Llama-3.1-8B's shape, random weights, bf16
    .venv/bin/python bench/prefill_gpu.py --prompts 8192 --profile   # where the time of a prompt goes

A prompt is timed from the scheduler to its first token, alone, in chunks. Two floors, with rates measured in the same
run: all products and causal attention at the rate of a large matrix product; the keys that are streamed (or, where no
lane streams, read in DRAM) over the link's rate. Appends a JSON line a length to bench/results/prefill_gpu.jsonl.
"""

import argparse
import gc
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ambidex import EngineConfig, SamplingParams
from ambidex.core.config import DeviceKind, DTypeChoice, KVDTypeChoice, LoadFormat
from ambidex.core.dtypes import DType
from ambidex.core.errors import AmbidexError
from ambidex.core.ids import Lane
from ambidex.core.model_spec import ModelSpec
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec
from ambidex.runner.device import TORCH_DTYPES
from decode_gpu import BLOCK_SIZE, add_model_options, forget_probes, make_model_folder, shape_number, watch_memory
from harness import Quantiles, append_record, environment, measure_seconds, significant

NUM_SINK_TOKENS: Final = 64
RECENT_WINDOW: Final = 1024
VARIANTS: Final = ("gpu", "split")
"""All keys on the accelerator; sink and recent ones there, the others in DRAM."""
NUM_KERNELS: Final = 14
"""Kernels that a profile lists; the rest is summed up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line."""

    shape: str
    prompts: tuple[int, ...]
    chunk: int
    runs: int
    device: DeviceKind
    dtype: DTypeChoice
    kv_dtype: KVDTypeChoice
    profile: bool
    output: Path


def main() -> int:
    """Measure, print, record."""
    options = parse_options()
    opening = environment()
    figures: dict[str, dict[int, dict[str, Any]]] = {}
    try:
        with tempfile.TemporaryDirectory() as folder:
            make_model_folder(Path(folder), options.shape)
            spec = read_spec(find_model(folder))
            for variant in VARIANTS:
                figures[variant] = measure_variant(folder, variant, options)
    except AmbidexError as error:
        print(error, file=sys.stderr)
        return 2
    rates = measure_rates(options)
    for length in options.prompts:
        floor = {
            "compute_s": significant(count_flops(spec, length) / rates["flops_per_s"]),
            "link_s": significant(max(figures["split"][length]["lane_bytes"][name] for name in ("stream", "cpu"))
                                  / rates["link_bytes_per_s"]),
        }  # fmt: skip
        medians = {variant: figures[variant][length]["prompt_s"]["median"] for variant in VARIANTS}
        record = {
            "bench": "prefill_gpu", **opening,
            "settings": {"shape": options.shape, "dtype": options.dtype.value, "kv_dtype": options.kv_dtype.value,
                         "prompt": length, "chunk": options.chunk, "block_size": BLOCK_SIZE,
                         "num_sink_tokens": NUM_SINK_TOKENS, "recent_window": RECENT_WINDOW,
                         "warmup": "one prompt of each length"},
            "rates": rates, "floor": floor, "variants": {variant: figures[variant][length] for variant in VARIANTS},
            "ratio": significant(medians["gpu"] / medians["split"], 3),
            "share_of_floor": {variant: significant(max(floor.values()) / medians[variant], 3) for variant in VARIANTS},
        }  # fmt: skip
        print(f"{length:6} tokens: {length / medians['gpu']:8.0f} tokens/s all on the GPU, "
              f"{length / medians['split']:8.0f} split: ratio {record['ratio']:.3f}; floors: products "
              f"{floor['compute_s'] * 1e3:.0f} ms, link {floor['link_s'] * 1e3:.0f} ms", flush=True)  # fmt: skip
        print(append_record(options.output, record), flush=True)
    return 0


def parse_options() -> Options:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    add_model_options(parser, output="prefill_gpu.jsonl")
    parser.add_argument("--prompts", default="8192,32768", help="lengths in tokens")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--runs", type=int, default=3, help="measured prompts of each length")
    parser.add_argument("--kv-dtype", type=KVDTypeChoice, choices=list(KVDTypeChoice), default=KVDTypeChoice.AUTO,
                        help="number format of keys in DRAM")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="list the kernels that take the most time")
    args = parser.parse_args()
    try:
        prompts = tuple(int(word) for word in args.prompts.split(","))
    except ValueError:
        parser.error(f"--prompts: {args.prompts!r} are not lengths, as in 8192,32768")
    if min(*prompts, args.chunk, args.runs) < 1:
        parser.error("--prompts, --chunk and --runs must be at least 1")
    return Options(**{**vars(args), "prompts": prompts})


def make_config(folder: str, variant: str, options: Options) -> EngineConfig:
    """An engine for one prompt at a time, with room for the longest."""
    longest = max(options.prompts) + BLOCK_SIZE
    near = NUM_SINK_TOKENS + RECENT_WINDOW + options.chunk + 4 * BLOCK_SIZE
    spec = read_spec(find_model(folder))
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * (4 * spec.head_dim + 4)  # fp32, the widest
    return EngineConfig(
        model=folder,
        device=options.device,
        dtype=options.dtype,
        kv_dtype=options.kv_dtype,
        load_format=LoadFormat.DUMMY,
        block_size=BLOCK_SIZE,
        max_context_len=longest,
        max_tokens_per_step=options.chunk,
        max_running_requests=1,
        num_sink_tokens=NUM_SINK_TOKENS,
        recent_window=None if variant == "gpu" else RECENT_WINDOW,
        kv_gpu_tokens=longest + BLOCK_SIZE if variant == "gpu" else near,
        dram_memory=0 if variant == "gpu" else token_bytes * longest,
    )


def measure_variant(folder: str, variant: str, options: Options) -> dict[int, dict[str, Any]]:
    """Seconds of each length's prompts in an engine of its own."""
    watch = watch_memory(options.device)
    start = time.perf_counter()
    engine = build_engine(make_config(folder, variant, options))
    forget_probes(watch)
    print(f"{variant}: built in {time.perf_counter() - start:.1f} s", flush=True)
    figures = {}
    for length in options.prompts:
        run(engine, length, options)
        lanes, sections = dict(engine.stats.lane_bytes), dict(engine.stats.seconds)
        seconds = [run(engine, length, options) for _ in range(options.runs)]
        took = Quantiles.of(seconds)
        figures[length] = {
            "prompt_s": took.record(), "tokens_per_s": significant(length / took.median),
            "lane_bytes": {lane.value: (engine.stats.lane_bytes[lane] - lanes.get(lane, 0)) // options.runs
                           for lane in Lane},
            "sections_s": {name: significant((total - sections.get(name, 0.0)) / options.runs, 3)
                           for name, total in engine.stats.seconds.items()},
            "num_moves": engine.stats.num_moves, "num_failed_moves": engine.stats.num_failed_moves,
            "memory": watch.read(engine.figures.ledger).record(),
            "kernels": profile(engine, length, options) if options.profile else None,
        }  # fmt: skip
        print(
            f"  {length:6} tokens: {took.median * 1e3:.1f} ms ({took.q20 * 1e3:.1f} … {took.q80 * 1e3:.1f}), "
            f"lanes {figures[length]['lane_bytes']}, sections {figures[length]['sections_s']}",
            flush=True,
        )
        for name, used in (figures[length]["kernels"] or {}).items():
            print(f"      {used * 1e3:9.2f} ms  {name[:120]}", flush=True)
    print(watch.read(engine.figures.ledger).words(), flush=True)
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return figures


def run(engine: Engine, length: int, options: Options) -> float:
    """Seconds from a prompt's arrival to its first and only token.

    Raises:
        RuntimeError: the request failed.
    """
    rng = random.Random(length)
    vocab_size = shape_number(options.shape, "vocab_size")
    prompt = [rng.randrange(3, vocab_size) for _ in range(length)]
    request = engine.make_request(prompt, SamplingParams(max_output_tokens=1, temperature=0.0, ignore_eos=True))
    start = time.perf_counter()
    engine.core.scheduler.add(request)
    while not request.output_token_ids:
        if not engine.has_work:
            raise RuntimeError(f"the prompt of {length} tokens ended without a token")
        engine.core.step()
    seconds = time.perf_counter() - start
    while engine.has_work:
        engine.core.step()
    return seconds


def profile(engine: Engine, length: int, options: Options) -> dict[str, float]:
    """Seconds of a prompt in each of the kernels and copies that take the most time, and in all others together."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run(engine, length, options)
    kernels = [
        (f"{event.key} ×{event.count}", event.self_device_time_total / 1e6)
        for event in profiler.key_averages()
        if event.self_device_time_total > 0
    ]
    kernels.sort(key=lambda kernel: kernel[1], reverse=True)
    shown = {name: significant(seconds) for name, seconds in kernels[:NUM_KERNELS]}
    shown["others"] = significant(sum(seconds for _, seconds in kernels[NUM_KERNELS:]))
    return shown


def count_flops(spec: ModelSpec, length: int) -> float:
    """Operations of a prompt: 2 for each weight of the layers and token, 4 · Hq · D for each visible key; one token's
    logits."""
    attention = 2 * spec.hidden_size * (spec.num_q_heads + spec.num_kv_heads) * spec.head_dim
    weights = spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)
    visible = length * (length + 1) // 2
    scores = 4 * spec.num_layers * spec.num_q_heads * spec.head_dim * visible
    return 2.0 * weights * length + scores + 2.0 * spec.vocab_size * spec.hidden_size


def measure_rates(options: Options) -> Mapping[str, float]:
    """FLOP/s of a large matrix product, and bytes/s of a copy from pinned memory (of this machine's, on a CPU)."""
    device = torch.device("cuda" if options.device is not DeviceKind.CPU and torch.cuda.is_available() else "cpu")
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device).to(TORCH_DTYPES[DType(options.dtype.value)]) for _ in range(2))
    host = torch.empty((1 << 30) if device.type == "cuda" else (1 << 24), dtype=torch.uint8)
    host = host.pin_memory() if device.type == "cuda" else host
    target = torch.empty_like(host, device=device)

    def rate(work: Any, amount: float) -> float:
        def run_and_wait() -> None:
            work()
            if device.type == "cuda":
                torch.cuda.synchronize()

        return significant(amount / Quantiles.of(measure_seconds(run_and_wait, num_warmups=2, num_runs=5)).median)

    return {
        "flops_per_s": rate(lambda: a @ b, 2.0 * size**3),
        "link_bytes_per_s": rate(lambda: target.copy_(host, non_blocking=True), host.nbytes),
    }


if __name__ == "__main__":
    sys.exit(main())

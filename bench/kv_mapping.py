"""What does it cost that V lies in slower memory than K, and what if pages of both are interleaved instead?

    .venv/bin/python bench/kv_mapping.py                                 # Llama-3.1-8B's shape on a GPU, emulated tier
    .venv/bin/python bench/kv_mapping.py --node 1                        # a node of memory alone, for real
    .venv/bin/python bench/kv_mapping.py --shape tiny --device cpu --dtype fp32 --points 1x600 --steps 4 --rounds 1

The same requests, random weights and prompts, three times over: K and V in DRAM; K in DRAM and V in the CXL tier; pages
of both in turn on both. Under HybridGen's policy the CPU reads K of all older keys each step, and V of the selected
ones goes to the accelerator. Rounds take turns, so that a machine that changes its speed does so for all three. Tokens
should be equal: a mapping changes times and nothing else. Without --node the tier is emulated: reads and copies of what
would lie there are paced to --cxl, and the record says so. Appends one JSON line to bench/results/kv_mapping.jsonl.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

import decode_gpu
import decode_hybrid
from ambidex import EngineConfig
from ambidex.bench.workload import end
from ambidex.core.config import DTypeChoice, Graphs, LoadFormat
from ambidex.core.errors import AmbidexError
from ambidex.core.kv_mapping import KVMapping
from ambidex.core.policy import PolicyName
from ambidex.engine.compose import build_engine
from harness import Quantiles, append_record, environment, significant

NUM_WARMUP_STEPS: Final = 16
"""As many under each mapping: their tokens are compared."""

MAPPINGS: Final = (KVMapping.DRAM, KVMapping.K_DRAM_V_CXL, KVMapping.INTERLEAVE)
MARGIN: Final = 1.2
"""Of each budget over what K and V of the largest point take, so that no budget decides what lies where."""


def main() -> int:
    """Measure, print, record."""
    options, args = parse_options()
    opening = environment()
    seconds: dict[tuple[KVMapping, decode_gpu.Point], list[float]] = {}
    tokens: dict[decode_gpu.Point, list[tuple[int, ...]]] = {}
    facts: dict[KVMapping, dict[str, str]] = {}
    are_equal = True
    try:
        with tempfile.TemporaryDirectory() as folder:
            decode_gpu.make_model_folder(Path(folder), options.shape)
            for round_idx in range(args.rounds):
                for place in range(len(MAPPINGS)):
                    mapping = MAPPINGS[(round_idx + place) % len(MAPPINGS)]
                    found = measure(make_config(folder, options, args, mapping), options, seconds, mapping)
                    facts[mapping] = found["facts"]
                    for point, answers in found["tokens"].items():
                        if tokens.setdefault(point, answers) != answers:
                            are_equal = False
                            print(f"tokens of {point} under {mapping} differ from the first run's", file=sys.stderr)
                    print(f"round {round_idx + 1}, {mapping}: "
                          + ", ".join(f"{took * 1e3:.2f} ms" for took in found["medians"]), flush=True)  # fmt: skip
    except AmbidexError as error:
        print(error, file=sys.stderr)
        return 2
    points = [summarize(point, seconds) for point in options.points]
    for figures in points:
        print_point(figures)
    tier = facts[KVMapping.K_DRAM_V_CXL].get("cxl_tier", "none: it was refused")
    print(f"CXL tier: {tier}")
    record = {
        "bench": "kv_mapping", **opening,
        "settings": {"shape": options.shape, "dtype": options.dtype.value, "steps": options.steps,
                     "rounds": args.rounds, "policy": PolicyName.HYBRIDGEN.value, "policy_tokens": args.selected,
                     "block_size": decode_gpu.BLOCK_SIZE, "near_tokens": args.near, "cxl_tier": tier,
                     "is_emulated": args.node is None, "decode": facts[KVMapping.DRAM]["decode"],
                     "warmup": f"{NUM_WARMUP_STEPS} steps of each point"},
        "are_tokens_equal": are_equal, "points": points,
    }  # fmt: skip
    print(append_record(options.output, record))
    return 0


def parse_options() -> tuple[decode_gpu.Options, argparse.Namespace]:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    decode_gpu.add_model_options(parser, output="kv_mapping.jsonl")
    parser.add_argument("--points", default="1x8192,1x32768", help="BATCHxCONTEXT, in this order")
    parser.add_argument("--steps", type=int, default=30, help="measured steps of each point and round")
    parser.add_argument("--rounds", type=int, default=3, help="times that all three mappings are measured")
    parser.add_argument("--cxl", default="300ns,20GB/s", help="what an emulated tier gives")
    parser.add_argument("--node", type=int, help="NUMA node of the CXL tier; default: it is emulated")
    parser.add_argument("--selected", type=int, default=400, help="keys that the policy selects for each KV head")
    parser.add_argument("--near", type=int, default=64, help="newest keys that it attends besides")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a prompt that are computed at once")
    args = parser.parse_args()
    try:
        points = tuple(decode_gpu.Point.parse(word) for word in args.points.split(","))
    except ValueError as error:
        parser.error(f"--points: {error}, as in 1x8192,4x2048")
    if min(args.steps, args.rounds, args.chunk) < 1 or min(args.selected, args.near) < 2:
        parser.error("--steps, --rounds and --chunk must be at least 1, --selected and --near at least 2")
    options = decode_gpu.Options(
        shape=args.shape, points=points, steps=args.steps, chunk=args.chunk, device=args.device, dtype=args.dtype,
        graphs=Graphs.AUTO, profile=False, output=args.output,
    )  # fmt: skip
    return options, args


def make_config(folder: str, options: decode_gpu.Options, args: argparse.Namespace, mapping: KVMapping) -> EngineConfig:
    """An engine whose host memory holds the largest point, laid out as the mapping has it."""
    more = decode_gpu.num_output_tokens(options, options.points)
    batch = max(point.batch for point in options.points)
    num_tokens = max(point.batch * (point.context + more + 2 * decode_gpu.BLOCK_SIZE) for point in options.points)
    num_layers, heads, dim = decode_gpu.kv_sizes(options.shape)
    number_bytes = 4 if options.dtype is DTypeChoice.FP32 else 2
    row_bytes = -(-dim // 32) * 32 * number_bytes
    part_bytes = int(MARGIN * num_tokens * num_layers * heads * row_bytes)
    gpu_tokens = batch * 4 * decode_gpu.BLOCK_SIZE
    kept = decode_hybrid.kept_row_bytes(options, int(MARGIN * (num_tokens + gpu_tokens)))
    tier: dict[str, Any] = {}
    if mapping is not KVMapping.DRAM:
        tier = {"cxl_memory": part_bytes + kept // 2, "kv_mapping": mapping}
        tier |= {"emulate_cxl": args.cxl} if args.node is None else {"cxl_node": args.node}
    return EngineConfig(
        model=folder,
        device=options.device,
        dtype=options.dtype,
        load_format=LoadFormat.DUMMY,
        block_size=decode_gpu.BLOCK_SIZE,
        max_context_len=max(point.context for point in options.points) + more,
        max_tokens_per_step=options.chunk,
        max_running_requests=batch,
        kv_gpu_tokens=gpu_tokens,
        num_sink_tokens=decode_gpu.BLOCK_SIZE,
        recent_window=decode_gpu.BLOCK_SIZE,
        dram_memory=2 * part_bytes + kept,
        policy=PolicyName.HYBRIDGEN,
        policy_tokens=args.selected,
        near_tokens=args.near,
        **tier,
    )


def measure(
    config: EngineConfig,
    options: decode_gpu.Options,
    seconds: dict[tuple[KVMapping, decode_gpu.Point], list[float]],
    mapping: KVMapping,
) -> dict[str, Any]:
    """Run all points once under one mapping; adds the seconds of steps, returns tokens, medians and what was built."""
    engine = build_engine(config)
    names = {(row.section, row.name): row.value for row in engine.report.facts}
    tokens: dict[decode_gpu.Point, list[tuple[int, ...]]] = {}
    medians = []
    for point in options.points:
        requests, _ = decode_gpu.fill(engine, point, options)
        for _ in range(NUM_WARMUP_STEPS):
            decode_gpu.step(engine, point)
        took = []
        for _ in range(options.steps):
            start = time.perf_counter()
            decode_gpu.step(engine, point)
            took.append(time.perf_counter() - start)
        seconds.setdefault((mapping, point), []).extend(took)
        medians.append(Quantiles.of(took).median)
        tokens[point] = [tuple(request.output_token_ids) for request in requests]
        end(engine, requests)
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    facts = {"decode": names["compute", "decode"]}
    if ("kv", "cxl_tier") in names:
        facts["cxl_tier"] = names["kv", "cxl_tier"]
    return {"tokens": tokens, "medians": medians, "facts": facts}


def summarize(
    point: decode_gpu.Point, seconds: Mapping[tuple[KVMapping, decode_gpu.Point], list[float]]
) -> dict[str, Any]:
    """Step times of a point by mapping, and how much longer than all in DRAM."""
    by_mapping = {mapping: Quantiles.of(seconds[mapping, point]) for mapping in MAPPINGS}
    base = by_mapping[KVMapping.DRAM].median
    return {
        "batch": point.batch, "context": point.context,
        "step_s": {mapping.value: quantiles.record() for mapping, quantiles in by_mapping.items()},
        "slower_percent": {mapping.value: significant(100 * (quantiles.median / base - 1), 3)
                           for mapping, quantiles in by_mapping.items() if mapping is not KVMapping.DRAM},
    }  # fmt: skip


def print_point(figures: Mapping[str, Any]) -> None:
    """One line a mapping."""
    print(f"{figures['batch']} x {figures['context']:6}")
    for mapping, took in figures["step_s"].items():
        slower = figures["slower_percent"].get(mapping)
        print(
            f"    {mapping:14} {took['median'] * 1e3:8.2f} ms a step"
            + (f", {slower:+.1f} %" if slower is not None else "")
        )


if __name__ == "__main__":
    sys.exit(main())

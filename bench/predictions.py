"""How far are predictions off? Forty configurations that nothing was fitted to: step time and peak memory.

    .venv/bin/ambidex calibrate && .venv/bin/python bench/predictions.py     # a GPU; about 200 s
    .venv/bin/python bench/predictions.py --quick                            # three tiny ones on the CPU, to try it

Each configuration (a shape with fewer layers than the model has, format of its matrices, budget of GPU memory, batch,
context, where keys are attended) is planned with this machine's profile, as `ambidex plan` does it, and run in a
process of its own with that placement; see `planned.py`. Error: predicted over the median of the measured steps, less
one; of memory: planned bytes on the GPU over the most that was reserved there. Appends one JSON line to
bench/results/predictions.jsonl. `--quick` predicts with data sheets of a GPU that is not there: its errors of time mean
nothing.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from ambidex.bench.workload import WARMUP
from ambidex.core.errors import AmbidexError
from ambidex.core.units import GIB, MIB
from ambidex.cost.workload import KVShares
from harness import REPO, append_record, environment, significant
from planned import Configuration, make_settings, run

LIMIT_S: Final = 90.0
"""For one configuration."""
FAR, MIXED, NEAR = KVShares(on_gpu=0.1, on_cpu=0.9), KVShares(on_gpu=0.3, on_cpu=0.4, streamed=0.3), KVShares()


def _of(
    shape: str, layers: int, gib: float, points: Sequence[tuple[int, int]], kind: str | None = None,
    kv: KVShares | None = None,
) -> list[Configuration]:  # fmt: skip
    return [
        Configuration(
            shape=shape, layers=layers, kind=kind, gpu_memory=int(gib * GIB), batch=batch, context=context, kv=kv
        )
        for batch, context in points
    ]


CONFIGURATIONS: Final = [
    *_of("opt-30b", 6, 5.0, [(1, 128), (1, 1024), (8, 128), (8, 1024), (32, 512), (64, 128)]),
    *_of("opt-30b", 4, 4.5, [(1, 512), (16, 512)]),
    *_of("opt-6.7b", 12, 3.5, [(1, 1024), (16, 1024)]),
    *_of("opt-6.7b", 12, 3.5, [(4, 1792)], kv=FAR),
    *_of("llama-2-70b", 8, 3.5, [(1, 512), (1, 3584), (8, 512), (16, 1024), (64, 256)], kind="Q4_0"),
    *_of("llama-2-70b", 8, 5.0, [(1, 1024), (8, 2048), (16, 256)], kind="Q8_0"),
    *_of("llama-2-70b", 8, 4.0, [(8, 3072)], kind="Q4_0", kv=FAR),
    *_of("llama-2-70b", 4, 5.0, [(1, 1024), (16, 1024)]),
    *_of("qwen2.5-14b", 8, 5.0, [(1, 8192), (4, 8192), (16, 4096), (32, 1024)]),
    *_of("qwen2.5-14b", 8, 5.5, [(8, 8192)], kv=FAR),
    *_of("qwen2.5-14b", 8, 5.5, [(8, 8192)], kv=MIXED),
    *_of("llama-3.1-8b", 12, 5.0, [(1, 2048), (1, 16384), (8, 4096), (16, 2048)]),
    *_of("llama-3.1-8b", 12, 8.0, [(1, 8192), (16, 1024)], kv=NEAR),
    *_of("llama-3.1-8b", 12, 9.0, [(1, 32768), (4, 16384)], kv=FAR),
    *_of("llama-3.1-8b", 12, 9.0, [(2, 16384)], kv=MIXED),
    *_of("qwen2.5-7b", 12, 5.5, [(1, 4096), (4, 16384), (24, 1024)]),
]
QUICK: Final = [
    Configuration(shape="tiny", layers=3, batch=2, context=300, gpu_memory=66 * MIB),
    Configuration(shape="tiny", layers=3, batch=2, context=900, gpu_memory=72 * MIB, kv=FAR),
    Configuration(shape="tiny", layers=3, batch=1, context=300, gpu_memory=66 * MIB, kind="Q4_0"),
]


def main() -> int:
    """Measure, print, record."""
    args = parse_args()
    opening = environment()
    try:
        settings = make_settings(args)
    except AmbidexError as error:
        print(error, file=sys.stderr)
        return 2
    chosen = QUICK if args.quick else CONFIGURATIONS
    began, points, left_out = time.monotonic(), list[dict[str, Any]](), list[str]()
    for configuration in chosen:
        if time.monotonic() - began > args.budget_s:
            left_out.append(configuration.name)
            continue
        points.append(run(configuration, settings, limit_s=LIMIT_S))
        print_point(configuration, points[-1])
    summary = summarise(points)
    print_summary(summary, num_left_out=len(left_out))
    record = {
        "bench": "predictions", **opening,
        "settings": {"device": settings.device.value, "dtype": settings.dtype.value, "steps": settings.steps,
                     "warmup": WARMUP,
                     "prompts": "not computed: random K and V, but for one chunk behind the timed steps",
                     "layers": "of the real shape, fewer than the model has: `layers` of each configuration",
                     "profile": {"source": settings.profile.source, "date": settings.profile.date}},
        "summary": summary, "points": points, "left_out": left_out,
    }  # fmt: skip
    append_record(args.output, record)
    return 0 if summary["num"] else 1


def parse_args() -> argparse.Namespace:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="tiny models on the CPU, predicted from data sheets")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each configuration")
    parser.add_argument("--budget-s", type=float, default=500.0, help="after so many seconds no other is begun")
    parser.add_argument("--profile", type=Path, help="rates of this machine; default: what `ambidex calibrate` wrote")
    parser.add_argument("--output", type=Path, default=REPO / "bench/results/predictions.jsonl", help="gets a line")
    args = parser.parse_args()
    if args.steps < 1 or args.budget_s <= 0:
        parser.error("--steps must be at least 1, --budget-s above 0")
    return args


def summarise(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Median, 90th percentile (the least error that 90 % do not exceed) and largest, of time and memory."""
    found = [point for point in points if "error" in point and not isinstance(point["error"], str)]
    summary: dict[str, Any] = {"num": len(found), "num_failed": len(points) - len(found)}
    for name, errors in (
        ("step", [abs(point["error"]) for point in found]),
        ("memory", [abs(point["memory"]["error"]) for point in found]),
    ):
        errors.sort()
        if errors:
            summary[name] = {
                "median": significant(statistics.median(errors), 3),
                "p90": errors[math.ceil(0.9 * len(errors)) - 1],
                "largest": errors[-1],
            }
    return summary


def print_point(configuration: Configuration, point: dict[str, Any]) -> None:
    """A line for people."""
    if isinstance(point["error"], str):
        print(f"{configuration.name}: {point['error']}", file=sys.stderr, flush=True)
        return
    memory, took = point["memory"], point["step_s"]
    print(
        f"{configuration.name:38} {1e3 * point['predicted_s']:8.2f} ms predicted, {1e3 * took['median']:8.2f} measured "
        f"({1e3 * took['q20']:.2f} … {1e3 * took['q80']:.2f}), {100 * point['error']:+6.1f} %, waits for "
        f"{point['binds']}; {memory['predicted'] / GIB:.2f} GiB predicted, {memory['measured'] / GIB:.2f} measured, "
        f"{100 * memory['error']:+.1f} %; built in {point['build_s']} s, {point['all_s']} s in all",
        flush=True,
    )


def print_summary(summary: dict[str, Any], *, num_left_out: int) -> None:
    """What came of it."""
    print(f"{summary['num']} configurations, {summary['num_failed']} failed, {num_left_out} left out")
    for name in ("step", "memory"):
        if name in summary:
            errors = summary[name]
            print(f"{name:6}: median error {100 * errors['median']:.1f} %, 90 % below {100 * errors['p90']:.1f} %, "
                  f"largest {100 * errors['largest']:.1f} %")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

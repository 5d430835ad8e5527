"""Is the solver's choice the best, where weights and keys compete for GPU memory?

    .venv/bin/ambidex calibrate && .venv/bin/python bench/solver_grid.py      # Qwen2.5-14B's shape, a GPU; about 150 s
    .venv/bin/python bench/solver_grid.py --quick                             # a tiny shape on the CPU, to try it

Qwen2.5-14B in bf16, 12 GB of GPU memory, batch 16, 8K tokens each: 26 GB of weights in layers and as much of keys and
values. With `--layers` below the model's 48 the layers keep their shape, and what the budget leaves for weights of
layers, keys and values shrinks like their number; embedding, head and workspace stay what they are. The grid has 20
points: weights get 0 (keys first), 1/4, 1/2 (half and half), 3/4 or all (weights first) of that memory and keys the
rest; of what lies in DRAM, of both, 0, 20, 35 or 50 % travels to the GPU in a step and the CPU computes on the rest.
Each point, and the solver's choice, runs in a process of its own (`planned.py`). Appends one JSON line to
bench/results/solver_grid.jsonl.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ambidex.bench.workload import WARMUP
from ambidex.core.errors import AmbidexError
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.core.units import GIB, MIB
from ambidex.cost.workload import KVShares
from ambidex.solver.planning import PlanRequest
from ambidex.solver.problem import MARGIN_BYTES, PlacementProblem
from harness import REPO, append_record, environment, significant
from planned import Configuration, Settings, make_model, make_settings, plan, run

LIMIT_S: Final = 90.0
WEIGHT_SHARES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
STREAMED_SHARES: Final = (0.0, 0.2, 0.35, 0.5)
NAMES: Final = {0.0: "keys first", 0.5: "half and half", 1.0: "weights first"}
WHOLE_LAYERS: Final = 48
NUM_SCALINGS: Final = 6
"""Each leaves a twentieth of the error, since buffers take that share."""

Shares = tuple[float, float]
"""Of the memory that may be divided, what weights get; of what lies in DRAM, what travels."""


def main() -> int:
    """Measure, print, record."""
    args = parse_args()
    opening = environment()
    try:
        settings = make_settings(args)
        configuration = make_configuration(args, settings)
        points = list(grid_points(configuration, settings))
    except AmbidexError as error:
        print(error, file=sys.stderr)
        return 2
    began = time.monotonic()
    solved = [run(configuration, settings, limit_s=LIMIT_S)]
    print_point("solver's choice", solved[0])
    measured = []
    for shares, point in points:
        if time.monotonic() - began > args.budget_s:
            break
        measured.append({"shares": shares, **run(point, settings, limit_s=LIMIT_S)})
        print_point(describe(shares), measured[-1])
    solved.append(run(configuration, settings, limit_s=LIMIT_S))  # first and last: the machine may have changed
    print_point("solver's choice", solved[1])
    summary = summarise(solved, measured)
    print_summary(summary, num_left_out=len(points) - len(measured))
    record = {
        "bench": "solver_grid", **opening,
        "settings": {**configuration.record(), "device": settings.device.value, "dtype": settings.dtype.value,
                     "steps": settings.steps, "warmup": WARMUP,
                     "whole_model": {"layers": WHOLE_LAYERS, "gpu_memory": args.gpu_memory},
                     "scaling": "the budget beside embedding, head, workspace and buffers shrinks like the layers",
                     "prompts": "not computed: random K and V, but for one chunk behind the timed steps",
                     "profile": {"source": settings.profile.source, "date": settings.profile.date}},
        "summary": summary, "solver": solved, "grid": measured, "num_left_out": len(points) - len(measured),
    }  # fmt: skip
    append_record(args.output, record)
    return 0 if "best" in summary else 1


def parse_args() -> argparse.Namespace:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a tiny shape on the CPU, planned from data sheets")
    parser.add_argument("--layers", type=int, default=8, help=f"of the shape's {WHOLE_LAYERS}")
    parser.add_argument("--gpu-memory", type=int, default=12 * 10**9, help="bytes, of the model with all its layers")
    parser.add_argument("--batch", type=int, default=16, help="requests")
    parser.add_argument("--context", type=int, default=8192, help="tokens of each")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of each point")
    parser.add_argument("--budget-s", type=float, default=450.0, help="after so many seconds no other point is begun")
    parser.add_argument("--profile", type=Path, help="rates of this machine; default: what `ambidex calibrate` wrote")
    parser.add_argument("--output", type=Path, default=REPO / "bench/results/solver_grid.jsonl", help="gets a line")
    args = parser.parse_args()
    if min(args.layers, args.batch, args.context, args.steps) < 1 or args.layers > WHOLE_LAYERS:
        parser.error(f"--layers must be 1 to {WHOLE_LAYERS}, --batch, --context and --steps at least 1")
    return args


def make_configuration(args: argparse.Namespace, settings: Settings) -> Configuration:
    """The workload, with the budget scaled to the layers."""
    if args.quick:
        return Configuration(shape="tiny", layers=3, batch=2, context=900, gpu_memory=64 * MIB)
    whole = Configuration(
        shape="qwen2.5-14b", layers=WHOLE_LAYERS, batch=args.batch, context=args.context, gpu_memory=args.gpu_memory
    )
    wanted = (args.gpu_memory - kept_bytes(whole, settings)) * args.layers / WHOLE_LAYERS
    found = replace(whole, layers=args.layers)
    for _ in range(NUM_SCALINGS):  # buffers take a share of the budget
        found = replace(found, gpu_memory=int(kept_bytes(found, settings) + wanted))
    return found


def kept_bytes(configuration: Configuration, settings: Settings) -> int:
    """Of GPU memory: what neither weights of layers nor keys and values may take."""
    problem, request = problem_of(configuration, settings)
    return problem.gpu_fixed_bytes + problem.ring_bytes + request.weights.head.num_bytes


def problem_of(configuration: Configuration, settings: Settings) -> tuple[PlacementProblem, PlanRequest]:
    """What is to be solved."""
    with tempfile.TemporaryDirectory() as folder:
        spec = make_model(Path(folder), configuration.shape, configuration.layers)
        planned = plan(configuration, spec, settings)
    return planned.problem, planned.request


def grid_points(
    configuration: Configuration, settings: Settings
) -> Iterator[tuple[tuple[float, float], Configuration]]:
    """(share of weights, share that travels) and what is run; what does not fit raises nothing and is given less."""
    problem, _ = problem_of(configuration, settings)
    units = problem.units
    layers = sum(layer.attention_bytes + layer.mlp_bytes for layer in units.layers)
    least = units.least_kv_on_gpu * units.kv_gpu_bytes
    free = problem.gpu_bytes - problem.gpu_fixed_bytes - problem.ring_bytes - MARGIN_BYTES - units.head_bytes
    for share in WEIGHT_SHARES:
        keys = min(units.kv_gpu_bytes, max(least, (1 - share) * free))
        on_gpu = min(1.0, max(0.0, free - keys) / layers)
        keys = min(units.kv_gpu_bytes, free - on_gpu * layers)  # what weights do not need
        for streamed in STREAMED_SHARES:
            split, kv = split_rest(on_gpu, streamed), split_rest(keys / units.kv_gpu_bytes, streamed)
            placement = Placement(
                layers=(LayerPlacement(attention=split, mlp=split),) * configuration.layers, head=WeightSplit()
            )
            shares = KVShares(on_gpu=kv.on_gpu, on_cpu=kv.on_cpu, streamed=kv.streamed)
            yield (share, streamed), replace(configuration, placement=placement, kv=shares)


def split_rest(on_gpu: float, streamed: float) -> WeightSplit:
    """So much on the GPU, of the rest a share over the link."""
    away = 1.0 - on_gpu
    return WeightSplit(on_gpu=on_gpu, on_cpu=away - away * streamed, streamed=away * streamed)


def describe(shares: Shares) -> str:
    """A point of the grid."""
    name = NAMES.get(shares[0], f"weights get {100 * shares[0]:.0f} %")
    return f"{name}, {100 * shares[1]:.0f} % over the link"


def summarise(solved: list[dict[str, Any]], grid: list[dict[str, Any]]) -> dict[str, Any]:
    """The solver's choice (the faster of both runs) over the best point, and the named points' best."""
    summary: dict[str, Any] = {"num": 0}
    ours = [point["step_s"]["median"] for point in solved if "step_s" in point]
    found = [(point["step_s"]["median"], tuple(point["shares"])) for point in grid if "step_s" in point]
    if ours and found:
        best_s, best = min(found)
        summary |= {
            "num": len(found),
            "solver_s": min(ours),
            "best_s": best_s,
            "best": describe((best[0], best[1])),
            "times_best": significant(min(ours) / best_s, 3),
            "named_s": {
                name: min((seconds for seconds, shares in found if shares[0] == share), default=None)
                for share, name in NAMES.items()
            },
        }
    return summary


def print_point(name: str, point: dict[str, Any]) -> None:
    """A line for people."""
    if "step_s" not in point:
        print(f"{name}: {point['error']}", file=sys.stderr, flush=True)
        return
    took, memory = point["step_s"], point["memory"]
    print(
        f"{name:42} {1e3 * took['median']:8.1f} ms a step ({1e3 * took['q20']:.1f} … {1e3 * took['q80']:.1f}), "
        f"{1e3 * point['predicted_s']:.1f} predicted, waits for {point['binds']}; keys {point['kv_shares']}; "
        f"{memory['measured'] / GIB:.2f} GiB; {point['all_s']} s",
        flush=True,
    )


def print_summary(summary: dict[str, Any], *, num_left_out: int) -> None:
    """What came of it."""
    if "best" not in summary:
        print("there is no figure of the solver's choice, or none of the grid", file=sys.stderr)
        return
    named = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in summary["named_s"].items() if seconds)
    print(
        f"solver's choice {1e3 * summary['solver_s']:.1f} ms, best of {summary['num']} points "
        f"{1e3 * summary['best_s']:.1f} ms ({summary['best']}): times {summary['times_best']}; {named} ms; "
        f"{num_left_out} left out"
    )


if __name__ == "__main__":
    sys.exit(main())

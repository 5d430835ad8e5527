"""Which of several methods decodes faster, when each is measured in the same minutes?

    .venv/bin/python bench/decode_turns.py --points 1x2048,1x4096,1x8192       # Llama-3.1-8B's shape, a GPU
    .venv/bin/python bench/decode_turns.py --shape tiny --device cpu --dtype fp32 --points 2x600 --rounds 2 --turn 3

A shared machine's memory is not the same from one minute to the next, and two methods whose steps differ by a few
percent cannot be told apart by two runs. Here an engine of each of `--policies` is built, all over the same random
weights and keys; each fills its contexts and takes steps until its lanes have found their shares; then they take turns
of `--turn` steps, of which the first `--skip` are not counted (caches are another's, and the last step of the turn
before may still run). Of each method the median step is told, and over the rounds the quantiles of the ratio of its
median to that of the first method in the same round. Prompts are not computed
(`decode_hybrid.py`). Appends one JSON line to bench/results/decode_turns.jsonl.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import decode_gpu
import decode_hybrid
from ambidex.bench.workload import WARMUP, end, warm_up
from ambidex.core.config import DeviceKind
from ambidex.core.errors import AmbidexError
from ambidex.core.ids import Lane
from ambidex.core.policy import PolicyName
from ambidex.core.request import Request
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.runner.decode import DecodeForm
from harness import Quantiles, append_record, environment, watch_others


def main() -> int:
    """Measure, print, record."""
    options, args = parse_options()
    opening = environment()
    engines: dict[PolicyName, Engine] = {}
    points = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            decode_gpu.make_model_folder(Path(folder), options.shape)
            for policy in args.policies:
                engines[policy] = build(folder, options, args, policy)
        with watch_others() as others:
            for point in options.points:
                points.append(measure(engines, point, options, args))
                print_point(points[-1])
        reports = {
            policy.value: {
                "decode": engine.report.value("compute", "decode"),
                "stream_share": engine.report.value("compute", "stream_share"),
                "num_graph_failures": engine.stats.num_graph_failures,
            }
            for policy, engine in engines.items()
        }
    except AmbidexError as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        for engine in engines.values():
            engine.close(is_trusted=False)
    record = {
        "bench": "decode_turns", **opening,
        "settings": {"shape": options.shape, "dtype": options.dtype.value, "policies": [p.value for p in args.policies],
                     "max_dropped_mass": args.max_dropped_mass, "score_spread": args.score_spread,
                     "exact_layers": args.exact_layers, "rounds": args.rounds, "turn": args.turn, "skip": args.skip,
                     "sink": args.sink, "recent": args.recent, "block_size": decode_gpu.BLOCK_SIZE, "warmup": WARMUP,
                     "prompts": "not computed: random K and V"},
        "reports": reports, "others": {"busy_cores": others.busy_cores, "stolen_cores": others.stolen_cores},
        "points": points,
    }  # fmt: skip
    print(append_record(options.output, record))
    return 0


def parse_options() -> tuple[decode_gpu.Options, argparse.Namespace]:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    decode_gpu.add_model_options(parser, output="decode_turns.jsonl")
    decode_hybrid.add_step_options(parser, points="1x2048,1x4096,1x8192")
    parser.add_argument("--policies", default="exact,bounded,flexgen", help="the first is what others are held against")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each method")
    parser.add_argument("--turn", type=int, default=8, help="steps of a turn")
    parser.add_argument("--skip", type=int, default=2, help="of them, how many first ones are not counted")
    args = parser.parse_args()
    try:
        args.policies = tuple(PolicyName(word) for word in args.policies.split(","))
    except ValueError as error:
        parser.error(f"--policies: {error}")
    if len(set(args.policies)) != len(args.policies):
        parser.error(f"--policies: expected each once, got {', '.join(args.policies)}")
    if min(args.rounds, args.turn) < 1 or not 0 <= args.skip < args.turn:
        parser.error("--rounds and --turn must be at least 1, --skip at least 0 and less than --turn")
    options = decode_hybrid.read_step_options(parser, args, steps=args.rounds * args.turn)
    return options, args


def build(folder: str, options: decode_gpu.Options, args: argparse.Namespace, policy: PolicyName) -> Engine:
    """The engine of a method."""
    width = decode_gpu.shape_number(options.shape, "hidden_size")
    form = None if options.device is DeviceKind.CUDA else DecodeForm.FIXED
    start = time.perf_counter()
    config = decode_hybrid.make_config(folder, options, argparse.Namespace(**{**vars(args), "policy": policy}))
    engine = build_engine(config, forward=decode_hybrid.RandomPrompts(width, args.score_spread), decode_form=form)
    print(f"{policy}: built in {time.perf_counter() - start:.1f} s; decode "
          f"{engine.report.value('compute', 'decode')}", flush=True)  # fmt: skip
    return engine


def measure(
    engines: dict[PolicyName, Engine], point: decode_gpu.Point, options: decode_gpu.Options, args: argparse.Namespace
) -> dict[str, Any]:
    """Fill the contexts of a point in each engine, let them take turns, and end the requests."""
    requests: dict[PolicyName, list[Request]] = {}
    num_warmup, before = {}, {}
    for policy, engine in engines.items():
        requests[policy], _ = decode_gpu.fill(engine, point, options)
        num_warmup[policy] = warm_up(engine, lambda engine=engine: decode_gpu.step(engine, point))  # type: ignore[misc]
        before[policy] = dict(engine.stats.lane_bytes)
    seconds: dict[PolicyName, list[list[float]]] = {policy: [] for policy in engines}
    for place in range(args.rounds):
        order = list(engines.items())
        for policy, engine in order if place % 2 == 0 else reversed(order):  # nobody always comes behind the same one
            seconds[policy].append(take_turn(engine, point, args))
    num_steps = args.rounds * args.turn
    methods = {}
    for policy, engine in engines.items():
        read = {lane.value: (engine.stats.lane_bytes.get(lane, 0) - before[policy].get(lane, 0)) // num_steps
                for lane in Lane}  # fmt: skip
        methods[policy.value] = {
            "step_s": Quantiles.of([second for turn in seconds[policy] for second in turn]).record(),
            "times_first": Quantiles.of(ratios(seconds[policy], seconds[args.policies[0]])).record(),
            "num_warmup": num_warmup[policy], "lane_bytes": read,
        }  # fmt: skip
        end(engine, requests[policy])
    return {"batch": point.batch, "context": point.context, "methods": methods}


def take_turn(engine: Engine, point: decode_gpu.Point, args: argparse.Namespace) -> list[float]:
    """Seconds of the steps that count; nothing of the engine runs any more when it has ended."""
    seconds = []
    for _ in range(args.turn):
        start = time.perf_counter()
        decode_gpu.step(engine, point)
        seconds.append(time.perf_counter() - start)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return seconds[args.skip :]


def ratios(turns: Sequence[Sequence[float]], first: Sequence[Sequence[float]]) -> list[float]:
    """Of each round, the median step over that of the first method."""
    return [statistics.median(ours) / statistics.median(theirs) for ours, theirs in zip(turns, first, strict=True)]


def print_point(figures: dict[str, Any]) -> None:
    """A line for each method at a point."""
    for name, found in figures["methods"].items():
        took, ratio = found["step_s"], found["times_first"]
        print(f"{figures['batch']:3} x {figures['context']:6} {name:14} {took['median'] * 1e3:8.3f} ms a step "
              f"({took['q20'] * 1e3:.3f} … {took['q80'] * 1e3:.3f}); {ratio['median']:.3f} times the first "
              f"({ratio['q20']:.3f} … {ratio['q80']:.3f} over rounds)", flush=True)  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

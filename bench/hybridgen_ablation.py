"""HybridGen's ablation: what do its two modes and its feedback bring, beside the systems that it is compared with?

    .venv/bin/python bench/hybridgen_ablation.py                          # Llama-3.1-8B's shape at 8K and 32K, bf16
    .venv/bin/python bench/hybridgen_ablation.py --points opt-6.7b:4x1920,opt-13b:1x1920 --seconds 150
    .venv/bin/python bench/hybridgen_ablation.py --device cpu --dtype fp32 --points tiny:1x300 --recent 64 \
        --near 32 --exact-layers 1 --settle 3 --steps 3                   # to try it

Decode steps at each point (SHAPE:BATCHxCONTEXT) and variant, one engine after the other in this process, those of
a shape beside each other: random weights, random K and V, prompts not computed; sink and recent window on the GPU, the
rest in DRAM. Keys that are chosen are --percent of the prompt, with feedback on the number (full) as many as it settles
on. `times full` is a variant's median step over HybridGen's with all of its feedback. A variant whose engine, filling
and steps take longer than --variant-seconds is given up, and its line says so; what --seconds leave no time for is left
out. Appends a JSON line to bench/results/hybridgen_ablation.jsonl for each variant and shape, as soon as it is there.
"""

import argparse
import contextlib
import dataclasses
import gc
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

import decode_gpu
import decode_hybrid
from ambidex import EngineConfig
from ambidex.bench.record import check_output
from ambidex.bench.workload import end, warm_up
from ambidex.core.config import DeviceKind, Graphs
from ambidex.core.errors import AmbidexError
from ambidex.core.ids import Lane
from ambidex.core.policy import DEFAULTS, PolicyName
from ambidex.core.selection import SelectionSetting
from ambidex.core.step import SelectionFigures
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.runner.decode import DecodeForm
from harness import Quantiles, append_record, environment, significant, watch_others

FULL: Final = "full"
VARIANTS: Final[Mapping[str, Mapping[str, str]]] = {
    FULL: {"policy": "hybridgen", "hybridgen_feedback": "full"},
    "mode-only": {"policy": "hybridgen", "hybridgen_feedback": "mode"},
    "post": {"policy": "hybridgen", "hybridgen_mode": "post"},
    "pre": {"policy": "hybridgen", "hybridgen_mode": "pre"},
    "infinigen": {"policy": "infinigen"},  # Pre-QK
    "keyformer": {"policy": "keyformer"},  # Post-QK
    "flexgen": {"policy": "flexgen"},  # all keys over the link, beside the GPU's work
    "exact": {"policy": "exact"},
    "bounded": {"policy": "bounded"},
}
"""Settings of each variant, in the order in which they are measured: the one that others are held against first."""
ALARM_S: Final = 1.0
"""Between alarms after the first, if it came where no exception can leave, as in a destructor."""


class OverTimeError(BaseException):
    """A variant took too long. No `Exception`: what handles failures of a step must not take it for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The command line: points by shape, and the settings of all variants."""

    points: Mapping[str, tuple[decode_gpu.Point, ...]]
    variants: tuple[str, ...]
    args: argparse.Namespace

    def options(self, shape: str) -> decode_gpu.Options:
        """What `decode_gpu` and `decode_hybrid` take."""
        points, args = self.points[shape], self.args
        return decode_gpu.Options(
            shape=shape, points=points, steps=args.settle + args.steps, chunk=max(p.batch * p.context for p in points),
            device=args.device, dtype=args.dtype, graphs=Graphs.AUTO, profile=False, output=args.output,
        )  # fmt: skip


def main() -> int:
    """Measure, print, record."""
    plan = parse_options()
    opening, start = environment(), time.monotonic()
    try:
        check_output(plan.args.output)
    except AmbidexError as error:
        print(error, file=sys.stderr)
        return 2
    lines: list[dict[str, Any]] = []
    for shape in plan.points:
        full: dict[decode_gpu.Point, float] = {}
        for variant in plan.variants:
            left = plan.args.seconds - (time.monotonic() - start)
            if left <= 0:
                print(f"{shape}, {variant}: left out, --seconds {plan.args.seconds:g} are over", flush=True)
                continue
            figures = run_variant(plan, shape, variant, min(left, plan.args.variant_seconds), full)
            lines.append({"shape": shape, "variant": variant, **figures})
            record = {"bench": "hybridgen_ablation", **opening, "settings": record_settings(plan.args), **lines[-1]}
            append_record(plan.args.output, record)
            print_line(lines[-1])
    print_table(plan, lines)
    num_left_out = len(plan.points) * len(plan.variants) - len(lines)
    return 0 if not num_left_out and all(line["failed"] is None for line in lines) else 1


def record_settings(args: argparse.Namespace) -> dict[str, Any]:
    """What holds for all variants."""
    return {
        "dtype": args.dtype.value, "steps": args.steps, "settle": args.settle, "block_size": decode_gpu.BLOCK_SIZE,
        "sink": args.sink, "recent": args.recent, "variant_seconds": args.variant_seconds,
        "prompts": "not computed: random K and V",
    }  # fmt: skip


def parse_options() -> Plan:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    decode_gpu.add_model_options(parser, output="hybridgen_ablation.jsonl")
    parser.add_argument("--points", default="1x8192,1x32768", help="[SHAPE:]BATCHxCONTEXT, in this order")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which are measured, in this order")
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each point")
    parser.add_argument("--settle", type=int, default=40, help="steps of variants with feedback that are not counted")
    parser.add_argument("--percent", type=int, default=20, help="of the prompt, keys that are chosen")
    parser.add_argument("--min-selected", type=int, default=64, help="from which feedback on the number sets out")
    parser.add_argument("--near", type=int, default=64, help="newest keys that HybridGen attends with true scores")
    parser.add_argument("--exact-layers", type=int, default=2, help="first layers in which nothing is chosen early")
    parser.add_argument("--sink", type=int, default=64, help="first tokens on the GPU")
    parser.add_argument("--recent", type=int, default=1024, help="last tokens on the GPU")
    parser.add_argument("--max-dropped-mass", type=float, default=0.01, help="of each softmax, with bounded")
    parser.add_argument("--variant-seconds", type=float, default=60.0, help="for the engine, filling and steps of one")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of it")
    args = parser.parse_args()
    points: dict[str, list[decode_gpu.Point]] = {}
    try:
        for word in args.points.split(","):
            shape, _, size = word.rpartition(":")
            if (shape or args.shape) not in decode_gpu.SHAPES:
                raise ValueError(f"shape {shape!r} is unknown: known are {', '.join(decode_gpu.SHAPES)}")
            points.setdefault(shape or args.shape, []).append(decode_gpu.Point.parse(size))
    except ValueError as error:
        parser.error(f"--points: {error}, as in 1x8192 or opt-6.7b:4x1920")
    variants = tuple(args.variants.split(","))
    if unknown := [name for name in variants if name not in VARIANTS]:
        parser.error(f"--variants: {', '.join(unknown)}: known are {', '.join(VARIANTS)}")
    if FULL in variants[1:]:
        parser.error(f"--variants: the others are held against {FULL}: name it first, or not at all")
    if min(args.steps, args.recent, args.settle) < 1 or min(args.sink, args.near, args.exact_layers) < 0:
        parser.error("--steps, --settle and --recent must be at least 1, --sink, --near and --exact-layers at least 0")
    if args.min_selected < 2 or not 1 <= args.percent <= 100:
        parser.error("--min-selected must be at least 2, --percent between 1 and 100")
    if min(args.seconds, args.variant_seconds) <= 0:
        parser.error("--seconds and --variant-seconds must be above 0")
    return Plan(points={shape: tuple(found) for shape, found in points.items()}, variants=variants, args=args)


def run_variant(
    plan: Plan, shape: str, variant: str, most_s: float, full: dict[decode_gpu.Point, float]
) -> dict[str, Any]:
    """What one variant's line says besides: settings of its policy, points, and why it is not whole, if so.

    Args:
        full: median seconds of the variant that ratios are against, which adds its own.
    """
    settings = settings_of(plan, variant)
    points: list[dict[str, Any]] = []
    start, failed = time.monotonic(), None
    with watch_others() as others, tempfile.TemporaryDirectory() as folder:
        decode_gpu.make_model_folder(Path(folder), shape)
        engine: Engine | None = None
        try:
            with time_limit(most_s):
                engine = build(plan, shape, variant, folder)
                build_s = time.monotonic() - start
                for point in plan.points[shape]:
                    figures = measure(engine, plan, plan.options(shape), point)
                    if variant == FULL:
                        full[point] = figures["step_s"]["median"]
                    figures["times_full"] = significant(figures["step_s"]["median"] / full[point], 3) if full else None
                    points.append({**figures, "build_s": significant(build_s, 3)})
        except OverTimeError:
            failed = f"it took longer than {most_s:.0f} s"
        except (AmbidexError, RuntimeError, MemoryError) as error:  # a failed request, CUDA's errors: others go on
            failed = " ".join(f"{type(error).__name__}: {error}".split())[:600]
        report = None if engine is None else {f"{s}.{n}": value for s, n, value, _ in engine.report.rows()
                                              if s != "settings"}  # fmt: skip
        close(engine)
        del engine
        free_memory()
    return {
        "policy": settings, "became": report, "points": points, "failed": failed,
        "num_left_out": len(plan.points[shape]) - len(points), "others": dataclasses.asdict(others),
        "took_s": significant(time.monotonic() - start, 3),
    }  # fmt: skip


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OverTimeError` in the main thread when so many seconds are over."""

    def ring(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise OverTimeError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, ALARM_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def settings_of(plan: Plan, variant: str) -> dict[str, Any]:
    """The settings of a variant, those of its policy among the command line's."""
    args, own = plan.args, VARIANTS[variant]
    known = DEFAULTS[PolicyName(own["policy"])]
    asked = {
        "policy_percent": args.percent, "near_tokens": args.near, "exact_layers": args.exact_layers,
        "max_dropped_mass": args.max_dropped_mass,
        **({"min_selected_tokens": args.min_selected} if variant == FULL else {}),
    }  # fmt: skip
    return {**own, **{name: value for name, value in asked.items() if name in known}}


def build(plan: Plan, shape: str, variant: str, folder: str) -> Engine:
    """The engine of a variant, with room for the largest point."""
    options, args = plan.options(shape), plan.args
    settings = settings_of(plan, variant)
    policy = PolicyName(settings["policy"])
    args.kv_dtype, args.stream_percent, args.policy, args.hot = decode_hybrid.KVDTypeChoice.AUTO, None, policy, 0
    config = decode_hybrid.make_config(folder, options, args)
    config = EngineConfig(**{**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
                             **settings})  # fmt: skip
    has_recorded_steps = policy.attends_all or policy is PolicyName.BOUNDED
    form = DecodeForm.FIXED if has_recorded_steps and options.device is DeviceKind.CPU else None
    width = decode_gpu.shape_number(shape, "hidden_size")
    return build_engine(config, forward=decode_hybrid.RandomPrompts(width, None), decode_form=form)


def measure(engine: Engine, plan: Plan, options: decode_gpu.Options, point: decode_gpu.Point) -> dict[str, Any]:
    """Fill the contexts of a point, let feedback settle, time steps and end the requests."""
    feedback = engine.core.scheduler.feedback
    if feedback is not None:  # not from where the point before has left it
        feedback.follow(SelectionSetting(num_selected=feedback.limits.floor))
    requests, fill_s = decode_gpu.fill(engine, point, options)
    num_warmup = warm_up(engine, lambda: decode_gpu.step(engine, point))
    if feedback is not None:
        for _ in range(max(0, plan.args.settle - num_warmup)):
            decode_gpu.step(engine, point)
        num_warmup = max(num_warmup, plan.args.settle)
    before, chosen_before = dict(engine.stats.lane_bytes), engine.stats.selection or SelectionFigures()
    replayed_before = engine.stats.num_replayed_steps
    seconds = []
    for _ in range(plan.args.steps):
        start = time.perf_counter()
        decode_gpu.step(engine, point)
        seconds.append(time.perf_counter() - start)
    chosen = engine.stats.selection
    num_visible = chosen.num_visible - chosen_before.num_visible if chosen is not None else 0
    share = (chosen.num_attended - chosen_before.num_attended) / num_visible if chosen and num_visible else 1.0
    figures = {
        "batch": point.batch, "context": point.context, "fill_s": significant(fill_s, 3), "num_warmup": num_warmup,
        "step_s": Quantiles.of(seconds).record(),
        "tokens_per_s": significant(point.batch / Quantiles.of(seconds).median),
        "attended_share": significant(share, 3),
        "num_selected": feedback.setting.num_selected if feedback is not None and feedback.limits.may_resize else None,
        "mode": feedback.setting.mode.value if feedback is not None else None,
        "lane_bytes": {lane.value: (engine.stats.lane_bytes.get(lane, 0) - before.get(lane, 0)) // plan.args.steps
                       for lane in Lane},
        "num_replayed_steps": engine.stats.num_replayed_steps - replayed_before,
    }  # fmt: skip
    end(engine, requests)
    return figures


def close(engine: Engine | None) -> None:
    """End an engine's threads; one that broke off may be in any state."""
    if engine is None:
        return
    try:
        engine.close(is_trusted=False)
    except (AmbidexError, RuntimeError) as error:
        print(f"the engine did not end well: {error}", file=sys.stderr)


def free_memory() -> None:
    """Give back what an engine held, on the host and on the GPU, before the next one is made."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # pinned buffers; what torch offers for it


def print_line(line: Mapping[str, Any]) -> None:
    """What there is to say of a variant as soon as it ends."""
    found = ", ".join(f"{p['batch']} x {p['context']} {1e3 * p['step_s']['median']:.2f} ms" for p in line["points"])
    failed = f"; failed: {line['failed']}" if line["failed"] is not None else ""
    print(f"{line['shape']}, {line['variant']}: {found or 'nothing'} in {line['took_s']} s{failed}", flush=True)


def print_table(plan: Plan, lines: Sequence[Mapping[str, Any]]) -> None:
    """A table for each point: variants in rows."""
    columns = ("variant", "ms a step", "20 %", "80 %", "times full", "keys", "feedback: mode, number of keys")
    for shape, points in plan.points.items():
        for point in points:
            print(f"\n{shape}, {point.batch} x {point.context}", format_row(columns), sep="\n")
            for line in lines:
                for found in line["points"] if line["shape"] == shape else ():
                    if (found["batch"], found["context"]) == (point.batch, point.context):
                        print(table_row(line["variant"], found))
    sys.stdout.flush()


def table_row(variant: str, found: Mapping[str, Any]) -> str:
    """One variant at one point."""
    step, times = found["step_s"], found["times_full"]
    milliseconds = (f"{1e3 * step[name]:.2f}" for name in ("median", "q20", "q80"))
    settled = ", ".join(str(word) for word in (found["mode"], found["num_selected"]) if word is not None)
    ratio = "" if times is None else f"{times:.2f}"
    return format_row((variant, *milliseconds, ratio, f"{found['attended_share']:.1%}", settled))


def format_row(cells: Sequence[str]) -> str:
    """Cells side by side, all but the last to the right."""
    widths = (10, 10, 9, 9, 11, 8)
    return "".join(
        [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False)] + ["  ", cells[-1]]
    ).rstrip()


if __name__ == "__main__":
    sys.exit(main())

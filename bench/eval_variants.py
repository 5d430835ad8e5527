"""What do methods, or settings of one, cost a model on the tasks of `ambidex eval`, beside each other?

    .venv/bin/python bench/eval_variants.py --text book.txt exact h2o:policy_percent=50 qinfer_windows:policy_percent=40
    .venv/bin/python bench/eval_variants.py --text book.txt --tasks perplexity exact exact:mlp_sparsity=teal:0.5
    .venv/bin/python bench/eval_variants.py --text book.txt --context 256 --predict 8 --rounds 1 --items 1 exact h2o

Variants are written as for `ambidex bench compare`. Each answers the same texts and questions, decode queries op by op.
Perplexity is held against the first variant's with all keys, token by token, so that its change has a standard error;
of the others the shares of right answers stand beside each other, and log-odds, which are finer. A JSON line goes to
bench/results/eval_variants.jsonl.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from ambidex.compare.cells import Variant
from ambidex.core.config import EngineConfig
from ambidex.core.errors import AmbidexError
from ambidex.core.units import parse_size
from ambidex.eval.agreement import Text, measure_agreement
from ambidex.eval.choice import measure_choice
from ambidex.eval.items import read_items
from ambidex.eval.long_context import TASK_DEFAULTS, TASKS
from ambidex.eval.needle import measure_needle
from ambidex.eval.probe import measure_probes
from ambidex.eval.run import read_text
from ambidex.eval.teacher import Teacher
from ambidex.eval.words import Hay
from harness import REPO, append_record, environment

DEPTHS: Final = (10, 50, 90)
"""Percent of the text: where digits are hidden."""
PERPLEXITY, NEEDLE, CHOICE = "perplexity", "needle", "choice"


def main() -> int:
    """Measure, print, record."""
    args = parse_args()
    opening = environment()
    try:
        words = read_text(args.text)
        first = make_teacher(args, args.variants[0])
        points = []
        for place, variant in enumerate(args.variants):
            teacher = first if place == 0 else make_teacher(args, variant)
            points.append(measure(teacher, first, words, variant.name, args))
    except AmbidexError as error:
        print(error, file=sys.stderr)
        return 2
    record = {
        "bench": "eval_variants", **opening,
        "settings": {"model": args.model, "text": args.text.name, "context": args.context, "tasks": args.tasks,
                     "predict": args.predict, "windows": args.windows, "rounds": args.rounds, "depths": DEPTHS,
                     "items": args.items, "shots": args.shots, "tasks_are": TASK_DEFAULTS},
        "points": points,
    }  # fmt: skip
    append_record(args.output, record)
    return 0


def make_teacher(args: argparse.Namespace, variant: Variant) -> Teacher:
    """The engine of a variant. Raises: as `Teacher`."""
    base = EngineConfig(model=args.model, max_context_len=args.context + 8)
    return Teacher(variant.config(base, model=args.model, kv_gpu_tokens=None))


def measure(teacher: Teacher, first: Teacher, words: str, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """All tasks of one variant; `first`: whose run with all keys perplexity is held against."""
    point: dict[str, Any] = {"variant": name, "policy": teacher.engine.report.value("compute", "policy")}
    start = time.perf_counter()
    for task in args.tasks:
        point[task] = _MEASURES[task](teacher, first, words, args)
        print(f"{name}, {task}: {shown(task, point[task])}", flush=True)
    point["seconds"] = round(time.perf_counter() - start, 1)
    return point


def shown(task: str, figures: Mapping[str, Any]) -> str:
    """A line for people."""
    keys = f", keys {100 * figures['attended_share']:.1f} %" if "attended_share" in figures else ""
    if task == PERPLEXITY:
        change, error = figures["perplexity"] / figures["exact_perplexity"] - 1, figures["change_error"]
        return (
            f"{figures['perplexity']:.4f} against {figures['exact_perplexity']:.4f} ({100 * change:+.3f} ± "
            f"{100 * error:.3f} %), likeliest token equal {100 * figures['top1_equal']:.2f} %, KL "
            f"{figures['mean_kl']:.2e}{keys}"
        )
    if task == CHOICE:
        return f"right {100 * figures['right']:.1f} %, a byte {100 * figures['right_per_byte']:.1f} %{keys}"
    if task == NEEDLE:
        return ", ".join(
            f"at {found['depth_percent']} % right first {100 * found['right_first']:.0f} %, log-odds "
            f"{found['log_odds']:+.2f}"
            for found in figures["depths"]
        )
    return f"found {100 * figures['found']:.1f} %, log-odds {figures['log_odds']:+.2f}{keys}"


def _perplexity(teacher: Teacher, first: Teacher, words: str, args: argparse.Namespace) -> dict[str, Any]:
    text = Text(
        token_ids=teacher.engine.tokenizer.encode(words),
        context=args.context,
        num_predicted=args.predict,
        num_windows=args.windows,
    )
    return measure_agreement(teacher, text, against_exact=True, other=first).record()


def _needle(teacher: Teacher, first: Teacher, words: str, args: argparse.Namespace) -> dict[str, Any]:
    del first
    return {
        "depths": [
            measure_needle(
                teacher, words, context=args.context, depth_percent=depth, num_rounds=args.rounds, against_exact=False
            ).record()
            for depth in DEPTHS
        ]
    }


def _choice(teacher: Teacher, first: Teacher, words: str, args: argparse.Namespace) -> dict[str, Any]:
    del first, words
    items = read_items(Path("shipped"))[: args.shots + args.items]
    return measure_choice(teacher, items, shots=args.shots, against_exact=False).record()


def _probes(task: str, teacher: Teacher, first: Teacher, words: str, args: argparse.Namespace) -> dict[str, Any]:
    del first
    tokenizer = teacher.engine.tokenizer
    make = TASKS[task](tokenizer, Hay.of(tokenizer, words), args.context, TASK_DEFAULTS[task])
    return measure_probes(teacher, make, context=args.context, num_probes=args.rounds, against_exact=False).record()


_MEASURES: Final[Mapping[str, Callable[[Teacher, Teacher, str, argparse.Namespace], dict[str, Any]]]] = {
    PERPLEXITY: _perplexity,
    NEEDLE: _needle,
    **{task: partial(_probes, task) for task in TASKS},
    CHOICE: _choice,
}


def parse_args() -> argparse.Namespace:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("variants", nargs="+", help="POLICY[:SETTING=VALUE]…; others are held against the first")
    parser.add_argument("--text", type=Path, required=True, help="file with a long text, UTF-8")
    parser.add_argument("--model", default="smollm2", help="whose answers are looked at")
    parser.add_argument("--tasks", default=",".join(_MEASURES), help="which of these")
    parser.add_argument("--context", default="1K", help="tokens of a text")
    parser.add_argument("--predict", type=int, default=256, help="tokens predicted at the end of a window, at least 2")
    parser.add_argument("--windows", type=int, default=1, help="texts that are predicted, one after the other")
    parser.add_argument("--rounds", type=int, default=8, help="things hidden for each task; for needle at each depth")
    parser.add_argument("--items", type=int, default=33, help="questions of the shipped file")
    parser.add_argument("--shots", type=int, default=3, help="questions with their answers in front of them")
    parser.add_argument("--output", type=Path, default=REPO / "bench/results/eval_variants.jsonl", help="gets a line")
    args = parser.parse_args()
    try:
        args.variants = [Variant.parse(word) for word in args.variants]
        args.context = parse_size(args.context)
    except AmbidexError as error:
        parser.error(str(error))
    args.tasks = args.tasks.split(",")
    if unknown := [task for task in args.tasks if task not in _MEASURES]:
        parser.error(f"--tasks: {', '.join(unknown)}: known are {', '.join(_MEASURES)}")
    if min(args.context, args.windows, args.rounds, args.items) < 1 or args.predict < 2 or args.shots < 0:
        parser.error("--context, --windows, --rounds and --items must be at least 1, --predict 2, --shots 0")
    return args


if __name__ == "__main__":
    sys.exit(main())

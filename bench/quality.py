"""What does the bounded policy cost SmolLM2 on real text, and does its bound hold?

    .venv/bin/python bench/quality.py --text book.txt                     # contexts of 2K, 4K and 8,000 tokens
    .venv/bin/python bench/quality.py --text book.txt --contexts 512 --predict 16 --verified 100    # to try it

At each context the last tokens of some windows are predicted under the policy and with all keys: perplexity, the
standard error of its change, likeliest token, KL. Digits hidden in the text are asked for at three depths. The policy
has the form that its speed is measured in, the native one (each known token is a decode step of its own), or with
--form reference that in plain torch over scores of K itself. Outputs are computed again over all keys, one in so many
(reference: one choice, a step and layer, of all heads) that the asked number of (step, layer, head) comes together over
all contexts; an error above its bound ends the run. Appends a JSON line to bench/results/quality.jsonl.
"""

import argparse
import math
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from ambidex.core.config import EngineConfig, KVDTypeChoice
from ambidex.core.errors import AmbidexError
from ambidex.core.policy import BoundedScores, PolicyName
from ambidex.core.step import SelectionFigures
from ambidex.core.units import parse_size
from ambidex.eval.agreement import Text, measure_agreement
from ambidex.eval.needle import measure_needle
from ambidex.eval.run import read_text
from ambidex.eval.teacher import Teacher
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec
from ambidex.runner.runner import ModelRunner
from harness import REPO, append_record, environment, significant

DEPTHS: Final = (10, 50, 90)
NATIVE, REFERENCE = "native", "reference"


def main() -> int:
    """Measure, print, record."""
    args = parse_args()
    opening = environment()
    try:
        words = read_text(args.text)
        teacher = make_teacher(args)
        points = [measure(teacher, words, context, args) for context in args.contexts]
    except AmbidexError as error:
        print(error, file=sys.stderr)
        return 2
    verified = sum(point["num_verified"] for point in points)
    print(f"{verified} outputs of (step, layer, head) were computed again: none was above its bound")
    record = {
        "bench": "quality", **opening,
        "settings": {"model": args.model, "text": args.text.name, "max_dropped_mass": args.max_dropped_mass,
                     "predict": args.predict, "windows": args.windows, "rounds": args.rounds, "form": args.form,
                     "policy": teacher.engine.report.value("compute", "policy"),
                     "kv_formats": {tier: str(spec.dtypes) for tier, spec in teacher.engine.figures.kv.items()}},
        "num_verified": verified, "points": points,
    }  # fmt: skip
    append_record(args.output, record)
    return 0


def make_teacher(args: argparse.Namespace) -> Teacher:
    """The engine of a form.

    Raises:
        ConfigError: the native form is asked for, and there is none; and as `Teacher`.
    """
    is_native = args.form == NATIVE
    config = EngineConfig(
        model=args.model,
        policy=PolicyName.BOUNDED,
        bounded_scores=BoundedScores.SCAN if is_native else BoundedScores.EXACT,
        max_dropped_mass=args.max_dropped_mass,
        max_context_len=max(args.contexts) + 8,
        kv_dtype=args.kv_dtype,
        verify=is_native,
    )
    if not is_native:
        return Teacher(config)
    spec = read_spec(find_model(config.model))
    num_heads = spec.num_layers * spec.num_q_heads
    every = max(1, args.windows * args.predict * num_heads * len(args.contexts) // args.verified)
    while math.gcd(every, num_heads) > 1:  # so that each layer and head comes up in turn
        every -= 1
    return Teacher(config, as_answered=True, verify_every=every)


def parse_args() -> argparse.Namespace:
    """Read the command line; ends the program with code 2 if it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--text", type=Path, required=True, help="file with a long text, UTF-8")
    parser.add_argument("--model", default="smollm2", help="whose answers are looked at")
    parser.add_argument("--form", choices=[NATIVE, REFERENCE], default=NATIVE, help="of the policy")
    parser.add_argument("--kv-dtype", type=KVDTypeChoice, choices=list(KVDTypeChoice), default=KVDTypeChoice.AUTO,
                        help="number format of K and V")  # fmt: skip
    parser.add_argument("--contexts", default="2K,4K,8000", help="tokens of a window")
    parser.add_argument("--predict", type=int, default=128, help="tokens predicted at the end of each")
    parser.add_argument("--windows", type=int, default=1, help="so many of each, one after the other in the text")
    parser.add_argument("--rounds", type=int, default=2, help="codes of five digits at each depth; 0: none")
    parser.add_argument("--max-dropped-mass", type=float, default=0.01, help="of each softmax")
    parser.add_argument("--verified", type=int, default=10_000, help="outputs that are computed again, at least")
    parser.add_argument("--output", type=Path, default=REPO / "bench/results/quality.jsonl", help="gets a line")
    args = parser.parse_args()
    try:
        args.contexts = tuple(parse_size(word) for word in args.contexts.split(","))
    except AmbidexError as error:
        parser.error(f"--contexts: {error}")
    if min(args.predict, args.windows, args.verified, *args.contexts) < 1 or args.rounds < 0:
        parser.error("--predict, --windows, --verified and --contexts must be at least 1, --rounds at least 0")
    return args


def measure(teacher: Teacher, words: str, context: int, args: argparse.Namespace) -> dict[str, Any]:
    """One context."""
    spec = teacher.engine.figures.spec
    num_outputs = args.windows * args.predict * spec.num_layers * spec.num_q_heads * len(args.contexts)
    if args.form == REFERENCE:
        verify_choices(teacher, max(1, num_outputs // args.verified))
    text = Text(
        token_ids=teacher.engine.tokenizer.encode(words),
        context=context,
        num_predicted=args.predict,
        num_windows=args.windows,
    )
    agreement = measure_agreement(teacher, text, against_exact=True)
    chosen = agreement.selection or SelectionFigures()
    assert agreement.exact_perplexity is not None, "it was asked for"
    error = "" if agreement.change_error is None else f" ± {100 * agreement.change_error:.4f}"
    change = agreement.perplexity / agreement.exact_perplexity - 1
    print(
        f"{context}: perplexity {agreement.perplexity:.4f} against {agreement.exact_perplexity:.4f} "
        f"({100 * change:+.4f}{error} %), likeliest token equal {100 * (agreement.top1_equal or 0):.2f} %, "
        f"KL {agreement.mean_kl:.2e}, keys {100 * chosen.attended_share:.1f} %; {chosen.num_verified} verified, "
        f"largest error {chosen.max_error:.2e}, bound {chosen.max_error_bound:.2e}",
        flush=True,
    )
    if args.form == REFERENCE:
        verify_choices(teacher, 0)
    needles = []
    for depth in DEPTHS if args.rounds else ():
        found = measure_needle(
            teacher, words, context=context, depth_percent=depth, num_rounds=args.rounds, against_exact=True
        )
        needles.append({name: value for name, value in asdict(found).items() if name != "selection"})
        print(f"{context}, digits at {depth} %: right first {100 * found.right_first:.0f} % against "
              f"{100 * (found.exact_right_first or 0):.0f} %, log-odds {found.log_odds:+.3f} against "
              f"{found.exact_log_odds or 0:+.3f}", flush=True)  # fmt: skip
    return {
        "context": context,
        "agreement": agreement.record(),
        "perplexity_change": significant(change, 3),
        "num_verified": chosen.num_verified,
        "needles": needles,
    }


def verify_choices(teacher: Teacher, every: int) -> None:
    """Of so many choices of the reference form one is computed again; 0: none is."""
    runner = teacher.engine.core.executor
    assert isinstance(runner, ModelRunner), "no setting of this engine puts another in its place"
    assert runner.selective is not None, "the reference form chooses keys step by step"
    runner.selective.verify_every(every)


if __name__ == "__main__":
    sys.exit(main())

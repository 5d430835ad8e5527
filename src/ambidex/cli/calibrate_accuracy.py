"""`ambidex calibrate accuracy`: how many keys HybridGen must select for a model, and which layers cannot look ahead."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ambidex.cli.lists import MAX_COUNT, CountList
from ambidex.cli.session import SettingsCommand
from ambidex.cli.settings import ENGINE_SETTINGS, VerbOption
from ambidex.cli.show import loading_bar, print_json, print_table, print_text, say

if TYPE_CHECKING:
    from ambidex.formats.accuracy_profile import AccuracyProfile


class AccuracyCommand(SettingsCommand):
    """Options of `calibrate accuracy`."""

    def __init__(self) -> None:
        path, count = click.Path(path_type=Path), click.IntRange(1, MAX_COUNT)
        super().__init__(
            "accuracy",
            callback=measure_accuracy,
            short_help="Measure how many keys HybridGen must select for a model.",
            help="Run multiple-choice tasks through a model under hybridgen with several numbers of selected keys and "
            "with all keys, and write down the fewest first layers that must attend all keys, and with these the "
            "fewest selected keys, so that they lose no more than --max-drop in the mean: for --policy hybridgen. With "
            "--exact-layers these are kept. Perplexity and needle are measured beside it. What Ctrl-C interrupts goes "
            "on where it was.",
            params=[
                click.Argument(["word"], required=False, metavar="[MODEL]"),
                VerbOption(["--text"], type=path, required=True, help="file with a real text, UTF-8"),
                VerbOption(["--context"], type=count, default=2048, show_default=True,
                           help="tokens of each text in which things are hidden, or that is predicted"),
                VerbOption(["--keys"], type=CountList(), default="32,64,128,256,512", metavar="LIST", show_default=True,
                           help="numbers of selected keys"),
                VerbOption(["--questions"], type=path, default="shipped", show_default=True,
                           help="JSONL file with questions and choices, as of `eval choice`"),
                VerbOption(["--shots"], type=click.IntRange(0, MAX_COUNT), default=3, show_default=True,
                           help="first questions of the file that stand in front of the others, with their answers"),
                VerbOption(["--items"], type=count, help="ask so many questions; default: all"),
                VerbOption(["--rounds"], type=count, default=8, show_default=True,
                           help="things hidden for each task"),
                VerbOption(["--predict"], type=count, default=128, show_default=True,
                           help="tokens whose perplexity is measured"),
                VerbOption(["--max-drop"], type=click.FloatRange(0, 1), default=0.02, show_default=True,
                           help="what tasks may lose in the mean, as a share of their answers"),
                VerbOption(["--anew"], is_flag=True, help="measure all, also what an interrupted run has measured"),
                VerbOption(["-o", "--output"], type=path, help="file to write; default: the model's in the user's "
                           "cache"),
                VerbOption(["as_json", "--json"], is_flag=True, help="print the profile as JSON instead of tables"),
            ],
            settings=ENGINE_SETTINGS,
        )  # fmt: skip


@click.pass_context
def measure_accuracy(ctx: click.Context, /, *, word: str | None, **options: Any) -> int:
    """Run `calibrate accuracy`."""
    # These bring in torch, which `--help` does not need.
    from ambidex.eval.accuracy import run_accuracy
    from ambidex.eval.accuracy_meter import AccuracyPlan
    from ambidex.eval.run import read_text
    from ambidex.formats.accuracy_profile import default_accuracy_path, read_accuracy_profile
    from ambidex.formats.locate import find_model
    from ambidex.formats.neuron_profile import fingerprint
    from ambidex.formats.spec import read_spec

    command = ctx.command
    assert isinstance(command, AccuracyCommand), "the callback belongs to this command"
    chosen = command.choose(ctx, word)
    plan = AccuracyPlan(
        text=read_text(options["text"]),
        context=options["context"],
        keys=options["keys"],
        questions=options["questions"],
        shots=options["shots"],
        num_items=options["items"],
        rounds=options["rounds"],
        num_predicted=options["predict"],
        max_drop=options["max_drop"],
    )
    output: Path | None = options["output"]

    def path_of(name: str) -> Path:
        return output if output is not None else default_accuracy_path(os.environ, name)

    num_kept = 0
    with loading_bar(chosen.engine.model) as progress:
        for part in run_accuracy(chosen.engine, plan, path_of, anew=options["anew"], progress=progress):
            num_kept += part.is_kept
            took = "kept from an interrupted run" if part.is_kept else f"{part.seconds:.1f} s"
            say(f"{part.name}: {took}")
    source = find_model(chosen.engine.model)
    spec = read_spec(source)
    name = fingerprint(source, spec)
    profile = read_accuracy_profile(
        path_of(name), model=chosen.engine.model, fingerprint=name, num_layers=spec.num_layers
    )
    if options["as_json"]:
        print_json(profile.record())
    else:
        show(profile)
        print_text(f"written to {path_of(name)}")
    if num_kept:
        say(f"{num_kept} parts are of a run that was interrupted (--anew measures all again)")
    return 0


def show(profile: "AccuracyProfile") -> None:
    """All tables and what follows from them."""
    rows = [
        (
            str(layer_idx),
            *(("–",) * 4 if layer_idx == 0 else (f"{item.input_cosine:.2f}", f"{item.correlation:.2f}",
                                                 f"{item.recall:.2f}", f"{item.weight_distance:.2f}")),
            "no" if layer_idx < profile.exact_layers else "yes",
        )
        for layer_idx, item in enumerate(profile.look_ahead)
    ]  # fmt: skip
    head = ("layer", "cosine of inputs", "correlation of scores", "recall", "weight elsewhere", "looks ahead")
    print_table(head, rows)
    tasks = list(profile.points[0].tasks)
    print_text("")
    print_table(
        ("exact layers", "keys", *tasks, "mean drop", "keys attended"),
        [
            ("all", "all", *(f"{profile.points[0].tasks[task][1]:.3f}" for task in tasks), "0", "100 %"),
            *(
                (
                    str(trial.exact_layers),
                    str(trial.num_selected),
                    *(f"{trial.tasks[task][0]:.3f}" for task in tasks),
                    _drop(trial.mean_drop, trial.drop_error),
                    f"{100 * trial.attended_share:.1f} %",
                )
                for trial in profile.trials
            ),
        ],
    )
    print_text("")
    show_points(profile)
    print_text("")
    print_text(found_text(profile))


def show_points(profile: "AccuracyProfile") -> None:
    """What was measured with the exact layers of the profile."""
    tasks = list(profile.points[0].tasks)
    head = ("keys", "mode", *tasks, "mean drop", "needle", "perplexity", "change", "keys attended")
    exact = profile.points[0]
    lines = [
        ("all", "–", *(f"{exact.tasks[task][1]:.3f}" for task in tasks), "0", f"{exact.needle[1]:.2f}",
         f"{exact.perplexity[1]:.3f}", "0", "100 %")
    ]  # fmt: skip
    for point in profile.points:
        change = 100 * (point.perplexity[0] / point.perplexity[1] - 1)
        lines.append(
            (
                str(point.num_selected),
                point.mode.value,
                *(f"{point.tasks[task][0]:.3f}" for task in tasks),
                _drop(point.mean_drop, point.drop_error),
                f"{point.needle[0]:.2f}",
                f"{point.perplexity[0]:.3f}",
                f"{change:+.2f} %",
                f"{100 * point.attended_share:.1f} %",
            )
        )
    print_table(head, lines)


def found_text(profile: "AccuracyProfile") -> str:
    """The setting, or that there is none."""
    num_layers, least = len(profile.look_ahead), profile.min_selected_tokens
    if least is not None:
        return (
            f"K_min: {least} keys (mean drop at most {profile.max_drop:g}, in mode post) with the first "
            f"{profile.exact_layers} of {num_layers} layers exact, which do not look ahead"
        )
    tried = ", ".join(str(trial.exact_layers) for trial in profile.trials)
    return (
        f"K_min: there is none: tasks lose more than {profile.max_drop:g} in the mean with "
        f"{profile.trials[0].num_selected} keys and {tried} of {num_layers} layers exact; raise --keys or --max-drop, "
        f"or use another policy. The profile keeps {profile.exact_layers} exact layers"
    )


def _drop(mean: float, error: float | None) -> str:
    return f"{mean:+.3f}" if error is None else f"{mean:+.3f} ± {error:.3f}"

"""`ambidex bench compare`: models × policies × contexts × batches × KV budgets, speed and quality, in one report."""

import hashlib
import pydoc_data.topics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from ambidex.cli.lists import MAX_COUNT, BudgetList, CountList
from ambidex.cli.session import SettingsCommand
from ambidex.cli.settings import ENGINE_SETTINGS, VerbOption
from ambidex.cli.show import print_text, say
from ambidex.core.errors import ConfigError
from ambidex.core.policy import PolicyName

EXIT_FAILED_CELLS: Final = 3
"""As a JSONL run some of whose lines have an error."""
OWN_SETTINGS: Final = ("policy", "kv_gpu_tokens", "trace")
"""Those of the engine that cells set."""
QUICK: Final[Mapping[str, Any]] = {
    "contexts": (256, 512), "batch": (1, 2), "budgets": (128,), "steps": 4, "predict": 32, "rounds": 2,
}  # fmt: skip
"""What `--quick` stands for, where nothing else is said: 10 minutes on two cores with a model of 135M parameters."""
QUICK_BUDGETS: Final[Mapping[str, str]] = {
    PolicyName.STREAMING_LLM: ":policy_tokens=102", PolicyName.QUEST: ":policy_tokens=102:page_tokens=16",
}  # fmt: skip
"""Policies whose published budget is a number of tokens above those contexts: a fifth of 512, as the others have it."""
_DEFAULTS: Final[Mapping[str, Any]] = {
    "contexts": (2048, 8192), "batch": (1, 8), "budgets": (None,), "steps": 32, "predict": 256, "rounds": 8,
}  # fmt: skip


class CompareCommand(SettingsCommand):
    """Options of `bench compare`."""

    def __init__(self) -> None:
        path, count = click.Path(path_type=Path), click.IntRange(1, MAX_COUNT)
        super().__init__(
            "compare",
            callback=compare,
            short_help="All policies against each other: speed, quality, report.",
            help="Measure speed and quality of each policy at each context, batch and KV budget, each engine in a "
            "process of its own, and write a report (docs/comparison.md). What the folder holds already is not "
            "measured again; a cell that fails is recorded and the rest goes on (exit code 3).",
            params=[
                click.Argument(["word"], required=False, metavar="[MODEL]"),
                VerbOption(["--report"], type=path, help="folder of the report: new, empty, or of an earlier run"),
                VerbOption(["--models"], metavar="LIST", help="several models, parted by commas, instead of MODEL"),
                VerbOption(["--policies"], metavar="LIST",
                           help="policies, with settings of the engine if wanted: exact,h2o:policy_percent=30; "
                           "default: all"),
                VerbOption(["--contexts"], type=CountList(), metavar="LIST",
                           help="tokens of each request before the first step; default: 2K,8K"),
                VerbOption(["--batch"], type=CountList(), metavar="LIST", help="requests of a step; default: 1,8"),
                VerbOption(["--budgets"], type=BudgetList(), metavar="LIST",
                           help="tokens of KV on the accelerator tier, or all; default: all"),
                VerbOption(["--steps"], type=count, help="measured steps of each speed; default: 32"),
                VerbOption(["--predict"], type=count, help="tokens predicted at the end of each context; default: 256"),
                VerbOption(["--rounds"], type=count, help="secrets asked for at each context; default: 8"),
                VerbOption(["--text"], type=path, help="text to predict; default: the help topics of Python's library"),
                VerbOption(["--only"], metavar="LIST",
                           help="kinds of cells, of speed,quality,timeline; default: all"),
                VerbOption(["--quick"], is_flag=True, help="small contexts, few steps and tokens, 128 tokens of KV on "
                           "the accelerator: a look in minutes"),
                VerbOption(["--retry"], is_flag=True, help="measure failed cells of an earlier run again"),
                VerbOption(["--cell-timeout"], type=click.FloatRange(1), default=1800.0, show_default=True,
                           help="seconds after which a cell counts as failed"),
            ],
            settings=[setting for setting in ENGINE_SETTINGS if setting.name not in OWN_SETTINGS],
        )  # fmt: skip


@click.pass_context
def compare(ctx: click.Context, /, **options: Any) -> int:
    """Run `bench compare`; the settings are read from the context."""
    command = ctx.command
    assert isinstance(command, CompareCommand), "the callback belongs to this command"
    models = _models(options)
    chosen = command.choose(ctx, models[0] if models else options["word"])
    if options["report"] is None:
        raise ConfigError("no folder is named for the report: give --report FOLDER")
    # Imported here: they bring in torch, which `--help` does not need.
    from ambidex.compare.cells import CellKind, Grid, Variant
    from ambidex.compare.folder import ReportFolder
    from ambidex.compare.run import run_grid

    quick: Mapping[str, Any] = QUICK if options["quick"] else {}
    values = {name: options[name] or quick.get(name) or default for name, default in _DEFAULTS.items()}
    words = options["policies"].split(",") if options["policies"] else _all_policies(is_quick=options["quick"])
    variants = [Variant.parse(word) for word in dict.fromkeys(words)]
    text_name, text = _text(options["text"])
    grid = Grid(
        models=models or [chosen.engine.model],
        variants=variants,
        contexts=values["contexts"],
        batches=values["batch"],
        budgets=values["budgets"],
        steps=values["steps"],
        num_predicted=values["predict"],
        num_rounds=values["rounds"],
        text_name=text_name,
        text_sha256=hashlib.sha256(text.encode()).hexdigest()[:16],
        kinds=tuple(CellKind(kind) for kind in _kinds(options["only"], list(CellKind))),
        timelines=[variant.name for variant in variants if not quick or variant.policy is PolicyName.EXACT],
    )
    if CellKind.QUALITY in grid.kinds:
        _check_predict(grid.num_predicted, min(grid.contexts))
    with ReportFolder(options["report"]) as folder:
        num_failed = run_grid(
            grid,
            chosen.engine,
            folder,
            text=text,
            retry=options["retry"],
            cell_timeout_s=options["cell_timeout"],
            tell=say,
        )
        print_text(str(folder.path / "report.html"))
    if num_failed:
        say(f"{num_failed} cells failed: the report says why; --retry measures them again")
        return EXIT_FAILED_CELLS
    return 0


def _all_policies(*, is_quick: bool) -> list[str]:
    return [policy + (QUICK_BUDGETS.get(policy, "") if is_quick else "") for policy in PolicyName]


def _models(options: dict[str, Any]) -> list[str]:
    if options["models"] is None:
        return []
    if options["word"] is not None or options["model"] is not None:
        raise ConfigError("MODEL and --models are both given: name the models once")
    models = list(dict.fromkeys(options["models"].split(",")))
    if not all(models):
        raise ConfigError(f"--models {options['models']!r} has an empty name: part the models by single commas")
    return models


def _kinds(words: str | None, known: Sequence[str]) -> Sequence[str]:
    """Kinds of cells that are measured."""
    kinds = known if words is None else words.split(",")
    if unknown := [kind for kind in kinds if kind not in known]:
        raise ConfigError(f"--only {words!r} has {unknown[0]!r}: known are {', '.join(known)}, parted by commas")
    return kinds


def _check_predict(num_predicted: int, shortest: int) -> None:
    if num_predicted >= shortest:
        raise ConfigError(f"--predict is {num_predicted}: it must be below the shortest of --contexts, {shortest}")


def _text(path: Path | None) -> tuple[str, str]:
    """Name and words of what is predicted."""
    if path is None:
        topics = pydoc_data.topics.topics
        return "pydoc_data.topics", "\n\n".join(topics[name] for name in sorted(topics))
    from ambidex.eval.run import read_text

    return path.name, read_text(path)

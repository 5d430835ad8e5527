"""`ambidex eval`: what a policy costs in quality, against full attention, on a text of the user's."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ambidex.cli.lists import MAX_COUNT, CountList
from ambidex.cli.session import SettingsCommand
from ambidex.cli.settings import ENGINE_SETTINGS, VerbOption
from ambidex.cli.show import loading_bar, print_table, print_text, say
from ambidex.core.errors import ConfigError

if TYPE_CHECKING:
    from ambidex.eval.run import Evaluated

MAX_PERCENT: Final = 100


class EvalGroup(click.Group):
    """The evaluations of `ambidex eval`."""

    def __init__(self) -> None:
        super().__init__(
            "eval",
            callback=show_help,
            invoke_without_command=True,
            short_help="Quality of a policy against full attention.",
            help="Run a text through the engine, each token behind the prompt a decode query with the keys that "
            "--policy chooses, and compare with a run that attends all keys (docs/cli.md).",
            commands=[
                AgreementCommand(), PerplexityCommand(), NeedleCommand(), *(TaskCommand(name) for name in TASK_OPTIONS),
                ChoiceCommand(),
            ],
        )  # fmt: skip


@click.pass_context
def show_help(ctx: click.Context, /) -> None:
    """Without a verb, show help."""
    if ctx.invoked_subcommand is None:
        print_text(ctx.get_help())


class EvalCommand(SettingsCommand):
    """What all evaluations share."""

    def __init__(
        self,
        name: str,
        callback: Callable[..., int],
        options: list[click.Parameter],
        *,
        short_help: str,
        text: str,
        before: Sequence[click.Parameter] = (),
        has_context: bool = True,
        default_text: str = "",
    ) -> None:
        path = click.Path(path_type=Path)
        context_options = [
            VerbOption(["--text"], type=path, help=f"file with the text, UTF-8{default_text}"),
            VerbOption(["--contexts"], type=CountList(), default="2K", metavar="LIST", show_default=True,
                       help="tokens of a context, prompt and what is predicted together"),
        ]  # fmt: skip
        super().__init__(
            name,
            callback=callback,
            short_help=short_help,
            help=text,
            params=[
                *before,
                click.Argument(["word"], required=False, metavar="[MODEL]"),
                *(context_options if has_context else ()),
                *options,
                VerbOption(["--plot"], type=path, help="write a plot, SVG, of this record and of those like it in "
                           "--output"),
                VerbOption(["-o", "--output"], type=path, help="append the record, a JSON line, to it"),
                VerbOption(["as_json", "--json"], is_flag=True, help="print the record instead of a table"),
            ],
            settings=ENGINE_SETTINGS,
        )  # fmt: skip


def _window_options() -> list[click.Parameter]:
    return [
        VerbOption(["--predict"], type=click.IntRange(1, MAX_COUNT), default=256, show_default=True,
                   help="tokens at the end of a context that are predicted under the policy; the rest is the prompt"),
        VerbOption(["--windows"], type=click.IntRange(1, MAX_COUNT), default=1, show_default=True,
                   help="contexts that are cut from the text, one after the other"),
    ]  # fmt: skip


def _kv_options() -> list[click.Parameter]:
    return [
        VerbOption(["--against-kv-dtype"], metavar="FORMAT",
                   help="number format of K and V of the run that is compared with, such as fp32; default: --kv-dtype"),
    ]  # fmt: skip


def _against_option(*words: str) -> click.Parameter:
    return VerbOption(
        ["--against"], type=click.Choice(words), default="exact", show_default=True,
        help="what is compared with: a run that attends all keys",
    )  # fmt: skip


class AgreementCommand(EvalCommand):
    """Options of `eval agreement`."""

    def __init__(self) -> None:
        super().__init__(
            "agreement",
            agreement,
            [*_window_options(), _against_option("exact"), *_kv_options()],
            short_help="Likeliest token and KL against full attention.",
            text="Predict the tokens at the end of each context under --policy and with all keys: how often the "
            "likeliest token is the same, the divergence KL(exact ‖ policy) in nats, and both perplexities. With "
            "--against-kv-dtype the other run keeps K and V in that format, so that --kv-dtype is judged, too.",
        )


class PerplexityCommand(EvalCommand):
    """Options of `eval perplexity`."""

    def __init__(self) -> None:
        super().__init__(
            "perplexity",
            perplexity,
            [*_window_options(), _against_option("exact", "none")],
            short_help="Perplexity on a text.",
            text="Perplexity of the tokens at the end of each context under --policy; --against none leaves out the "
            "run with all keys.",
        )


class NeedleCommand(EvalCommand):
    """Options of `eval needle`."""

    def __init__(self) -> None:
        super().__init__(
            "needle",
            needle,
            [
                VerbOption(["--depths"], type=DepthList(), default="10,50,90", metavar="LIST", show_default=True,
                           help="where the digits are hidden, in percent of the text"),
                VerbOption(["--rounds"], type=click.IntRange(1, MAX_COUNT), default=1, show_default=True,
                           help="codes of five digits at each depth"),
                _against_option("exact", "none"),
            ],
            short_help="Digits hidden in a text, asked for at its end.",
            text="Hide a code of five digits in the text and ask for it at the end: how often the right digit is "
            "likelier than the nine others, and by how much (log-odds). The question is computed under --policy.",
        )  # fmt: skip


TASK_OPTIONS: Final[Mapping[str, tuple[str, str, Mapping[str, str]]]] = {
    "multikey": (
        "One of several secrets hidden in a text.",
        "Hide secret words in a text, each under a key, and ask for one: how often it is likelier than the others.",
        {"keys": "secrets in a text"},
    ),
    "variables": (
        "Chains of assignments hidden in a text.",
        "Hide chains of assignments (VAR a = 123, VAR b = VAR a) in a text and ask which variables hold the value that "
        "one of them began with: the share of them among the likeliest.",
        {"chains": "chains in a text", "hops": "copies in a chain, after the first value"},
    ),
    "counting": (
        "The words that come most often in a list.",
        "Fill the context with a list in which some words come ten times as often as the others, and ask for those: "
        "the share of them among the likeliest.",
        {"common": "words that come often"},
    ),
}
"""Task → short help, help, and its own settings with their help."""
TASK_LIMITS: Final[Mapping[str, tuple[int, int, int]]] = {
    "keys": (2, 64, 4), "chains": (2, 32, 4), "hops": (1, 16, 2), "common": (1, 16, 2),
}  # fmt: skip
"""Setting → least, most and default."""


class TaskCommand(EvalCommand):
    """Options of `eval multikey`, `variables` and `counting`."""

    def __init__(self, name: str) -> None:
        short_help, text, settings = TASK_OPTIONS[name]
        options: list[click.Parameter] = []
        for setting, words in settings.items():
            low, high, default = TASK_LIMITS[setting]
            options.append(
                VerbOption([f"--{setting}"], type=click.IntRange(low, high), default=default, show_default=True,
                           help=words)
            )  # fmt: skip
        rounds = VerbOption(["--rounds"], type=click.IntRange(1, MAX_COUNT), default=8, show_default=True,
                            help="questions at each context, each with a text of its own")  # fmt: skip
        super().__init__(
            name,
            task,
            [rounds, *options, _against_option("exact", "none")],
            short_help=short_help,
            text=f"{text} Made by code, in the style of RULER. The question is computed under --policy.",
            default_text="; default: a short one that is repeated" if name != "counting" else "; not used here",
        )


class ChoiceCommand(EvalCommand):
    """Options of `eval choice`."""

    def __init__(self) -> None:
        super().__init__(
            "choice",
            choice,
            [
                VerbOption(["--shots"], type=click.IntRange(0, MAX_COUNT), default=0, show_default=True,
                           help="first questions of the file that stand in front of the others, with their answers"),
                VerbOption(["--items"], type=click.IntRange(1, MAX_COUNT), help="ask so many questions; default: all"),
                _against_option("exact", "none"),
            ],
            before=[click.Argument(["file"], type=click.Path(path_type=Path))],
            has_context=False,
            short_help="Multiple choice by likelihood.",
            text="Ask the questions of FILE, a JSONL file (docs/cli.md: our own layout, PIQA, OpenBookQA, COPA, RTE, "
            "WinoGrande), or `shipped` for a few that come with the package: how often the right choice is the "
            "likeliest. The last token of a question and its answer are computed under --policy.",
        )  # fmt: skip


class DepthList(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """`10,50,90`: percentages."""

    name = "list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Read the numbers.

        Raises:
            click.UsageError: a word is no percentage.
        """
        if isinstance(value, tuple):
            return value
        words = value.split(",")
        if not all(word.isascii() and word.isdigit() and int(word) <= MAX_PERCENT for word in words):
            self.fail(f"{value[:60]!r} is no list of percentages, such as 10,50,90", param, ctx)
        return tuple(dict.fromkeys(int(word) for word in words))


@click.pass_context
def agreement(ctx: click.Context, /, **options: Any) -> int:
    """Run `eval agreement`."""
    return _run_windows(ctx, "agreement", options)


@click.pass_context
def perplexity(ctx: click.Context, /, **options: Any) -> int:
    """Run `eval perplexity`."""
    return _run_windows(ctx, "perplexity", options)


def _run_windows(ctx: click.Context, kind: str, options: dict[str, Any]) -> int:
    # Imported here: it brings in torch, which `--help` does not need.
    from ambidex.eval.run import run_agreement

    chosen, text = _prepare(ctx, options)
    with loading_bar(chosen.engine.model) as progress:
        done = run_agreement(
            chosen.engine,
            text,
            kind=kind,
            contexts=options["contexts"],
            num_predicted=options["predict"],
            num_windows=options["windows"],
            against_exact=options["against"] == "exact",
            against_kv_dtype=options.get("against_kv_dtype"),
            progress=progress,
            tell=say,
        )
    return _hand_out(chosen, done, options)


@click.pass_context
def needle(ctx: click.Context, /, **options: Any) -> int:
    """Run `eval needle`."""
    from ambidex.eval.run import run_needle

    chosen, text = _prepare(ctx, options)
    with loading_bar(chosen.engine.model) as progress:
        done = run_needle(
            chosen.engine,
            text,
            contexts=options["contexts"],
            depths=options["depths"],
            num_rounds=options["rounds"],
            against_exact=options["against"] == "exact",
            progress=progress,
            tell=say,
        )
    return _hand_out(chosen, done, options)


@click.pass_context
def task(ctx: click.Context, /, **options: Any) -> int:
    """Run `eval multikey`, `variables` or `counting`."""
    from ambidex.eval.run_tasks import run_task

    name = str(ctx.command.name)
    chosen, text = _prepare(ctx, options, needs_text=False)
    with loading_bar(chosen.engine.model) as progress:
        done = run_task(
            chosen.engine,
            text,
            task=name,
            contexts=options["contexts"],
            num_rounds=options["rounds"],
            task_settings={setting: options[setting] for setting in TASK_OPTIONS[name][2]},
            against_exact=options["against"] == "exact",
            progress=progress,
            tell=say,
        )
    return _hand_out(chosen, done, options)


@click.pass_context
def choice(ctx: click.Context, /, **options: Any) -> int:
    """Run `eval choice`."""
    from ambidex.eval.run_tasks import run_choice

    chosen, _ = _prepare(ctx, options, needs_text=False)
    with loading_bar(chosen.engine.model) as progress:
        done = run_choice(
            chosen.engine,
            options["file"],
            shots=options["shots"],
            num_items=options["items"],
            against_exact=options["against"] == "exact",
            progress=progress,
            tell=say,
        )
    return _hand_out(chosen, done, options)


def _prepare(ctx: click.Context, options: dict[str, Any], *, needs_text: bool = True) -> tuple[Any, Any]:
    from ambidex.bench.record import check_output

    command = ctx.command
    assert isinstance(command, EvalCommand), "the callback belongs to this command"
    chosen = command.choose(ctx, options["word"])
    if needs_text and options["text"] is None:
        raise ConfigError("no text is named: give --text FILE")
    if options["output"] is not None:
        check_output(options["output"])
    return chosen, options.get("text")


def _hand_out(chosen: Any, done: "Evaluated", options: dict[str, Any]) -> int:
    from ambidex.bench.record import append_record

    if options["verbose"]:
        print_table(("section", "name", "value", "source"), [*chosen.rows, *done.report], err=True)
    if options["as_json"]:
        print_text(json.dumps(done.record, ensure_ascii=False))
    else:
        print_table(done.columns, done.rows)
    if options["plot"] is not None:
        from ambidex.eval.drawing import draw, earlier_records, write_plot

        earlier = earlier_records(options["output"], done.record) if options["output"] is not None else []
        write_plot(options["plot"], draw([*earlier, done.record]))
    if options["output"] is not None:
        append_record(options["output"], done.record)
    return 0

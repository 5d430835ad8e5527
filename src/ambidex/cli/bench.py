"""`ambidex bench`: what the machine delivers, and how close the engine comes to it with a model and settings."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ambidex.cli.compare import CompareCommand
from ambidex.cli.lists import MAX_COUNT, CountList
from ambidex.cli.session import SettingsCommand
from ambidex.cli.settings import ENGINE_SETTINGS, VerbOption
from ambidex.cli.show import loading_bar, print_table, print_text, say
from ambidex.core.units import format_size

if TYPE_CHECKING:
    from ambidex.bench.memory_use import MemoryUse
    from ambidex.bench.run import Finished


class BenchGroup(click.Group):
    """The benchmarks of `ambidex bench`."""

    def __init__(self) -> None:
        super().__init__(
            "bench",
            callback=show_help,
            invoke_without_command=True,
            short_help="Measure this machine, and the engine against it.",
            help="Measure memories and links, or the engine with a model and settings of your own, beside the floor "
            "that the machine's measured rates allow (docs/bench.md). Best on a machine that does nothing else.",
            commands=[LinksCommand(), DecodeCommand(), PrefillCommand(), CompareCommand()],
        )


@click.pass_context
def show_help(ctx: click.Context, /) -> None:
    """Without a verb, show help."""
    if ctx.invoked_subcommand is None:
        print_text(ctx.get_help())


def _output_options() -> list[click.Parameter]:
    return [
        VerbOption(["-o", "--output"], type=click.Path(path_type=Path), help="append the record, a JSON line, to it"),
        VerbOption(["as_json", "--json"], is_flag=True, help="print the record instead of tables"),
    ]  # fmt: skip


def _text_option() -> click.Parameter:
    path = click.Path(path_type=Path)
    return VerbOption(["--text"], type=path, help="file whose first tokens are the prompts; default: random tokens")


class LinksCommand(click.Command):
    """Options of `bench links`."""

    def __init__(self) -> None:
        threads = VerbOption(
            ["--num-threads"], type=click.IntRange(1, 4096), help="most CPU threads; default: the usable cores"
        )
        super().__init__(
            "links",
            callback=links,
            short_help="Read rates of memories and copy rates between them.",
            help="Measure how fast DRAM is read with 1, 2, 4, … threads, and on a machine with a GPU its memory and "
            "the copies both ways: pinned, pageable, small.",
            params=[threads, *_output_options()],
        )


class DecodeCommand(SettingsCommand):
    """Options of `bench decode`."""

    def __init__(self) -> None:
        super().__init__(
            "decode",
            callback=decode,
            short_help="Time of a decode step, and its floor.",
            help="Measure decode steps of MODEL at each context and batch size, beside the least time that the bytes "
            "which a step reads take at the measured rates.",
            params=[
                click.Argument(["word"], required=False, metavar="[MODEL]"),
                VerbOption(["--contexts"], type=CountList(), default="512,2K", metavar="LIST", show_default=True,
                           help="tokens of each request before the first step"),
                VerbOption(["--batch"], type=CountList(), default="1", metavar="LIST", show_default=True,
                           help="requests of a step"),
                VerbOption(["--steps"], type=click.IntRange(1, MAX_COUNT), default=32, show_default=True,
                           help="measured steps of each point"),
                _text_option(),
                *_output_options(),
            ],
            settings=ENGINE_SETTINGS,
        )  # fmt: skip


class PrefillCommand(SettingsCommand):
    """Options of `bench prefill`."""

    def __init__(self) -> None:
        super().__init__(
            "prefill",
            callback=prefill,
            short_help="Speed of computing prompts, and its floor.",
            help="Measure the time from a prompt to its first token, beside the least time that its operations take at "
            "the measured rate of a matrix product.",
            params=[
                click.Argument(["word"], required=False, metavar="[MODEL]"),
                VerbOption(["--prompts"], type=CountList(), default="512,2K", metavar="LIST", show_default=True,
                           help="tokens of the prompts"),
                VerbOption(["--rounds"], type=click.IntRange(1, MAX_COUNT), default=3, show_default=True,
                           help="times that each prompt is computed"),
                _text_option(),
                *_output_options(),
            ],
            settings=ENGINE_SETTINGS,
        )  # fmt: skip


@click.pass_context
def links(ctx: click.Context, /, *, num_threads: int | None, output: Path | None, as_json: bool) -> int:
    """Run `bench links`."""
    del ctx
    # Imported here, as in all three: it brings in torch, which `--help` does not need.
    from ambidex.bench.run import run_links

    _check_output(output)
    finished = run_links(num_threads=num_threads)
    _hand_out(finished, output, as_json=as_json)
    return 0


@click.pass_context
def decode(
    ctx: click.Context,
    /,
    *,
    word: str | None,
    contexts: tuple[int, ...],
    batch: tuple[int, ...],
    steps: int,
    text: Path | None,
    output: Path | None,
    as_json: bool,
    verbose: bool,
    **_settings: Any,
) -> int:
    """Run `bench decode`; the settings are read from the context."""
    from ambidex.bench.run import run_decode
    from ambidex.bench.workload import Point

    command = ctx.command
    assert isinstance(command, DecodeCommand), "the callback belongs to this command"
    chosen = command.choose(ctx, word)
    _check_output(output)
    with loading_bar(chosen.engine.model) as progress:
        finished = run_decode(
            chosen.engine,
            [Point(context=context, batch=size) for context in contexts for size in batch],
            steps=steps,
            text=text,
            progress=progress,
        )
    if verbose:
        print_table(("section", "name", "value", "source"), [*chosen.rows, *finished.report], err=True)
    _hand_out(finished, output, as_json=as_json)
    return 0


@click.pass_context
def prefill(
    ctx: click.Context,
    /,
    *,
    word: str | None,
    prompts: tuple[int, ...],
    rounds: int,
    text: Path | None,
    output: Path | None,
    as_json: bool,
    verbose: bool,
    **_settings: Any,
) -> int:
    """Run `bench prefill`; the settings are read from the context."""
    from ambidex.bench.run import run_prefill

    command = ctx.command
    assert isinstance(command, PrefillCommand), "the callback belongs to this command"
    chosen = command.choose(ctx, word)
    _check_output(output)
    with loading_bar(chosen.engine.model) as progress:
        finished = run_prefill(
            chosen.engine,
            prompts,
            rounds=rounds,
            text=text,
            progress=progress,
        )
    if verbose:
        print_table(("section", "name", "value", "source"), [*chosen.rows, *finished.report], err=True)
    _hand_out(finished, output, as_json=as_json)
    return 0


def _check_output(output: Path | None) -> None:
    from ambidex.bench.record import check_output

    if output is not None:
        check_output(output)


def _show_memory(memory: "MemoryUse | None") -> None:
    if memory is None:
        return
    print_text(f"\nhost memory at most {_size(memory.host_peak)}, the ledger holds {_size(memory.host_predicted)}")
    if memory.gpu_predicted is not None:
        print_text(f"GPU memory at most {_size(memory.gpu_peak)}, the ledger holds {_size(memory.gpu_predicted)}")


def _size(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else format_size(num_bytes)


def _hand_out(finished: "Finished", output: Path | None, *, as_json: bool) -> None:
    """Print tables or the record, say so if others kept the machine busy, and append the record to its file."""
    from ambidex.bench.others import QUIET_CORES
    from ambidex.bench.record import append_record

    if as_json:
        print_text(json.dumps(finished.record, ensure_ascii=False))
    else:
        print_table(finished.columns, finished.rows)
        _show_memory(finished.memory)
    busy = finished.record["others"]["busy_cores"] + finished.record["others"]["stolen_cores"]
    if busy > QUIET_CORES:
        say(f"note: others used {busy:.2f} cores meanwhile: these figures are of a busy machine")
    if output is not None:
        append_record(output, finished.record)
    if finished.num_left_out:
        say(f"stopped: {finished.num_left_out} of the points were not measured")
        raise KeyboardInterrupt

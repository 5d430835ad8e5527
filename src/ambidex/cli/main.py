"""The command `ambidex`: its verbs, and the one place where errors become a line on stderr and an exit code.

0   done                          1   our mistake, the machine's, or a failed request
2   the user's mistake            3   a JSONL run ended, some of its lines have an error
130 stopped by Ctrl-C             141 the reader of stdout went away
"""

import logging
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NoReturn

import click

from ambidex.cli.bench import BenchGroup
from ambidex.cli.cache import CacheGroup
from ambidex.cli.calibrate import CalibrateCommand
from ambidex.cli.chat import ChatCommand
from ambidex.cli.config_file import closest
from ambidex.cli.doctor import DoctorCommand
from ambidex.cli.eval import EvalGroup
from ambidex.cli.generate import GenerateCommand
from ambidex.cli.models import ModelsCommand
from ambidex.cli.plan import PlanCommand
from ambidex.cli.replay import ReplayCommand
from ambidex.cli.serve import ServeCommand
from ambidex.cli.services import Services, package_version
from ambidex.cli.settings import VerbOption, as_flags
from ambidex.cli.show import naming_stdout, print_text, say
from ambidex.core.errors import AmbidexError, CallerError, ConfigError, InternalError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141

FOREIGN_VARIABLES: Final = ("AMBIDEX_TEST_", "AMBIDEX_BENCH_")
"""Beginnings of variables that belong to tests and benchmarks of this repository."""

MAX_ISA_VARIABLE: Final = "AMBIDEX_MAX_ISA"
"""Read by the native module when it is first used: the instruction set that its ops do not go beyond."""
ISA_NAMES: Final = ("generic", "avx2", "avx512", "avx512bf16", "amx")


class AmbidexCommand(click.Group):
    """The group of verbs; `main` never shows a traceback unless asked to."""

    def __init__(self) -> None:
        super().__init__(
            "ambidex",
            callback=start,
            invoke_without_command=True,
            help="LLM inference with GPU and CPU together, over a KV cache larger than GPU memory.",
            epilog="Shell completion: eval \"$(_AMBIDEX_COMPLETE=bash_source ambidex)\" (or zsh_source, fish_source).",
            params=[
                VerbOption(["--traceback"], is_flag=True, help="show where in the code an error came up"),
                click.Option(["--version"], is_flag=True, is_eager=True, expose_value=False, callback=show_version,
                             help="show the version and exit"),
            ],
            commands=[
                GenerateCommand(), ChatCommand(), ServeCommand(), CacheGroup(), BenchGroup(), EvalGroup(),
                CalibrateCommand(), PlanCommand(), ReplayCommand(), ModelsCommand(), DoctorCommand(),
            ],
        )  # fmt: skip

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> NoReturn:  # type: ignore[override]  # never returns, whatever click's standalone mode
        """Run a command line and exit with its code; `obj` may bring other `Services`."""
        extra.setdefault("obj", Services())
        try:
            code = super().main(args, prog_name, standalone_mode=False, **extra)
        except Exception as error:
            code = report_error(error)
        try:
            _flush_stdout()
        except OSError:  # it has been reported; what could not be written must not fail once more
            _discard_stdout()
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a verb; a reader of stdout that went away (`| head`) ends it without words."""
        try:
            code = super().invoke(ctx)
            with naming_stdout():
                _flush_stdout()
        except BrokenPipeError:
            _discard_stdout()
            return EXIT_BROKEN_PIPE
        except Exception as error:
            if ctx.params["traceback"] and not isinstance(error, click.ClickException | click.exceptions.Exit):
                traceback.print_exc()
            raise
        return code


@click.pass_context
def start(ctx: click.Context, /, **_options: Any) -> None:
    """Before any verb: refuse unknown variables; without a verb, show help."""
    check_variables(ctx.command, os.environ)
    if ctx.invoked_subcommand is None:
        print_text(ctx.get_help())


def show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Callback of `--version`."""
    del param
    if value and not ctx.resilient_parsing:
        print_text(f"ambidex {package_version('ambidex') or '(not installed: run from its source)'}")
        ctx.exit()


def check_variables(group: click.Command, environ: Mapping[str, str]) -> None:
    """Refuse a variable AMBIDEX_… that no flag has, and a limit that is no instruction set.

    Raises:
        ConfigError: there is one; names it and the closest known one.
    """
    known = [MAX_ISA_VARIABLE, *(str(param.envvar) for param in _all_params(group) if param.envvar is not None)]
    for name in sorted(environ):
        if name.startswith("AMBIDEX_") and name not in known and not name.startswith(FOREIGN_VARIABLES):
            raise ConfigError(f"unknown environment variable {name}{closest(name, known)}: unset or correct it")
    limit = environ.get(MAX_ISA_VARIABLE)
    if limit and limit not in ISA_NAMES:
        raise ConfigError(
            f"{MAX_ISA_VARIABLE} is {limit!r}{closest(limit.lower(), ISA_NAMES)}: it limits the instruction set of "
            f"native ops and must be one of {', '.join(ISA_NAMES)}: correct or unset it"
        )


def _all_params(command: click.Command) -> Iterator[click.Parameter]:
    """Parameters of a command, and of those below it."""
    yield from command.params
    if isinstance(command, click.Group):
        for below in command.commands.values():
            yield from _all_params(below)


def report_error(error: Exception) -> int:
    """One line on stderr; returns the exit code."""
    if _is_interrupt(error):
        return EXIT_INTERRUPTED
    if isinstance(error, click.UsageError):
        hint = f" ({error.ctx.command_path} --help lists what there is)" if error.ctx is not None else ""
        say(f"error: {_one_line(error.format_message()).removesuffix('.')}{hint}")
        return EXIT_USAGE
    if isinstance(error, CallerError | click.ClickException):
        say(f"error: {_one_line(as_flags(str(error)))}")
        return EXIT_USAGE
    if isinstance(error, AmbidexError) and not isinstance(error, InternalError):
        say(f"error: {_one_line(as_flags(str(error)))}")
    else:
        text = ": ".join(filter(None, (type(error).__name__, _one_line(str(error)))))
        say(f"error: {text} (ambidex --traceback shows where)")
    return EXIT_FAILED


def run() -> None:
    """Entry point of the console script."""
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    logging.captureWarnings(True)
    AmbidexCommand().main(prog_name="ambidex")


def _is_interrupt(error: BaseException | None) -> bool:
    """Ctrl-C, also if something else failed while it was on its way out."""
    while error is not None and not isinstance(error, click.Abort | KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _flush_stdout() -> None:
    if sys.stdout is not None:  # as after `>&-`
        sys.stdout.flush()


def _discard_stdout() -> None:
    """What is still buffered and cannot be written goes nowhere, so that Python does not complain when it ends."""
    with suppress(OSError, ValueError):  # a stdout that is no file has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

"""`ambidex chat`: talk at the terminal, or one turn a line from a pipe. Answers go to stdout, the rest to stderr."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import click

from ambidex.cli.conversation import Conversation
from ambidex.cli.services import Services
from ambidex.cli.session import SettingsCommand, open_llm, quiet_option
from ambidex.cli.settings import VerbOption
from ambidex.cli.show import say
from ambidex.cli.source import check_text, decode, is_stdin_terminal


class ChatCommand(SettingsCommand):
    """Options of `chat`."""

    def __init__(self) -> None:
        super().__init__(
            "chat",
            callback=chat,
            short_help="Talk with a model.",
            help="Talk with MODEL, which needs a chat template.\n\n"
            "Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. A pipe gives one turn a line.",
            params=[
                click.Argument(["word"], required=False, metavar="[MODEL]"),
                VerbOption(["--system"], metavar="TEXT", help="system message, the first of the conversation"),
                quiet_option(),
            ],
        )


@click.pass_context
def chat(
    ctx: click.Context, /, *, word: str | None, system: str | None, quiet: bool, verbose: bool, **_settings: Any
) -> int:
    """Run the verb; the settings are read from the context."""
    command = ctx.command
    assert isinstance(command, ChatCommand), "the callback belongs to this command"
    chosen = command.choose(ctx, word)
    services: Services = ctx.obj
    if system is not None:
        check_text(system, name="--system")
    is_terminal = is_stdin_terminal()
    chosen = replace(chosen, engine=chosen.engine.keeping_prefixes())
    with open_llm(services, chosen, verbose=verbose, shows_plan=not quiet) as llm:
        if is_terminal:
            say(f"{chosen.engine.model} is ready. /help lists the commands, Ctrl-D leaves.")
        conversation = Conversation(llm, chosen.sampling, system)
        for line in typed_lines() if is_terminal else piped_lines():
            if not conversation.take(line):
                break
        return 0 if is_terminal else conversation.exit_code


def typed_lines() -> Iterator[str]:
    """Lines that a person types, with editing and history where Python has readline; Ctrl-D ends them."""
    with suppress(ImportError):
        import readline  # noqa: F401 - input() uses it once it is imported
    while True:
        try:
            yield input("> ")
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("\nCtrl-D or /exit leaves")


def piped_lines() -> Iterator[str]:
    """Lines of stdin.

    Raises:
        RequestError: a line is no UTF-8.
    """
    for number, line in enumerate(sys.stdin.buffer, start=1):
        yield decode(line, name=f"line {number} of stdin").rstrip("\r\n")

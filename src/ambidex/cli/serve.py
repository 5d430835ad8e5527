"""`ambidex serve`: the OpenAI-compatible server."""

from typing import Any

import click

from ambidex.cli.services import Services
from ambidex.cli.session import SettingsCommand, quiet_option
from ambidex.cli.settings import SERVE_SETTINGS
from ambidex.cli.show import print_table
from ambidex.server.config import LogFormat


class ServeCommand(SettingsCommand):
    """Options of `serve`."""

    def __init__(self) -> None:
        super().__init__(
            "serve",
            callback=serve,
            settings=SERVE_SETTINGS,
            short_help="Serve a model over HTTP, as the OpenAI API does.",
            help="Serve MODEL on http://127.0.0.1:8000 until Ctrl-C or SIGTERM.\n\n"
            "The port is taken before the model loads; until it has loaded, requests get 503. The page at / is for "
            "people, /v1 for programs, /health, /ready and /metrics for whoever watches over it.",
            params=[click.Argument(["word"], required=False, metavar="[MODEL]"), quiet_option()],
        )


@click.pass_context
def serve(ctx: click.Context, /, *, word: str | None, quiet: bool, verbose: bool, **_settings: Any) -> int:
    """Run the verb; the settings are read from the context."""
    command = ctx.command
    assert isinstance(command, ServeCommand), "the callback belongs to this command"
    chosen = command.choose(ctx, word)
    services: Services = ctx.obj
    if verbose:
        print_table(("section", "name", "value", "source"), chosen.rows, err=True)
    is_json = chosen.server.log_format is LogFormat.JSON  # whoever reads that wants no table
    services.serve(chosen.server, chosen.engine, not quiet and not is_json)
    return 0

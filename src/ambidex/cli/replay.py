"""`ambidex replay`: does a control trace come out as it was decided?"""

from dataclasses import asdict
from typing import TYPE_CHECKING, Final

import click

from ambidex.cli.settings import VerbOption
from ambidex.cli.show import print_json, print_text

if TYPE_CHECKING:
    from ambidex.engine.compose.control import Replay

EXIT_DIFFERENT: Final = 1


class ReplayCommand(click.Command):
    """Options of `replay`."""

    def __init__(self) -> None:
        super().__init__(
            "replay",
            callback=replay,
            short_help="Decide once more what a run's controllers decided.",
            help="Read a file that --control-trace has written, decide each of its lines once more from what it holds "
            "(HybridGen's feedback, the balance of the GPU's and the CPU's lane, hot blocks), and say where it comes "
            "out otherwise now. No model is needed. Exit code 1 if anything does.",
            params=[
                click.Argument(["trace"], metavar="TRACE"),
                VerbOption(["as_json", "--json"], is_flag=True, help="print one JSON object instead"),
            ],
        )


@click.pass_context
def replay(ctx: click.Context, /, *, trace: str, as_json: bool) -> int:
    """Run the verb."""
    del ctx
    # It brings in torch, which `--help` does not need.
    from ambidex.engine.compose.control import replay_file

    found = replay_file(trace)
    if as_json:
        print_json({"trace": trace, **asdict(found)})
    else:
        print_text("\n".join(say_replay(found)))
    return EXIT_DIFFERENT if found.num_different else 0


def say_replay(found: "Replay") -> list[str]:
    """For people."""
    kinds = {
        "of HybridGen's feedback": found.num_selections,
        "of the balance of lanes": found.num_shares,
        "of hot blocks": found.num_hot,
    }
    parts = ", ".join(f"{number} {kind}" for kind, number in kinds.items() if number)
    decisions = "1 decision" if found.num_decisions == 1 else f"{found.num_decisions} decisions"
    if found.first is None:
        return [f"{decisions} ({parts}): all come out as they were recorded"]
    number, recorded, decided = found.first.line, found.first.recorded, found.first.decided
    return [
        f"{decisions} ({parts}): {found.num_different} {'comes' if found.num_different == 1 else 'come'} out otherwise",
        f"the first in line {number}:",
        *(
            f"  {name}: recorded {value}, decided now {now}"
            for (name, value), now in zip(asdict(recorded).items(), asdict(decided).values(), strict=True)
            if value != now
        ),
    ]

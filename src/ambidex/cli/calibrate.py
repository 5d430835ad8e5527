"""`ambidex calibrate`: measures this machine once, for `ambidex plan` and for engines that place weights."""

import os
from pathlib import Path
from typing import Any, Final

import click

from ambidex.cli.services import Services
from ambidex.cli.settings import VerbOption
from ambidex.cli.show import counting_bar, print_json, print_table, print_text, say

MICRO: Final = 1e6


class CalibrateCommand(click.Command):
    """Options of `calibrate`."""

    def __init__(self) -> None:
        path = click.Path(path_type=Path)
        super().__init__(
            "calibrate",
            callback=calibrate,
            short_help="Measure this machine's rates into its profile.",
            help="Measure what the cost model needs of this machine: reads of DRAM and GPU memory, products of weights "
            "by format and tokens, attention, copies, handovers. Best while nothing else runs. What Ctrl-C interrupts "
            "goes on where it was.",
            params=[
                VerbOption(["--profile"], type=path, help="file to write; default: this machine's in the user's cache"),
                VerbOption(["--num-threads"], type=click.IntRange(1, 4096),
                           help="CPU threads; default: the usable cores, of which a GPU's driver takes one"),
                VerbOption(["--anew"], is_flag=True, help="measure all, also what an interrupted run has measured"),
                VerbOption(["as_json", "--json"], is_flag=True, help="print the profile as JSON instead of a table"),
            ],
        )  # fmt: skip


@click.pass_context
def calibrate(
    ctx: click.Context, /, *, profile: Path | None, num_threads: int | None, anew: bool, as_json: bool
) -> int:
    """Run the verb."""
    # These bring in torch, which `--help` does not need.
    from ambidex.calibrate.run import calibrate as measure
    from ambidex.calibrate.run import part_names
    from ambidex.hw.profile_file import default_path, profile_json, read_profile

    services: Services = ctx.obj
    machine = services.describe_machine()
    path = profile if profile is not None else default_path(os.environ)
    threads = num_threads or max(1, machine.cores - (machine.gpu is not None))
    names = part_names(has_gpu=machine.gpu is not None)
    rows, num_kept = [], 0
    with counting_bar("measuring", done=0, total=len(names)) as advance:
        for part in measure(path, machine, num_threads=threads, anew=anew):
            advance()
            num_kept += part.is_kept
            took = "kept from an interrupted run" if part.is_kept else f"{part.seconds:.1f} s"
            rows.append((part.name, show(part.name, part.value), took))
    if as_json:
        print_json(profile_json(read_profile(path)))
    else:
        print_table(("measured", "", "in"), rows)
        print_text(f"\nscheduling and sampling are not measured: they are those of the presets\nwritten to {path}")
    if num_kept:
        say(f"{num_kept} of {len(rows)} figures are of a run that was interrupted (--anew measures all again)")
    return 0


def show(name: str, value: Any) -> str:
    """A part's value for people."""
    if isinstance(value, dict):
        return str(value["name"])
    if name in ("CPU small calls", "GPU small kernels", "handover"):
        return f"{MICRO * value:.1f} µs" + ("" if name == "handover" else " a layer")
    if name == "copies":
        return f"{_gb(value[0])} to the GPU, {_gb(value[1])} from it"
    if isinstance(value, float):
        return _gb(value)
    unit = "threads" if name == "DRAM read" else "tokens"
    return ", ".join(f"{num}: {rate / 1e9:.1f}" for num, rate in value) + f" GB/s by {unit}"


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"

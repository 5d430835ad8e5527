"""`ambidex calibrate`: measures this machine once, for `ambidex plan` and for engines that place weights."""

import os
from pathlib import Path
from typing import Any, Final

import click

from ambidex.cli.calibrate_accuracy import AccuracyCommand
from ambidex.cli.lists import MAX_COUNT
from ambidex.cli.services import Services
from ambidex.cli.session import SettingsCommand
from ambidex.cli.settings import ENGINE_SETTINGS, VerbOption
from ambidex.cli.show import counting_bar, loading_bar, print_json, print_table, print_text, say

MICRO: Final = 1e6


class NeuronsCommand(SettingsCommand):
    """Options of `calibrate neurons`."""

    def __init__(self) -> None:
        path = click.Path(path_type=Path)
        super().__init__(
            "neurons",
            callback=measure_neurons,
            short_help="Measure what a model's neurons do on a text.",
            help="Run the beginning of a text through a model and write down how often each neuron of its MLPs is "
            "active, and thresholds below which a share of them lies: for --mlp-sparsity.",
            params=[
                click.Argument(["word"], required=False, metavar="[MODEL]"),
                VerbOption(["--text"], type=path, required=True, help="file with the text, UTF-8"),
                VerbOption(["--tokens"], type=click.IntRange(1, MAX_COUNT), default=16384, show_default=True,
                           help="of the text that are run, at most"),
                VerbOption(["--context"], type=click.IntRange(1, MAX_COUNT), default=1024, show_default=True,
                           help="tokens of each piece, which does not see the others"),
                VerbOption(["-o", "--output"], type=path, help="file to write; default: the model's in the user's "
                           "cache"),
            ],
            settings=ENGINE_SETTINGS,
        )  # fmt: skip


@click.pass_context
def measure_neurons(
    ctx: click.Context, /, *, word: str | None, text: Path, tokens: int, context: int, output: Path | None,
    **_options: Any,
) -> int:  # fmt: skip
    """Run `calibrate neurons`."""
    # These bring in torch, which `--help` does not need.
    from ambidex.engine.compose.neurons import measure_neurons as measure
    from ambidex.eval.run import read_text
    from ambidex.formats.neuron_profile import SHARES, default_neuron_path

    command = ctx.command
    assert isinstance(command, NeuronsCommand), "the callback belongs to this command"
    chosen = command.choose(ctx, word)
    words = read_text(text)
    with loading_bar(chosen.engine.model) as progress:
        profile = measure(chosen.engine, words, num_tokens=tokens, context=context, progress=progress, tell=_tell)
    path = output if output is not None else default_neuron_path(os.environ, profile.model)
    profile.write(path)
    half = SHARES.index(0.5)
    rows = [
        (
            str(layer),
            f"{100 * active.mean():.1f} %",
            f"{100 * _share_of_hottest(active):.0f} %",
            f"{gate[half]:.3g}" if len(gate) else "–",
            f"{inputs[half]:.3g}",
        )
        for layer, (active, gate, inputs) in enumerate(
            zip(profile.activity, profile.gate_sizes, profile.input_sizes, strict=True)
        )
    ]
    print_table(("layer", "active", "of these, the hottest 20 %", "|gate|, median", "|input|, median"), rows)
    print_text(f"\n{profile.num_tokens} tokens of {text}, written to {path}")
    return 0


def _tell(done: int, total: int) -> None:
    say(f"{done} of {total} tokens")


def _share_of_hottest(activity: Any) -> float:
    """Of all activations, that the most active fifth of the neurons has."""
    ordered = sorted(map(float, activity), reverse=True)
    total = sum(ordered)
    return sum(ordered[: max(1, len(ordered) // 5)]) / total if total else 0.0


class CalibrateCommand(click.Group):
    """Options of `calibrate`, which has a verb of its own for models."""

    def __init__(self) -> None:
        path = click.Path(path_type=Path)
        super().__init__(
            "calibrate",
            callback=calibrate,
            invoke_without_command=True,
            commands=[AccuracyCommand(), NeuronsCommand()],
            short_help="Measure this machine's rates into its profile.",
            help="Measure what the cost model needs of this machine: reads of DRAM and GPU memory, products of weights "
            "by format and tokens, attention, copies, handovers, each NUMA node's memory. Best while nothing else runs."
            " What Ctrl-C interrupts goes on where it was. `calibrate neurons` and"
            " `calibrate accuracy` measure a model instead.",
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
    """Run the verb, unless another one is named behind it."""
    if ctx.invoked_subcommand is not None:
        return 0
    # These bring in torch, which `--help` does not need.
    from ambidex.calibrate.run import calibrate as measure
    from ambidex.calibrate.run import measured_nodes, part_names
    from ambidex.hw.profile_file import default_path, profile_json, read_profile
    from ambidex.hw.topology import check_num_threads, read_topology

    services: Services = ctx.obj
    machine = services.describe_machine()
    path = profile if profile is not None else default_path(os.environ)
    if num_threads is not None:
        check_num_threads(num_threads)
    threads = num_threads or max(1, machine.cores - (machine.gpu is not None))
    names = part_names(has_gpu=machine.gpu is not None, node_ids=measured_nodes(read_topology()))
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
    if name == "CPU tiles":
        return _show_tiles(value)
    if name.startswith("CPU neurons "):
        return _show_neurons(value)
    if isinstance(value, dict):
        return str(value["name"]) if "name" in value else _show_node(value)
    if name in ("CPU small calls", "GPU small kernels", "launches", "handover"):
        return f"{MICRO * value:.1f} µs" + ("" if name == "handover" else " a layer")
    if name == "copies":
        return f"{_gb(value[0])} to the GPU, {_gb(value[1])} from it"
    if isinstance(value, float):
        return _gb(value)
    unit = "threads" if name == "DRAM read" else "tokens"
    return ", ".join(f"{num}: {rate / 1e9:.1f}" for num, rate in value) + f" GB/s by {unit}"


def _show_tiles(tokens: dict[str, int | None]) -> str:
    """From where on tiles are faster than vectors."""
    if not tokens:
        return "the processor has none"
    return ", ".join(f"{kind} {'never' if num is None else f'from {num} tokens'}" for kind, num in tokens.items())


def _show_neurons(seconds: dict[str, list[tuple[int, float]]]) -> str:
    """Up to which share of active neurons it pays to leave out the others."""
    from ambidex.hw.profile import Curve, NeuronRates
    from ambidex.mlp.sparse_rates import costs_of, screen_costs_of  # brings in torch

    rates = NeuronRates(**{name: Curve(tuple((int(num), float(s)) for num, s in points))
                           for name, points in seconds.items()})  # fmt: skip
    screens = screen_costs_of(rates, row_bytes=1)
    shares = ", ".join(
        f"{100 * share:.0f} % at {num}" for num, share in costs_of(rates, row_bytes=1).crossovers().items()
    )
    screened = ", ".join(f"{100 * screens.most_candidates(num):.0f} % at {num}" for num in screens.plain)
    return f"dense above {shares} tokens; a screen pays below {screened} tokens"


def _show_node(rates: dict[str, Any]) -> str:
    """What was measured of a NUMA node."""
    if "refusal" in rates:
        return f"not measured: {rates['refusal']}"
    shown = f"reads {_gb(rates['read_bytes_per_s'])}"
    if rates["latency_s"] is not None:
        shown += f", {1e9 * rates['latency_s']:.0f} ns a read"
    return (
        shown
        if rates["to_gpu_bytes_per_s"] is None
        else f"{shown}, copies {_gb(rates['to_gpu_bytes_per_s'])} to the GPU"
    )


def _gb(rate: float) -> str:
    return f"{rate / 1e9:.1f} GB/s"

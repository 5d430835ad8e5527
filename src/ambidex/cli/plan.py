"""`ambidex plan`: where a model's weights and keys would lie, and how fast that would be. No weights are loaded."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ambidex.cli.services import Services
from ambidex.cli.settings import VerbOption
from ambidex.cli.show import print_json, print_table, print_text, say
from ambidex.core.dtypes import WEIGHT_BLOCKS, DType
from ambidex.core.errors import ConfigError
from ambidex.core.kv_dtypes import AUTO as KV_AUTO
from ambidex.core.kv_dtypes import parse_kv_dtypes
from ambidex.core.sparsity import OFF, parse_sparsity
from ambidex.core.units import parse_size
from ambidex.hw.presets import CPUS, GPUS, LINKS

if TYPE_CHECKING:
    from ambidex.core.model_spec import ModelSpec
    from ambidex.formats.locate import ModelSource
    from ambidex.hw.profile import Curve, HardwareProfile
    from ambidex.solver.planning import PlanRequest

NO_GPU: Final = "none"
DEFAULT_CPU: Final = "ddr5-2ch"
DEFAULT_LINK: Final = "pcie4x16"
MAX_COUNT: Final = 1 << 40


class Count(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """A number of at least 1; K and M are 1024 and 1024²."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the number.

        Raises:
            click.UsageError: it is none.
        """
        try:
            number = value if isinstance(value, int) else parse_size(value)
        except ConfigError:
            number = 0
        if not 1 <= number <= MAX_COUNT:
            self.fail(f"{str(value)[:60]!r} is no number of at least 1, such as 512 or 128K", param, ctx)
        return number


class Size(click.ParamType):  # type: ignore[type-arg]
    """Bytes with a unit."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Read the size.

        Raises:
            click.UsageError: it is none.
        """
        try:
            return value if isinstance(value, int) else parse_size(value)
        except ConfigError as error:
            self.fail(str(error), param, ctx)


class PlanCommand(click.Command):
    """Options of `plan`."""

    def __init__(self) -> None:
        path = click.Path(path_type=Path)
        super().__init__(
            "plan",
            callback=plan,
            short_help="Where weights and keys would lie, and how fast that would be.",
            help="Find the placement of MODEL's weights and keys over GPU memory, DRAM and the link that a cost model "
            "predicts to be fastest: on this machine, once `ambidex calibrate` has measured it, or on presets from "
            "data sheets (--gpu, --cpu, --link). Reads headers alone: a folder with a config.json is enough.",
            params=[
                click.Argument(["model"]),
                VerbOption(["--context"], type=Count(), default="2K", show_default=True,
                           help="tokens of each request in the cache"),
                VerbOption(["--batch"], type=Count(), default="1", show_default=True, help="requests of a step"),
                VerbOption(["--prompt"], type=Count(), help="tokens of the prompt; default: the context"),
                VerbOption(["--chunk"], type=Count(), default="2K", show_default=True,
                           help="tokens of a prompt that one step computes"),
                VerbOption(["--weights"], type=click.Choice(list(WEIGHT_BLOCKS), case_sensitive=False),
                           help="format that all matrices are stored in; default: the files'"),
                VerbOption(["--kv-dtype"], default=KV_AUTO, metavar="FORMAT",
                           help="format of keys and values in DRAM, as of the setting of that name: k=int8,v=int4, …"),
                VerbOption(["--mlp-sparsity"], default=OFF, metavar="FORM",
                           help="neurons that the CPU leaves out, as of the setting of that name: relu, teal:0.5, …"),
                VerbOption(["--neuron-profile"], type=path,
                           help="how often neurons are active; default: what `calibrate neurons` wrote, if it did"),
                VerbOption(["--gpu"], type=click.Choice([NO_GPU, *GPUS]), metavar="NAME",
                           help=f"preset of a GPU ({', '.join(GPUS)}), or {NO_GPU}; default: this machine"),
                VerbOption(["--cpu"], type=click.Choice(list(CPUS)), metavar="NAME",
                           help=f"preset of a processor's memory ({', '.join(CPUS)}); with --gpu: {DEFAULT_CPU}"),
                VerbOption(["--link"], type=click.Choice(list(LINKS)), metavar="NAME",
                           help=f"preset of the link ({', '.join(LINKS)}); with --gpu: {DEFAULT_LINK}"),
                VerbOption(["--profile"], type=path, help="file of rates; default: what `ambidex calibrate` wrote"),
                VerbOption(["--gpu-memory"], type=Size(), metavar="SIZE",
                           help="budget of GPU memory; default: 90 % of it"),
                VerbOption(["--dram-memory"], type=Size(), metavar="SIZE",
                           help="budget of DRAM; default: what this machine has free, presets have no limit"),
                VerbOption(["--pin"], multiple=True, metavar="PART=WHERE",
                           help="decide a part: mlp.0-9=cpu, attention=gpu:0.5,cpu:0.5, head=gpu, kv=gpu:0.2,cpu:0.8"),
                VerbOption(["--placement"], type=path, help="obey the parts that this file names, and solve the rest"),
                VerbOption(["-o", "--output"], type=path, help="write the placement to this file"),
                VerbOption(["--explain"], is_flag=True, help="show what the time consists of, and simpler placements"),
                VerbOption(["as_json", "--json"], is_flag=True, help="print one JSON object instead of tables"),
            ],
        )  # fmt: skip


@click.pass_context
def plan(ctx: click.Context, /, *, model: str, explain: bool, as_json: bool, output: Path | None, **words: Any) -> int:
    """Run the verb."""
    # These bring in scipy and gguf (half a second), which the other verbs' help does not need.
    from ambidex.cli.plan_tables import explain_tables, plan_json, plan_tables
    from ambidex.hw.profile_file import write_json
    from ambidex.solver.placement_file import placement_json
    from ambidex.solver.planning import make_plan

    services: Services = ctx.obj
    request = _make_request(services, model, words)
    found = make_plan(request)
    if as_json:
        print_json(plan_json(model, found))
    else:
        tables = [*plan_tables(model, found), *(explain_tables(found) if explain else ())]
        for place, table in enumerate(tables):
            if place:
                print_text("")
            print_table(table.columns, table.rows, title=table.title)
    if output is not None:
        write_json(output, placement_json(found.solution.placement, found.solution.kv))
        say(f"placement written to {output}")
    return 0


def _make_request(services: Services, model: str, words: dict[str, Any]) -> "PlanRequest":
    from ambidex.cost.weights import DIVIDED_ON_GPU, WHOLE_ON_CPU, count_weights
    from ambidex.cost.workload import Workload
    from ambidex.formats.locate import find_model
    from ambidex.formats.spec import read_spec
    from ambidex.solver.placement_file import join_pins, parse_words, read_pins
    from ambidex.solver.planning import PlanRequest

    source = find_model(model)
    spec = read_spec(source)
    profile = _find_profile(services, words)
    if words["context"] > spec.max_context_len:
        raise ConfigError(
            f"--context {words['context']} is longer than the model was made for, {spec.max_context_len} tokens: "
            f"shorten it"
        )
    kind = words["weights"]
    dtype = _choose_dtype(spec.dtype, is_quantized=spec.is_quantized or kind not in (None, *DType), on_gpu=profile.gpu)
    residence = DIVIDED_ON_GPU if profile.gpu is not None else WHOLE_ON_CPU
    weights = count_weights(spec, residence=residence, dtype=dtype, kind=kind)
    if kind is not None and kind not in (*residence.kinds, *DType):
        say(f"a GPU has no product of {kind} matrices: they are counted as {dtype}, which loading makes of them")
    pins = parse_words(words["pin"], spec.num_layers)
    if words["placement"] is not None:
        pins = join_pins(read_pins(words["placement"], spec.num_layers), pins)
    dram = words["dram_memory"]
    if dram is None and profile.machine is not None:
        dram = _free_dram(services)
    if words["gpu_memory"] is not None and profile.gpu is None:
        raise ConfigError("--gpu-memory is given, but there is no GPU: use --dram-memory")
    return PlanRequest(
        spec=spec,
        weights=weights,
        dtype=dtype,
        profile=profile,
        workload=Workload(
            batch=words["batch"],
            context=words["context"],
            prompt=min(words["prompt"] or words["context"], spec.max_context_len),
            chunk=words["chunk"],
            kv_dtypes=parse_kv_dtypes(words["kv_dtype"]),
        ),
        gpu_bytes=words["gpu_memory"],
        dram_bytes=dram,
        pins=pins,
        mlp_reads=_find_reads(words, spec, source, number_bytes=dtype.num_bytes),
    )


def _find_reads(
    words: dict[str, Any], spec: "ModelSpec", source: "ModelSource", *, number_bytes: int
) -> "Curve | None":
    """What the CPU reads of MLPs where neurons are left out; None: all of them."""
    from ambidex.cost.sparsity import expected_reads
    from ambidex.cost.weights import GATED
    from ambidex.formats.neuron_profile import default_neuron_path, fingerprint, read_neuron_profile

    sparsity, path = parse_sparsity(words["mlp_sparsity"]), words["neuron_profile"]
    if sparsity is None:
        if path is not None:
            raise ConfigError("--neuron-profile is for --mlp-sparsity, which is off: leave it out, or choose a form")
        return None
    refusal = sparsity.refusal(spec.activation, is_gated=spec.architecture in GATED)
    if refusal is not None:
        raise ConfigError(refusal)
    model = fingerprint(source, spec)
    found = path if path is not None else default_neuron_path(os.environ, model)
    is_there = path is not None or found.exists()
    profile = read_neuron_profile(found, spec, model=model) if is_there else None
    return expected_reads(spec, sparsity, profile, number_bytes=number_bytes)


def _choose_dtype(stored: DType, *, is_quantized: bool, on_gpu: object) -> DType:
    """The format of what is not quantised, as engines choose it."""
    if on_gpu is not None:
        return stored if stored is not DType.FP32 else DType.BF16
    return DType.FP16 if is_quantized else stored


def _find_profile(services: Services, words: dict[str, Any]) -> "HardwareProfile":
    """Presets if one is named, else the profile of this machine."""
    from ambidex.hw.presets import cpu_rates, make_profile
    from ambidex.hw.profile import HardwareProfile
    from ambidex.hw.profile_file import default_path, read_profile

    gpu, cpu, link = words["gpu"], words["cpu"], words["link"]
    if gpu is None and cpu is None and link is None:
        path = words["profile"]
        profile = read_profile(path if path is not None else default_path(os.environ))
        if path is None:
            profile.check_machine(services.describe_machine())
        return profile
    if words["profile"] is not None:
        raise ConfigError("--profile and presets (--gpu, --cpu, --link) both name a machine: leave one of them out")
    if gpu is None or gpu == NO_GPU:
        if link is not None:
            raise ConfigError("--link is given without --gpu: a link leads to a GPU, name one")
        name = cpu or DEFAULT_CPU
        return HardwareProfile(
            machine=None, date="", source=f"data sheets: {name} ({CPUS[name].source})", cpu=cpu_rates(name)
        )
    return make_profile(gpu, cpu or DEFAULT_CPU, link or DEFAULT_LINK)


def _free_dram(services: Services) -> int:
    from ambidex.hw.memory import read_memory

    return read_memory(services.root).usable_bytes

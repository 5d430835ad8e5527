"""`ambidex doctor`: what this machine has, what is wrong with it, and how to mend that."""

import dataclasses
import platform
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import click

from ambidex.cli.services import Services
from ambidex.cli.settings import VerbOption
from ambidex.cli.show import print_json, print_table, print_text
from ambidex.core.errors import NativeModuleError
from ambidex.core.units import GIB, format_size
from ambidex.hw.memory import MemoryInfo, read_memory
from ambidex.hw.topology import Topology, read_topology

CPU_FLAGS: Final = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")
"""The flags that the kernels look at."""
PACKAGES: Final = ("torch", "numpy", "tokenizers", "gguf", "jinja2", "huggingface_hub", "click", "rich")
"""The packages without which nothing runs."""
SMALL_MEMORY: Final = 2 * GIB
"""Less than this holds no model but the smallest: SmolLM2-135M in fp32 (0.5 GiB), torch itself and a KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is wrong and how to mend it. `is_essential`: nothing runs before it is mended."""

    what: str
    mend: str
    is_essential: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All that was looked at. `gpus` is the error if torch could not say; `isa` likewise."""

    topology: Topology
    memory: MemoryInfo
    gpus: tuple[dict[str, Any], ...] | Exception
    gpu_driver: str | None
    isa: str | Exception
    versions: dict[str, str | None]


class DoctorCommand(click.Command):
    """Options of `doctor`."""

    def __init__(self) -> None:
        super().__init__(
            "doctor",
            callback=doctor,
            short_help="Look at this machine and say what is wrong.",
            help="Show processor, memory, GPU, native module and versions; say what is wrong and how to mend it. "
            "The exit code is 1 if nothing can run before that.",
            params=[VerbOption(["as_json", "--json"], is_flag=True, help="print one JSON object instead of tables")],
        )


@click.pass_context
def doctor(ctx: click.Context, /, *, as_json: bool) -> int:
    """Run the verb."""
    findings = examine(ctx.obj)
    problems = list(find_problems(findings))
    if as_json:
        print_json({**findings_json(findings), "problems": [asdict(problem) for problem in problems]})
    else:
        print_table(("found", ""), findings_rows(findings))
        for problem in problems:
            print_text(f"\n{'PROBLEM' if problem.is_essential else 'advice'}: {problem.what}\n  {problem.mend}")
        if not problems:
            print_text("\nno problems found")
    return int(any(problem.is_essential for problem in problems))


def examine(services: Services) -> Findings:
    """Look at everything; what cannot be looked at is a finding too."""
    return Findings(
        topology=read_topology(services.root),
        memory=read_memory(services.root),
        gpus=_gpus(services),
        gpu_driver=_find_gpu_driver(services.root),
        isa=_isa(services),
        versions={name: services.package_version(name) for name in ("ambidex", *PACKAGES)},
    )


def find_problems(findings: Findings) -> Iterator[Problem]:
    """What is wrong, the essential first."""
    missing = [name for name in PACKAGES if findings.versions[name] is None]
    if missing:
        names = ", ".join(missing)
        yield Problem(what=f"not installed: {names}", mend=f"pip install {' '.join(missing)}", is_essential=True)
    if isinstance(findings.gpus, Exception):
        yield Problem(
            what=f"torch does not work: {findings.gpus}",
            mend="install torch again; on a machine without a GPU from https://download.pytorch.org/whl/cpu",
            is_essential=True,
        )
    if isinstance(findings.isa, Exception):
        yield Problem(
            what=f"the native module does not work: {findings.isa}",
            mend="build it with `pip install --force-reinstall --no-deps ambidex`, or `pip install .` in a clone "
            "(needs gcc 12 or newer)",
            is_essential=True,
        )
    yield from _find_advice(findings)


def _find_advice(findings: Findings) -> Iterator[Problem]:
    topology, memory = findings.topology, findings.memory
    if findings.gpus == () and findings.gpu_driver is not None:
        yield Problem(
            what=f"the NVIDIA driver {findings.gpu_driver} is here, but torch {findings.versions['torch']} sees no GPU",
            mend="install a CUDA build of torch that fits the driver, and check nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    if platform.machine() == "x86_64" and "avx2" not in topology.cpu_flags:
        yield Problem(
            what="this processor has no AVX2: the generic kernels run, several times slower",
            mend="use a processor of 2013 or newer, or let the virtual machine pass the host's flags on",
        )
    if topology.cpu_quota is not None and topology.cpu_quota < len(topology.allowed_cores):
        yield Problem(
            what=f"the control group gives CPU time for {topology.cpu_quota:g} of {len(topology.allowed_cores)} cores",
            mend=f"raise the quota (docker run --cpus), or keep to --num-threads {topology.num_usable_cores}",
        )
    if memory.usable_bytes < SMALL_MEMORY:
        limit = f", by the limit in {memory.limit.path}" if memory.limit is not None else ""
        yield Problem(
            what=f"{format_size(memory.usable_bytes)} of memory can be used{limit}: only the smallest models fit",
            mend="stop other programs, or raise the limit (docker run --memory)",
        )


def findings_rows(findings: Findings) -> list[tuple[str, str]]:
    """The findings for people."""
    topology, memory = findings.topology, findings.memory
    quota = "" if topology.cpu_quota is None else f", quota {topology.cpu_quota:g} cores"
    limit = memory.limit
    rows = [
        ("processor", topology.cpu_model),
        ("flags", " ".join(f"{'+' if flag in topology.cpu_flags else '-'}{flag}" for flag in CPU_FLAGS)),
        ("cores", f"{len(topology.allowed_cores)} allowed of {len(topology.online_cores)} online{quota}"),
        ("memory", f"{format_size(memory.available_bytes)} available of {format_size(memory.total_bytes)}"),
        (
            "memory limit",
            f"{format_size(limit.limit_bytes)}, {format_size(limit.free_bytes)} free" if limit else "none",
        ),
    ]
    for node in topology.numa_nodes:
        kind = "memory only" if node.is_memory_only else f"{len(node.cores)} cores"
        kind += "" if node.is_allowed else ", outside of this process's cpuset"
        rows.append((f"NUMA node {node.node_id}", f"{format_size(node.memory_bytes)}, {kind}"))
    gpus = () if isinstance(findings.gpus, Exception) else findings.gpus
    rows += [(f"GPU {index}", ", ".join(_show(name, gpu[name]) for name in gpu)) for index, gpu in enumerate(gpus)]
    rows += [("GPU", "none that torch can use")] * (not gpus)
    rows.append(("GPU driver", findings.gpu_driver or "none"))
    rows.append(("native module", "does not work" if isinstance(findings.isa, Exception) else f"uses {findings.isa}"))
    rows.append(("python", platform.python_version()))
    return rows + [(name, found or "not installed") for name, found in findings.versions.items()]


def findings_json(findings: Findings) -> dict[str, Any]:
    """The findings for a script; bytes and cores."""
    topology, memory = findings.topology, findings.memory
    return {
        "cpu": {
            "model": topology.cpu_model,
            "flags": {flag: flag in topology.cpu_flags for flag in CPU_FLAGS},
            "online_cores": list(topology.online_cores),
            "allowed_cores": list(topology.allowed_cores),
            "quota": topology.cpu_quota,
            "usable_cores": topology.num_usable_cores,
        },
        "memory": {
            "total_bytes": memory.total_bytes,
            "available_bytes": memory.available_bytes,
            "limit_bytes": memory.limit.limit_bytes if memory.limit else None,
            "usable_bytes": memory.usable_bytes,
        },
        "numa_nodes": [asdict(node) for node in topology.numa_nodes],
        "gpus": [] if isinstance(findings.gpus, Exception) else list(findings.gpus),
        "gpu_driver": findings.gpu_driver,
        "native_isa": None if isinstance(findings.isa, Exception) else findings.isa,
        "versions": {"python": platform.python_version(), **findings.versions},
    }


def _gpus(services: Services) -> tuple[dict[str, Any], ...] | Exception:
    try:
        return tuple(dataclasses.asdict(gpu) for gpu in services.describe_gpus())
    except Exception as error:  # whatever a broken torch or driver raises is what we are here to tell
        return error


def _isa(services: Services) -> str | Exception:
    try:
        return services.native_isa()
    except (NativeModuleError, ImportError, OSError) as error:
        return error


def _find_gpu_driver(root: Path) -> str | None:
    """Version of the NVIDIA kernel driver."""
    path = root / "proc/driver/nvidia/version"
    if not path.is_file():
        return None
    match = re.search(r"\b\d+(?:\.\d+)+\b", path.read_text(errors="replace"))
    return match[0] if match else "of unknown version"


def _show(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return f"{name.removesuffix('_bytes')} memory {format_size(value)}"
    return str(value) if name == "name" else f"{name.replace('_', ' ')} {value}"

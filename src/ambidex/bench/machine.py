"""Where and with what a figure was taken: the opening of every record."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ambidex.hw.memory import read_memory
from ambidex.hw.topology import last_level_cache_bytes, read_topology

__all__ = [
    "PACKAGES",
    "describe_cpu",
    "environment",
    "gpu_name",
    "last_level_cache_bytes",
    "machine",
    "package_version",
]

PACKAGES: Final = ("ambidex", "torch", "triton", "numpy")
"""What computes here."""
_KNOWN_ISA: Final = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")


def environment(*, packages: Sequence[str] = PACKAGES, except_for: Sequence[str] = ()) -> dict[str, object]:
    """The record's opening: commit, whether sources differ from it, date (UTC), machine, versions.

    The commit is that of the source tree that this package runs from; it and `is_dirty` are None for an installed one.

    Args:
        packages: whose versions are named.
        except_for: git pathspecs, from the tree's root, of files that may differ.
    """
    commit = _git("rev-parse", "HEAD") if _is_tracked() else os.environ.get("AMBIDEX_BENCH_COMMIT")
    changes = (
        None
        if commit is None
        else _git("status", "--porcelain", "--", ":/", *(f":(top,exclude){path}" for path in except_for))
    )
    return {
        "commit": commit,
        "is_dirty": None if changes is None else bool(changes),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: package_version(name) for name in packages}},
    }


def machine() -> dict[str, object]:
    """CPU model, cores this process may use, memory, GPU and the vector units, with a sentence for people."""
    topology, memory = read_topology(), read_memory()
    isa = [name for name in _KNOWN_ISA if name in topology.cpu_flags]
    return {
        "cpu": topology.cpu_model,
        "cores": topology.num_usable_cores,
        "memory_bytes": memory.total_bytes,
        "memory_limit_bytes": memory.limit.limit_bytes if memory.limit else None,
        "last_level_cache_bytes": last_level_cache_bytes(),
        "gpu": gpu_name(),
        "isa": isa,
        "note": describe_cpu(topology.cpu_model, topology.num_usable_cores, isa),
    }


def describe_cpu(model: str, cores: int, isa: Sequence[str]) -> str:
    """A sentence that says which vector units a figure was taken with, and which the machine lacks."""
    has = {"AVX2": "avx2" in isa, "AVX-512": "avx512f" in isa, "AMX": "amx_tile" in isa}
    present = ", ".join(name for name, found in has.items() if found) or "no known vector units"
    absent = "".join(f", no {name}" for name, found in has.items() if not found)
    return f"{model}, {cores} core{'s' if cores != 1 else ''}: {present}{absent}"


def gpu_name() -> str | None:
    """Name and memory of the GPUs as nvidia-smi gives them, or None."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    answer = subprocess.run(
        [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return "; ".join(answer.stdout.splitlines()) or None


def package_version(name: str) -> str | None:
    """Version of an installed package, or None; ambidex may also be run from its folder (see `commit` then)."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_tracked() -> bool:
    """This file belongs to a git tree: an installed package may lie inside someone else's."""
    return _git("ls-files", "--error-unmatch", Path(__file__).name) is not None


def _git(*arguments: str) -> str | None:
    """Output of a git command in this file's folder; None outside of a tree or without git."""
    if shutil.which("git") is None:
        return None
    folder = Path(__file__).resolve().parent
    answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None

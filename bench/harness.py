"""What every benchmark shares: timing with quantiles, how quiet the machine was, what it can read, where and with what
a figure was taken, and the one JSON line that keeps it.

Nothing here knows an engine. Figures: seconds, bytes, bytes/s, cores; never percent.
"""

import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from ambidex.hw.memory import read_memory
from ambidex.hw.topology import read_topology

REPO: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("ambidex", "torch", "triton", "transformers", "llama-cpp-python", "numpy", "gguf")
QUIET_CORES: Final = 0.15
"""Others below this many cores count as quiet: with 2 cores it bounds their effect to about 8 %, half of the 15 % by
which the clock of the shared machines moves anyway (research/packages.md, opening)."""
_KNOWN_ISA: Final = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8")


# -- timing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Median and the 20 % and 80 % quantiles of `num` samples, in the samples' unit."""

    median: float
    q20: float
    q80: float
    num: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Quantiles":
        """Quantiles by linear interpolation between the nearest samples.

        Raises:
            ValueError: there is no sample.
        """
        if not samples:
            raise ValueError("no samples: a quantile needs at least one")
        if len(samples) == 1:
            return cls(median=samples[0], q20=samples[0], q80=samples[0], num=1)
        fifths = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(median=statistics.median(samples), q20=fifths[0], q80=fifths[3], num=len(samples))

    def record(self, *, digits: int = 4) -> dict[str, float | int]:
        """The quantiles with `digits` significant digits, for a JSON record."""
        return {name: significant(getattr(self, name), digits) for name in ("median", "q20", "q80")} | {"num": self.num}


def significant(value: float, digits: int = 4) -> float:
    """Round to a number of significant digits."""
    return float(f"{value:.{digits}g}")


def measure_seconds(run: Callable[[], object], *, num_warmups: int, num_runs: int) -> list[float]:
    """Wall seconds of each of `num_runs` calls, after `num_warmups` calls that are not counted."""
    for _ in range(num_warmups):
        run()
    seconds = []
    for _ in range(num_runs):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds


# -- how quiet the machine is ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """Seconds since some moment: by the wall, and of CPU time of the machine, stolen by the hypervisor, and of ours."""

    wall: float
    busy: float
    stolen: float
    own: float

    @classmethod
    def now(cls) -> "CpuSeconds":
        """Read the first line of /proc/stat, and the times of this process and of its children that have ended."""
        words = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
        user, nice, system, _idle, _iowait, irq, softirq, stolen = (int(w) / os.sysconf("SC_CLK_TCK") for w in words)
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return cls(wall=time.perf_counter(), busy=user + nice + system + irq + softirq, stolen=stolen, own=own)


@dataclass(slots=True)
class Others:
    """Cores that were not ours during a section: other processes, and time the hypervisor gave to other machines."""

    busy_cores: float = 0.0
    stolen_cores: float = 0.0

    def set_from(self, start: CpuSeconds, end: CpuSeconds) -> None:
        """What others had between two readings; to 0.001, the clock tick being 0.01 s."""
        wall = max(end.wall - start.wall, 1e-9)
        self.busy_cores = round(max(0.0, (end.busy - start.busy) - (end.own - start.own)) / wall, 3)
        self.stolen_cores = round(max(0.0, end.stolen - start.stolen) / wall, 3)


@contextlib.contextmanager
def watch_others() -> Iterator[Others]:
    """Measure how busy all processes but this one are; the values are there after the section.

    A child counts as ours only if it ends within the section.
    """
    others, start = Others(), CpuSeconds.now()
    yield others
    others.set_from(start, CpuSeconds.now())


def wait_until_quiet(*, longest_s: float, sample_s: float = 2.0) -> float:
    """Wait until others use less than `QUIET_CORES`, at most about `longest_s` seconds.

    Returns:
        The cores that others used in the last sample.
    """
    end = time.monotonic() + longest_s
    while True:
        with watch_others() as others:
            time.sleep(sample_s)
        if others.busy_cores < QUIET_CORES or time.monotonic() >= end:
            return others.busy_cores


# -- what memory can deliver -------------------------------------------------------------------------------------------


def read_bandwidth(*, num_threads: int, num_bytes: int, num_runs: int = 7) -> Quantiles:
    """Bytes/s at which `num_threads` threads read a buffer that no cache holds (torch's sum over fp32).

    Cost: allocates and touches `num_bytes`; changes torch's thread count for this process.
    """
    import torch  # not at the top: those who only write records need no torch

    torch.set_num_threads(num_threads)
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32)
    seconds = measure_seconds(buffer.sum, num_warmups=2, num_runs=num_runs)
    return Quantiles.of([buffer.nbytes / s for s in seconds])


def probe_bytes() -> int:
    """Size of the buffer for `read_bandwidth`: 16 times the last-level cache, within 256 MiB … 4 GiB and a quarter of
    the free memory."""
    wanted = min(max(16 * last_level_cache_bytes(), 256 * 2**20), 4 * 2**30)
    return min(wanted, read_memory().usable_bytes // 4)


def last_level_cache_bytes() -> int:
    """Largest cache that the operating system names for core 0, in bytes; 0 if it names none."""
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) * 1024 for size in sizes), default=0)


# -- where and with what -----------------------------------------------------------------------------------------------


def environment() -> dict[str, object]:
    """The record's opening: commit, whether sources differ from it (None: no git), date (UTC), machine, versions."""
    changes = _git("status", "--porcelain", "--", ".", ":!bench/results")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "is_dirty": None if changes is None else bool(changes),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: package_version(name) for name in PACKAGES}},
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


def _git(*arguments: str) -> str | None:
    """Output of a git command in the repository; None outside of one or without git."""
    if shutil.which("git") is None:
        return None
    answer = subprocess.run(["git", *arguments], cwd=REPO, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


# -- the record --------------------------------------------------------------------------------------------------------


def append_record(path: Path, record: Mapping[str, object]) -> str:
    """Append one JSON line to a file that only ever grows, and return the line.

    Raises:
        ValueError: the record holds a value that is not finite or not JSON.
    """
    line = json.dumps(record, allow_nan=False, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    return line

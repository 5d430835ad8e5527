"""`Topology`: the processor, the cores that this process may use and the NUMA nodes, read from /proc and /sys.

Reads what the system says and measures nothing. GPUs belong to the data plane (`ambidex.runner.device`).
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path

from ambidex.core.errors import ConfigError, MachineError
from ambidex.hw.cgroup import find_cpu_quota
from ambidex.hw.memory import kib_to_bytes, read_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node; `cores` are the numbers of its cores, `memory_bytes` is all its memory."""

    node_id: int
    cores: tuple[int, ...]
    memory_bytes: int

    @property
    def is_memory_only(self) -> bool:
        """Memory without cores, as CXL memory shows itself."""
        return not self.cores and self.memory_bytes > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """What computes here.

    `online_cores` are the machine's logical cores, `allowed_cores` those of this process's affinity mask, `cpu_quota`
    is its control group's share of CPU time in cores (None: no quota).
    """

    cpu_model: str
    cpu_flags: frozenset[str]
    online_cores: tuple[int, ...]
    allowed_cores: tuple[int, ...]
    cpu_quota: float | None
    numa_nodes: tuple[NumaNode, ...]

    @property
    def num_usable_cores(self) -> int:
        """Threads that can run at once: allowed cores, but no more than the whole cores of the quota; at least 1."""
        quota = len(self.allowed_cores) if self.cpu_quota is None else int(self.cpu_quota)
        return max(1, min(len(self.allowed_cores), quota))

    @property
    def max_threads(self) -> int:
        """More threads than this wait for each other: allowed cores, at most the quota, a part of a core counted."""
        quota = len(self.allowed_cores) if self.cpu_quota is None else math.ceil(self.cpu_quota)
        return max(1, min(len(self.allowed_cores), quota))


def read_topology(root: Path = Path("/")) -> Topology:
    """Read the machine.

    Args:
        root: where `/proc` and `/sys` lie.
    Raises:
        MachineError: there is no `/proc`: this is not Linux.
    """
    status = root / "proc/self/status"
    cpu = read_fields(root / "proc/cpuinfo")
    if not status.is_file():
        raise MachineError(f"{status} does not exist: Ambidex runs on Linux with /proc mounted")
    allowed = parse_cores(read_fields(status)["Cpus_allowed_list"])
    online = _read_cores(root / "sys/devices/system/cpu/online") or allowed
    return Topology(
        cpu_model=cpu.get("model name", cpu.get("CPU part", "unknown")),
        cpu_flags=frozenset(cpu.get("flags", cpu.get("Features", "")).split()),
        online_cores=online,
        allowed_cores=tuple(core for core in allowed if core in set(online)),
        cpu_quota=find_cpu_quota(root),
        numa_nodes=_read_numa_nodes(root, online),
    )


def check_num_threads(num_threads: int) -> None:
    """See whether so many threads can run at once.

    Raises:
        ConfigError: this process may not use as many processors; threads that share one wait for each other in every
            op, thousands of them for minutes.
    """
    most = read_topology().max_threads
    if num_threads > most:
        processors = "1 processor" if most == 1 else f"{most} processors"
        raise ConfigError(
            f"`num_threads` is {num_threads}: this process may use {processors} (affinity mask and CPU quota): ask for "
            f"at most {most}, or leave it out"
        )


def last_level_cache_bytes() -> int:
    """Largest cache that the operating system names for core 0, in bytes; 0 if it names none."""
    sizes = [p.read_text().strip() for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size.removesuffix("K")) * 1024 for size in sizes), default=0)


def parse_cores(text: str) -> tuple[int, ...]:
    """`0-2,8` → (0, 1, 2, 8); empty text → ()."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return tuple(cores)


def _read_cores(path: Path) -> tuple[int, ...]:
    return parse_cores(path.read_text()) if path.is_file() else ()


def _read_numa_nodes(root: Path, online: tuple[int, ...]) -> tuple[NumaNode, ...]:
    """Nodes in order of their numbers; a kernel without NUMA is one node."""
    folder = root / "sys/devices/system/node"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    ids = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"node(\d+)", name)))
    if not ids:
        return (
            NumaNode(
                node_id=0, cores=online, memory_bytes=kib_to_bytes(read_fields(root / "proc/meminfo")["MemTotal"])
            ),
        )
    return tuple(
        NumaNode(
            node_id=node_id,
            cores=_read_cores(folder / f"node{node_id}/cpulist"),
            memory_bytes=kib_to_bytes(read_fields(folder / f"node{node_id}/meminfo")[f"Node {node_id} MemTotal"]),
        )
        for node_id in ids
    )

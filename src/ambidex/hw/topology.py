"""`Topology`: the processor, the cores that this process may use and the NUMA nodes, read from /proc and /sys.

Reads what the system says and measures nothing. GPUs belong to the data plane (`ambidex.runner.device`).
"""

import math
from dataclasses import dataclass
from pathlib import Path

from ambidex.core.errors import ConfigError, MachineError
from ambidex.hw.cgroup import find_cpu_quota
from ambidex.hw.memory import read_fields
from ambidex.hw.numa import NumaNode, find_local_node, parse_list, read_list, read_nodes


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
    def local_node(self) -> NumaNode | None:
        """The node on which most of this process's cores are; None: no node names any of them."""
        return find_local_node(self.numa_nodes, self.allowed_cores)

    @property
    def cxl_nodes(self) -> tuple[NumaNode, ...]:
        """Memory-only nodes on which this process may allocate, the nearest first, then the one with most free."""
        local = self.local_node
        distances = {} if local is None else local.distances
        found = [node for node in self.numa_nodes if node.is_memory_only and node.is_allowed]
        far = max(distances.values(), default=0)
        return tuple(sorted(found, key=lambda node: (distances.get(node.node_id, far), -node.free_bytes, node.node_id)))

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
        MachineError: there is no `/proc`: this is not Linux; or what /proc and /sys say is malformed.
    """
    status = root / "proc/self/status"
    cpu = read_fields(root / "proc/cpuinfo")
    if not status.is_file():
        raise MachineError(f"{status} does not exist: Ambidex runs on Linux with /proc mounted")
    listed = read_fields(status).get("Cpus_allowed_list")
    if listed is None:
        raise MachineError(f"{status} has no line Cpus_allowed_list: it says which cores may be used; is it Linux's?")
    allowed = parse_list(listed, f"Cpus_allowed_list of {status}")
    online = read_list(root / "sys/devices/system/cpu/online") or allowed
    return Topology(
        cpu_model=cpu.get("model name", cpu.get("CPU part", "unknown")),
        cpu_flags=frozenset(cpu.get("flags", cpu.get("Features", "")).split()),
        online_cores=online,
        allowed_cores=tuple(core for core in allowed if core in set(online)),
        cpu_quota=find_cpu_quota(root),
        numa_nodes=read_nodes(root, online),
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

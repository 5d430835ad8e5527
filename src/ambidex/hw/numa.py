"""NUMA nodes as the system names them: their cores, memory and distances, and on which this process may allocate.

Reads /proc and /sys and measures nothing. A node with memory and without cores is how CXL memory shows itself.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ambidex.core.errors import MachineError
from ambidex.hw.memory import kib_to_bytes, read_fields

MAX_LIST: Final = 1 << 16
"""Numbers that a list of cores or nodes may have: many times what Linux is built for (8192 and 1024)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One NUMA node.

    `cores` are the numbers of its online cores, `offline_cores` of those that are named but offline. `memory_bytes` is
    all its memory, `free_bytes` what was free when it was read. `distances` to nodes, 10 is its own; firmware makes
    them up, so they order nodes and measure nothing. `is_allowed`: this process's cpuset lets it allocate there.
    """

    node_id: int
    cores: tuple[int, ...]
    memory_bytes: int
    free_bytes: int = 0
    offline_cores: tuple[int, ...] = ()
    distances: Mapping[int, int] = field(default_factory=dict)
    is_allowed: bool = True

    @property
    def is_memory_only(self) -> bool:
        """Memory without cores, as CXL memory shows itself; a node whose cores are offline is none."""
        return not self.cores and not self.offline_cores and self.memory_bytes > 0


def read_nodes(root: Path, online_cores: Sequence[int]) -> tuple[NumaNode, ...]:
    """Nodes in order of their numbers; a kernel without NUMA is one node.

    Args:
        root: where `/proc` and `/sys` lie.
        online_cores: of the machine.
    Raises:
        MachineError: what the system says is malformed, or a node went while it was read.
    """
    folder = root / "sys/devices/system/node"
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    ids = sorted(int(match[1]) for name in names if (match := re.fullmatch(r"node(\d+)", name)))
    if not ids:
        fields = read_fields(root / "proc/meminfo")
        path = root / "proc/meminfo"
        return (
            NumaNode(
                node_id=0,
                cores=tuple(online_cores),
                memory_bytes=_memory(fields, "MemTotal", path),
                free_bytes=_memory(fields, "MemFree", path, missing=0),
            ),
        )
    allowed = _read_allowed_nodes(root)
    online = read_list(folder / "online") or tuple(ids)
    is_online = frozenset(online_cores)
    return tuple(
        _read_node(folder, node_id, is_online, online, is_allowed=allowed is None or node_id in allowed)
        for node_id in ids
    )


def find_local_node(nodes: Iterable[NumaNode], allowed_cores: Iterable[int]) -> NumaNode | None:
    """The node with most of the cores that this process may use; None: no node has any."""
    usable = frozenset(allowed_cores)
    with_cores = [node for node in nodes if usable.intersection(node.cores)]
    return max(with_cores, key=lambda node: (len(usable.intersection(node.cores)), -node.node_id), default=None)


def parse_list(text: str, where: str = "the list") -> tuple[int, ...]:
    """`0-2,8` → (0, 1, 2, 8), ascending; empty text → ().

    Raises:
        MachineError: it is no such list; `where` names it.
    """
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first >= MAX_LIST:
            raise MachineError(
                f"{where} says {text.strip()[:60]!r}: expected numbers and ranges such as 0-3,8; is /sys the system's?"
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


def read_list(path: Path) -> tuple[int, ...]:
    """The numbers in a file of /sys; () if it is not there.

    Raises:
        MachineError: it holds something else, or cannot be read.
    """
    return parse_list(_read(path), str(path)) if path.is_file() else ()


def _read_node(
    folder: Path, node_id: int, is_online: frozenset[int], online_nodes: Sequence[int], *, is_allowed: bool
) -> NumaNode:
    path = folder / f"node{node_id}/meminfo"
    _read(path)  # names it if it cannot be read
    fields = {name.removeprefix(f"Node {node_id} "): value for name, value in read_fields(path).items()}
    listed = read_list(folder / f"node{node_id}/cpulist")
    return NumaNode(
        node_id=node_id,
        cores=tuple(core for core in listed if core in is_online),
        offline_cores=tuple(core for core in listed if core not in is_online),
        memory_bytes=_memory(fields, "MemTotal", path),
        free_bytes=_memory(fields, "MemFree", path, missing=0),
        distances=_read_distances(folder / f"node{node_id}/distance", online_nodes),
        is_allowed=is_allowed,
    )


def _read_distances(path: Path, online_nodes: Sequence[int]) -> dict[int, int]:
    """One number for each online node, in their order; none if the kernel names none."""
    if not path.is_file():
        return {}
    words = _read(path).split()
    if len(words) != len(online_nodes) or not all(re.fullmatch(r"\d{1,9}", word) for word in words):
        raise MachineError(
            f"{path} says {' '.join(words)[:60]!r}: expected {len(online_nodes)} numbers, one for each online node"
        )
    return dict(zip(online_nodes, map(int, words), strict=True))


def _read_allowed_nodes(root: Path) -> frozenset[int] | None:
    """Nodes of this process's cpuset; None: the kernel names none."""
    text = read_fields(root / "proc/self/status").get("Mems_allowed_list")
    return None if text is None else frozenset(parse_list(text, "Mems_allowed_list of /proc/self/status"))


def _memory(fields: Mapping[str, str], name: str, path: Path, *, missing: int | None = None) -> int:
    if name not in fields and missing is not None:
        return missing
    text = fields.get(name)
    if text is None or not re.fullmatch(r"\d{1,15} kB", text):
        found = "is missing" if text is None else f"is {text[:60]!r}"
        raise MachineError(f"{path}: {name} {found}: expected a size such as '1024 kB'; is /sys the system's?")
    return kib_to_bytes(text)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        raise MachineError(
            f"{path} cannot be read: {error.strerror}: a node of memory is incomplete, or went while it was looked at; "
            f"try again"
        ) from error

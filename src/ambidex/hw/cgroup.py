"""What the control groups of this process allow: the tightest CPU quota and memory limit from its group up to the root.

Both forms are read. Version 1 has a tree for each controller, version 2 has one for all; a machine may mount both:

    /proc/self/cgroup       4:memory:/jobs/a          0::/jobs/a
    /proc/self/mountinfo    … /sys/fs/cgroup/memory   … /sys/fs/cgroup

A group that is not visible here (a container without its own namespace of groups) is looked for at its mount point.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

UNLIMITED_V1: Final = 1 << 62
"""Version 1 says "no limit" with the largest page-aligned int64; no machine has this much memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """A limit in force: its bytes, what its group uses of them (file pages that can be dropped left out), its file."""

    limit_bytes: int
    used_bytes: int
    path: Path

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be taken."""
        return max(0, self.limit_bytes - self.used_bytes)


def find_cpu_quota(root: Path) -> float | None:
    """Cores' worth of CPU time that the process may use, e.g. 1.5, or None without a quota.

    Args:
        root: where `/proc` and `/sys` lie.
    """
    v1 = [_quota(_words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us"))
          for group in _groups(root, "cpu")]  # fmt: skip
    v2 = [_quota(_words(group / "cpu.max")) for group in _groups(root, None)]
    return min((quota for quota in v1 + v2 if quota is not None), default=None)


def find_memory_limit(root: Path) -> MemoryLimit | None:
    """The limit with the fewest bytes free, or None without a limit.

    Args:
        root: where `/proc` and `/sys` lie.
    """
    limits = [
        limit
        for controller, files in (("memory", _MEMORY_V1), (None, _MEMORY_V2))
        for group in _groups(root, controller)
        if (limit := _memory_limit(group, files)) is not None
    ]
    return min(limits, key=lambda limit: (limit.free_bytes, limit.limit_bytes), default=None)


@dataclass(frozen=True, slots=True)
class _MemoryFiles:
    limit: str
    usage: str
    inactive_file: str


_MEMORY_V1: Final = _MemoryFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_MEMORY_V2: Final = _MemoryFiles("memory.max", "memory.current", "inactive_file")


def _memory_limit(group: Path, files: _MemoryFiles) -> MemoryLimit | None:
    limit = _words(group / files.limit)
    if not limit or not limit[0].isdecimal() or int(limit[0]) >= UNLIMITED_V1:
        return None
    usage = _words(group / files.usage)
    stat = _words(group / "memory.stat")
    inactive = next((int(stat[i + 1]) for i in range(0, len(stat) - 1, 2) if stat[i] == files.inactive_file), 0)
    used = int(usage[0]) if usage else 0
    return MemoryLimit(limit_bytes=int(limit[0]), used_bytes=max(0, used - inactive), path=group / files.limit)


def _quota(words: list[str]) -> float | None:
    """`quota period` in microseconds → cores; "max" and -1 are no quota."""
    if len(words) != 2 or not words[0].isdecimal():
        return None
    return int(words[0]) / int(words[1])


def _groups(root: Path, controller: str | None) -> tuple[Path, ...]:
    """Folders of the process's group and of all above it; `controller` None is version 2."""
    group, mount = _group_path(root, controller), _find_mount(root, controller)
    if group is None or mount is None:
        return ()
    mounted_group, mount_point = mount
    top = root / mount_point.lstrip("/")
    inside = top / group.removeprefix(mounted_group.rstrip("/")).strip("/")
    folder = inside if inside.is_dir() else top
    return (folder, *(parent for parent in folder.parents if parent.is_relative_to(top)))


def _group_path(root: Path, controller: str | None) -> str | None:
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "" if controller is None else controller in controllers.split(","):
            return path
    return None


def _find_mount(root: Path, controller: str | None) -> tuple[str, str] | None:
    """(group at the mount point, mount point) of the tree that holds the controller."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        kind, _, options = file_system.split()[:3]
        if kind == "cgroup2" if controller is None else kind == "cgroup" and controller in options.split(","):
            _, _, _, mounted_group, mount_point, *_ = mount.split()
            return mounted_group, mount_point
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:  # a kernel without this file has no such limit
        return []


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()

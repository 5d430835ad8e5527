"""`MemoryInfo`: how much DRAM this process may use now, by the machine and by its control group."""

from dataclasses import dataclass
from pathlib import Path

from ambidex.core.errors import MachineError
from ambidex.hw.cgroup import MemoryLimit, find_memory_limit


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInfo:
    """DRAM at the moment of reading, in bytes.

    `available_bytes` is the kernel's estimate for the whole machine; `limit` is the control group's, None without one.
    """

    total_bytes: int
    available_bytes: int
    limit: MemoryLimit | None

    @property
    def usable_bytes(self) -> int:
        """Bytes that this process can still take without swapping or being killed."""
        return self.available_bytes if self.limit is None else min(self.available_bytes, self.limit.free_bytes)


def read_memory(root: Path = Path("/")) -> MemoryInfo:
    """Read the machine's memory and the limit on this process.

    Args:
        root: where `/proc` and `/sys` lie.
    Raises:
        MachineError: there is no `/proc/meminfo`: this is not Linux.
    """
    path = root / "proc/meminfo"
    if not path.is_file():
        raise MachineError(f"{path} does not exist: Ambidex runs on Linux with /proc mounted")
    fields = read_fields(path)
    return MemoryInfo(
        total_bytes=kib_to_bytes(fields["MemTotal"]),
        available_bytes=kib_to_bytes(fields.get("MemAvailable", fields["MemFree"])),
        limit=find_memory_limit(root),
    )


def read_fields(path: Path) -> dict[str, str]:
    """`name : value` lines of a file of /proc or /sys; of repeated names the first; empty if the file is not there."""
    if not path.is_file():
        return {}
    fields: dict[str, str] = {}
    for line in path.read_text(errors="replace").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def kib_to_bytes(text: str) -> int:
    """`24684096 kB` → bytes; the kernel writes kB and means KiB."""
    return int(text.split()[0]) * 1024

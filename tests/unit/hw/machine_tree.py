"""Writes the files of /proc and /sys that describe a machine under a folder."""

from collections.abc import Mapping
from pathlib import Path

V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU_MOUNT = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"
V2_MOUNT = "41 31 0:38 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"
GIB = 1024**3


def write_machine(root: Path, files: Mapping[str, str] | None = None) -> Path:
    """A machine of 4 cores and 8 GiB without groups; `files` adds to or replaces what is written."""
    base = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Test CPU 9000\nflags\t\t: fpu avx2 fma\n\n"
        "processor\t: 1\nmodel name\t: Test CPU 9000\nflags\t\t: fpu\n",
        "proc/meminfo": "MemTotal:        8388608 kB\nMemFree:         1048576 kB\nMemAvailable:    6291456 kB\n",
        "proc/self/status": "Name:\tpython\nCpus_allowed:\tf\nCpus_allowed_list:\t0-3\n",
        "proc/self/cgroup": "",
        "proc/self/mountinfo": "",
        "sys/devices/system/cpu/online": "0-3\n",
    }
    for name, text in {**base, **(files or {})}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root

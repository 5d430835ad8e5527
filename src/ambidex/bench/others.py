"""How busy other processes are while something is measured."""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

QUIET_CORES: Final = 0.15
"""Others below this many cores count as quiet: with 2 cores it bounds their effect to about 8 %, half of the 15 % by
which the clock of the shared machines moves anyway (research/packages.md, opening)."""


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

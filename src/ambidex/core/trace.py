"""`Tracer`: who is told what the engine did and when. It is passed to those who do it; `NullTracer` is the silent twin.

Times are of `time.perf_counter_ns`.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Protocol


class Track(StrEnum):
    """A line of the timeline. `STEPS` and `CPU_LANE` are host time, `GPU` is time of a CUDA device."""

    STEPS = "steps"
    GPU_LANE = "accelerator lane"
    CPU_LANE = "CPU lane"
    COPIES = "copies"
    GPU = "GPU"


class Tracer(Protocol):
    """Takes spans and counters; spans of one track are nested or apart."""

    @property
    def is_on(self) -> bool:
        """Someone keeps what is said. What happens in every layer is only said by objects that are made if so."""
        ...

    def add_span(
        self, track: Track, name: str, start_ns: int, end_ns: int, args: Mapping[str, int | str] | None = None
    ) -> None:
        """Something took from `start_ns` to `end_ns`."""
        ...

    def add_counters(self, name: str, at_ns: int, values: Mapping[str, int]) -> None:
        """Values that hold from now on, drawn as one chart."""
        ...

    def flush(self) -> None:
        """A step is over: what was said since the last time is kept for good."""
        ...


class NullTracer:
    """Keeps nothing."""

    is_on = False

    def add_span(
        self, track: Track, name: str, start_ns: int, end_ns: int, args: Mapping[str, int | str] | None = None
    ) -> None:
        """Nothing."""

    def add_counters(self, name: str, at_ns: int, values: Mapping[str, int]) -> None:
        """Nothing."""

    def flush(self) -> None:
        """Nothing."""

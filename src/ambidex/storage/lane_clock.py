"""`LaneClock`: for how long each lane of a decode step was busy, for who decides what lies where.

    accelerator   the whole step, less the spans in which it waits for the CPU's answers and for weights on their way
    CPU           what the CPU lane computes, without its waits
    link          the copies of weights

On a GPU a span is a pair of events. Inside a captured step they are nodes of its graph, which each replay sets anew.
They cost time, so nobody measures unless somebody asks.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import StrEnum
from typing import Protocol

import torch

from ambidex.core.ids import Lane


class Part(StrEnum):
    """What a span is of."""

    STEP = "step"
    IDLE = "idle"
    COPY = "copy"


class _Span(Protocol):
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def seconds(self) -> float: ...


class _HostSpan:
    """Of the calling thread."""

    def __init__(self) -> None:
        self._begin = self._end = 0.0

    def begin(self) -> None:
        self._begin = time.perf_counter()

    def end(self) -> None:
        self._end = time.perf_counter()

    def seconds(self) -> float:
        return self._end - self._begin


class _DeviceSpan:
    """Of the stream that is current at its begin and end."""

    def __init__(self) -> None:
        self._events = [
            torch.cuda.Event(enable_timing=True, external=True)  # type: ignore[no-untyped-call]  # torch has no types here
            for _ in range(2)
        ]

    def begin(self) -> None:
        self._events[0].record()

    def end(self) -> None:
        self._events[1].record()

    def seconds(self) -> float:
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) / 1e3


class RunTimer:
    """Times steps from their launch to their end on the accelerator, without waiting for them.

    The time of a step may be taken until the next but one is timed.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self.newest, self._other = TimedRun(device), TimedRun(device)

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time what is launched inside, in the current stream: `newest` from now on."""
        self.newest, self._other = self._other, self.newest
        with self.newest.timing():
            yield


class TimedRun:
    """One step of `RunTimer`."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._events = [
            torch.cuda.Event(enable_timing=True) if is_cuda else None  # type: ignore[no-untyped-call]  # torch has no types here
            for _ in range(2)
        ]
        self._times = [0.0, 0.0]
        self._is_set = False

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time what is launched inside."""
        self._is_set = False
        self._mark(0)
        yield
        self._mark(1)
        self._is_set = True

    def take(self) -> float | None:
        """Its seconds, once; None: it was not timed, or has not ended."""
        begin, end = self._events
        if not self._is_set or (end is not None and not end.query()):  # type: ignore[no-untyped-call]  # likewise
            return None
        self._is_set = False
        if begin is None or end is None:
            return self._times[1] - self._times[0]
        return float(begin.elapsed_time(end)) / 1e3

    def _mark(self, index: int) -> None:
        event = self._events[index]
        if event is None:
            self._times[index] = time.perf_counter()
        else:
            event.record()


class StepTimes:
    """The spans of one form of a step; each run of it sets them anew.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._spans: dict[Part, list[_Span]] = {part: [] for part in Part}
        self.cpu_s = 0.0

    @contextmanager
    def span(self, part: Part) -> Iterator[None]:
        """Time the block: what runs or is launched inside."""
        span: _Span = _DeviceSpan() if self._is_cuda else _HostSpan()
        self._spans[part].append(span)
        span.begin()
        try:
            yield
        finally:
            span.end()

    def read(self) -> dict[Lane, float]:
        """Busy seconds of each lane in the last run, of those that were timed; waits for its end."""
        sums = {part: sum(span.seconds() for span in spans) for part, spans in self._spans.items()}
        if not self._is_cuda:  # copies are made where they stand, in the accelerator's own thread
            sums[Part.STEP] -= sums[Part.COPY]
        gpu_s = max(0.0, sums[Part.STEP] - sums[Part.IDLE])
        return {Lane.GPU: gpu_s, Lane.STREAM: sums[Part.COPY], Lane.CPU: self.cpu_s}


class LaneClock:
    """Who times spans asks here; without a step that is timed nothing is."""

    def __init__(self) -> None:
        self._times: StepTimes | None = None

    @contextmanager
    def timing(self, times: StepTimes) -> Iterator[None]:
        """Add the spans of the block to `times`."""
        self._times = times
        try:
            yield
        finally:
            self._times = None

    def span(self, part: Part) -> AbstractContextManager[None]:
        """Time the block, if it is part of a step that is timed."""
        return nullcontext() if self._times is None else self._times.span(part)

    def start_cpu(self, times: StepTimes | None) -> None:
        """A step begins in which the CPU lane's seconds count for `times`."""
        self._cpu = times
        if times is not None:
            times.cpu_s = 0.0

    def add_cpu(self, seconds: float) -> None:
        """The CPU lane has computed for so long."""
        if self._cpu is not None:
            self._cpu.cpu_s += seconds

    _cpu: StepTimes | None = None

"""Lanes that say when they worked. They stand in for the plain ones only when a tracer keeps what it is told, so that
without one no line of this runs."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ambidex.attention.cpu import CPULane, PendingState
from ambidex.attention.metadata import OldKeys
from ambidex.attention.readers import Prepared, Reader
from ambidex.attention.state import AttentionState
from ambidex.core.trace import Tracer, Track


class HostClock:
    """Spans by the host's clock: right for a CPU, whose ops end when they return."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def begin_step(self) -> None:
        """Nothing to do."""

    @contextmanager
    def measure(self, track: Track, name: str) -> Iterator[None]:
        """Tell how long the section took."""
        start_ns = time.perf_counter_ns()
        yield
        self._tracer.add_span(track, name, start_ns, time.perf_counter_ns())

    def end_step(self) -> None:
        """Nothing to do."""


class CudaClock(HostClock):
    """Spans of a CUDA device: events around what is launched, read after the step and set on the host's clock.

    Both clocks are joined at the beginning of each step, with an error of some 10 µs.
    """

    def __init__(self, tracer: Tracer, device: torch.device) -> None:
        super().__init__(tracer)
        self._device = device
        self._spans: list[tuple[Track, str, torch.cuda.Event, torch.cuda.Event]] = []

    def begin_step(self) -> None:
        """Join the clocks. Cost: waits for the device."""
        self._spans.clear()
        torch.cuda.synchronize(self._device)
        self._zero = self._mark()
        self._zero.synchronize()
        self._zero_ns = time.perf_counter_ns()

    @contextmanager
    def measure(self, track: Track, name: str) -> Iterator[None]:
        """Tell how long what the section launches took; nothing of a section that is being captured."""
        if torch.cuda.is_current_stream_capturing():
            yield
            return
        start = self._mark()
        yield
        self._spans.append((track, name, start, self._mark()))

    def end_step(self) -> None:
        """Read the events and tell them. Cost: waits for the device."""
        torch.cuda.synchronize(self._device)
        for track, name, start, end in self._spans:
            start_ns, end_ns = (self._zero_ns + int(self._zero.elapsed_time(event) * 1e6) for event in (start, end))
            self._tracer.add_span(track, name, start_ns, end_ns)
        self._spans.clear()

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
        torch.cuda.current_stream(self._device).record_event(event)
        return event


class TracedReader:
    """Another reader, whose attention is told as a span for each layer."""

    def __init__(self, reader: Reader, clock: HostClock, track: Track) -> None:
        self._reader = reader
        self._clock = clock
        self._track = track
        self.reads_own = reader.reads_own

    def prepare(self, parts: Sequence[OldKeys], num_tokens: int) -> Prepared:
        """As the other one."""
        return _TracedPrepared(self._reader.prepare(parts, num_tokens), self._clock, self._track)


class _TracedPrepared:
    def __init__(self, prepared: Prepared, clock: HostClock, track: Track) -> None:
        self._prepared = prepared
        self._clock = clock
        self._track = track

    def attend(self, layer_idx: int, q: Tensor) -> AttentionState:
        """As the other one."""
        with self._clock.measure(self._track, f"attend layer {layer_idx}"):
            return self._prepared.attend(layer_idx, q)


class TracedCPULane(CPULane):
    """The CPU lane; `layer N` is told from where its answer is asked for, so it holds the wait for q, the attention
    (a span of its own within it) and the answer's way back."""

    def __init__(self, clock: HostClock) -> None:
        self._clock = clock

    def begin(self, layer_idx: int, q: Tensor, prepared: Prepared) -> PendingState:
        """As the plain one."""
        return _TracedPending(prepared, layer_idx, q, self._clock)


class _TracedPending(PendingState):
    def __init__(self, prepared: Prepared, layer_idx: int, q: Tensor, clock: HostClock) -> None:
        super().__init__(prepared, layer_idx, q)
        self._clock = clock
        self._name = f"layer {layer_idx}"

    def wait(self) -> AttentionState:
        """As the plain one."""
        with self._clock.measure(Track.CPU_LANE, self._name):
            return super().wait()

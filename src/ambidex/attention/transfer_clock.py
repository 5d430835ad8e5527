"""`TransferClock`: how long a step's copies over the link take."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch

_NOTHING: Final[AbstractContextManager[None]] = nullcontext()


class TransferClock:
    """Seconds of copies in a step; on CUDA by events, which are read when they are asked for.

    Args:
        is_on: else nothing is measured.
    """

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        self._device = device
        self._is_on = is_on
        self.begin()

    def begin(self) -> None:
        """Start anew."""
        self._host_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def measure(self) -> AbstractContextManager[None]:
        """Book what runs inside."""
        return self._measured() if self._is_on else _NOTHING

    def seconds(self) -> float:
        """Of all; waits for the last of them."""
        if self._events:
            self._events[-1][1].synchronize()
        return self._host_s + sum(float(start.elapsed_time(end)) for start, end in self._events) / 1e3

    @contextmanager
    def _measured(self) -> Iterator[None]:
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record(stream)
            yield
            end.record(stream)
            self._events.append((start, end))
        else:
            begin = time.perf_counter()
            yield
            self._host_s += time.perf_counter() - begin

"""`SideStream`: work beside what the current stream computes. On a CPU everything runs at once, and nothing waits."""

from contextlib import AbstractContextManager, nullcontext

import torch


class SideStream:
    """A stream of one device.

    Args:
        device: with CUDA the work runs beside that of the current stream, in the order in which it was given.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here

    @property
    def handle(self) -> int | None:
        """For calls of the driver; None: it is the CPU's."""
        return None if self._stream is None else int(self._stream.cuda_stream)

    def active(self) -> AbstractContextManager[object]:
        """What is launched inside runs on this stream.

        NOTE: memory of the current stream that is read there must live until the current stream has joined.
        """
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait_for_current(self) -> None:
        """What is launched here from now on comes behind all that the current stream was given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def join_current(self) -> None:
        """What the current stream is given from now on comes behind all that was launched here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def wait_here(self) -> None:
        """Wait in the calling thread for all that was launched here.

        Raises:
            RuntimeError: torch's, of a device that failed.
        """
        if self._stream is not None:
            self._stream.synchronize()


class Mark:
    """A point in a stream's work that another stream waits for; it may be set again and again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here

    def set(self) -> None:
        """All that the current stream was given so far."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """What the current stream is given from now on comes behind the mark; nothing happens if it was never set."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def is_reached(self) -> bool:
        """Whether all before the mark is done; also if it was never set."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]  # torch has no types here

"""Streams of a CPU that come late: a thread does what a CUDA stream would, in its order, each piece after a delay.

The thread of the test is the current stream, whose work is done when it returns. What the engine gives to a side stream
(rows that are written into DRAM, blocks that are copied for the stream lane) is done by another thread, so what is read
before it was waited for is read too early.

Streams of a GPU come late by kernels that sleep on them (`late_gpu_streams`).
"""

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Final

import pytest
import torch
from torch import Tensor

from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import Forward, call_model
from ambidex.storage.side_stream import SideStream
from ambidex.storage.tile_ring import TileRing
from ambidex.storage.tiled_pool import TiledKVPool
from ambidex.storage.weight_ring import WeightRing

WAIT_S: Final = 60.0
DELAYS_S: Final = (0.0, 0.0, 0.0002, 0.002)


class LateStream:
    """Stands in for `storage.side_stream.SideStream`."""

    rng: ClassVar[random.Random] = random.Random(0)
    is_ordered: ClassVar[bool] = True
    active_stream: ClassVar["LateStream | None"] = None
    threads: ClassVar[list["LateStream"]] = []

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.may_begin = threading.Event()
        """Where nobody waits for anybody: set at the end, so that all is late on any machine."""
        self._thread = threading.Thread(target=self._run, name="late-stream", daemon=True)
        self._thread.start()
        self.threads.append(self)

    @contextmanager
    def active(self) -> Iterator[None]:
        LateStream.active_stream = self
        try:
            yield
        finally:
            LateStream.active_stream = None

    def wait_for_current(self) -> None:
        """The current stream's work is done already."""

    def join_current(self) -> None:
        done = threading.Event()
        self.launch(done.set)
        if self.is_ordered:
            wait(done)

    def launch(self, work: Callable[[], None]) -> None:
        """Do work behind what was given before."""
        self._work.put(work)

    def stop(self) -> None:
        """End the thread once all is done."""
        self.may_begin.set()
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        assert self.is_ordered or self.may_begin.wait(WAIT_S)
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                work()


class LateMark:
    """Stands in for `storage.side_stream.Mark`."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == "cpu"
        self._event: threading.Event | None = None

    def set(self) -> None:
        event = self._event = threading.Event()
        launch(event.set)

    def wait(self) -> None:
        if self._event is not None and LateStream.is_ordered:
            event = self._event
            launch(lambda: wait(event))


def launch(work: Callable[[], None]) -> None:
    """Give work to the stream that is active; without one it is done at once."""
    if LateStream.active_stream is None:
        work()
    else:
        LateStream.active_stream.launch(work)


def wait(event: threading.Event) -> None:
    assert event.wait(WAIT_S), "a stream waits for what never comes"


@contextmanager
def late_streams(seed: int, *, is_ordered: bool = True) -> Iterator[None]:
    """Side streams of engines that are built and run inside come late.

    Args:
        seed: of the delays.
        is_ordered: False: nobody waits for anybody, which tests must notice.
    """
    LateStream.rng, LateStream.is_ordered = random.Random(seed), is_ordered
    with pytest.MonkeyPatch.context() as patch:
        for module in ("tile_ring", "tile_writer", "weight_ring"):
            patch.setattr(f"ambidex.storage.{module}.SideStream", LateStream)
        patch.setattr("ambidex.storage.tile_ring.Mark", LateMark)
        patch.setattr("ambidex.storage.weight_ring.Mark", LateMark)
        patch.setattr(WeightRing, "_copy", _late(WeightRing._copy))
        patch.setattr(TileRing, "_copy", _late(TileRing._copy))
        patch.setattr(TiledKVPool, "write_rows", _late(TiledKVPool.write_rows))
        try:
            yield
        finally:
            for stream in LateStream.threads:
                stream.stop()
            LateStream.threads.clear()


@contextmanager
def late_gpu_streams(rng: random.Random, *modules: str) -> Iterator[Forward]:
    """Side streams of engines on a GPU that are built inside sleep before each piece of work.

    Args:
        rng: draws how long.
        modules: of `ambidex.storage`, whose side streams are meant.
    Returns:
        The engines' `forward`: the computation comes late, too, and with it what copies wait for.
    """

    class SleepingStream(SideStream):
        """A side stream that sleeps before each piece of work."""

        def active(self) -> Any:
            with super().active():
                torch.cuda._sleep(rng.choice([0, 50_000, 1_000_000]))
            return super().active()

    def late_forward(model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        torch.cuda._sleep(rng.choice([0, 1_000_000]))
        return call_model(model, batch, attention)

    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            patch.setattr(f"ambidex.storage.{module}.SideStream", SleepingStream)
        yield late_forward


def _late(function: Callable[..., None]) -> Callable[..., None]:
    """The function, done by the active stream after a delay."""

    def later(*args: Any, **settings: Any) -> None:
        delay_s = LateStream.rng.choice(DELAYS_S) if LateStream.is_ordered else 0.0

        def work() -> None:
            if LateStream.active_stream is not None or delay_s:
                time.sleep(delay_s)
            function(*args, **settings)

        launch(work)

    return later

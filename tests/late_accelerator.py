"""An accelerator of a CPU that comes late: a thread does what a CUDA stream would, in its order, each piece late.

What decode steps of fixed form launch (inputs that are sent, captured steps, tokens that are copied back, events)
returns at once and is done by that thread; who waits for an event waits for it. What else computes or copies, the
ordinary path and moves of blocks, begins when all that was launched before is done, as it would in the same stream.
"""

import inspect
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from ambidex.attention.decode_inputs import DecodeInputs
from ambidex.attention.tiered import TieredAttention
from ambidex.core.errors import LaneError
from ambidex.core.ids import Lane
from ambidex.core.step import SelectionFigures
from ambidex.runner.chosen_copy import ChosenCopy
from ambidex.runner.fixed_step import FixedStep
from ambidex.runner.runner import ModelRunner
from ambidex.storage.copy import CopyEngine
from ambidex.storage.lane_clock import RunTimer
from ambidex.storage.words import StepFence

WAIT_S: Final = 60.0
DELAYS_S: Final = (0.0, 0.0, 0.0003, 0.002)


class LateAccelerator:
    """The thread, and what it was given.

    Args:
        rng: draws the delays.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="late-accelerator", daemon=True)
        self.thread.start()
        self.errors: list[BaseException] = []
        """What steps raised that were launched: nobody was there to hear it."""
        self.num_replays = 0

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """See `runner.capture.Capture`: what depends on the batch is as it was when the step was captured."""
        named = inspect.getclosurevars(body).nonlocals
        step = copy(named["self"]._step)
        batch, step._lanes = step._lanes.batch, copy(step._lanes)
        step._lanes.batch = SimpleNamespace(key_batches=batch.key_batches, is_scanned=batch.is_scanned)

        def replay() -> None:
            self.num_replays += 1
            self.launch(lambda: step.compute(named["num_rows"], named["host"]))

        return replay

    def launch(self, work: Callable[[], object]) -> threading.Event:
        """Do work behind what was given before; returns what is set when it is done."""
        done = threading.Event()

        def run() -> None:
            time.sleep(self._rng.choice(DELAYS_S))
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
            finally:
                done.set()

        self._work.put(run)
        return done

    def wait(self) -> None:
        """Return when all is done that was launched."""
        if threading.current_thread() is not self.thread:
            wait(self.launch(lambda: None))

    def stop(self) -> None:
        """End the thread once all is done."""
        self._work.put(None)
        self.thread.join(WAIT_S)

    def _run(self) -> None:
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                work()


def wait(event: threading.Event) -> None:
    assert event.wait(WAIT_S), "the accelerator waits for what never comes"


@contextmanager
def late_accelerator(seed: int) -> Iterator[LateAccelerator]:
    """Engines with captured steps on a CPU that are built and run inside have such an accelerator.

    Args:
        seed: of the delays.
    Returns:
        It; its `capture` is for `build_engine`.
    """
    accelerator = LateAccelerator(random.Random(seed))
    events: dict[tuple[int, int], threading.Event] = {}  # by object, which lives as long as its engine

    def record(owner: object, place: int = 0, work: Callable[[], object] = lambda: None) -> None:
        events[id(owner), place] = accelerator.launch(work)

    def synchronize(owner: object, place: int = 0) -> None:
        if (id(owner), place) in events:
            wait(events[id(owner), place])

    def begin_chosen(
        tokens: ChosenCopy, chosen: Tensor, lane_bytes: Mapping[Lane, int], selection: SelectionFigures | None = None
    ) -> ChosenCopy:
        tokens._num_rows, tokens.lane_bytes, tokens.selection = len(chosen), lane_bytes, selection
        record(tokens, work=lambda: tokens._host[: len(chosen)].copy_(chosen))
        return tokens

    def wait_fence(fence: StepFence, limit_s: float, describe: Callable[[], str]) -> None:
        event = events.get((id(fence), 0))
        if event is not None and not event.wait(limit_s):
            raise LaneError(f"the accelerator did not end its last step within {limit_s:.0f} s: {describe()}")

    def mark_time(timer: RunTimer, place: int) -> None:
        def note() -> None:
            timer._times[place] = time.perf_counter()

        record(timer, place, note)

    def take_time(timer: RunTimer) -> float | None:
        if not timer._is_set or not events[id(timer), 1].is_set():
            return None
        timer._is_set = False
        return timer._times[1] - timer._times[0]

    def compute(step: FixedStep, *args: Any) -> None:
        if threading.current_thread() is accelerator.thread:
            run_step(step, *args)
            return
        errors: list[BaseException] = []

        def work() -> None:
            try:
                run_step(step, *args)
            except BaseException as error:
                errors.append(error)

        wait(accelerator.launch(work))
        if errors:
            raise errors[0]

    def behind(function: Callable[..., Any]) -> Callable[..., Any]:
        def later(*args: Any, **settings: Any) -> Any:
            accelerator.wait()
            return function(*args, **settings)

        return later

    run_step, send = FixedStep.compute, DecodeInputs.send
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeInputs, "send", lambda inputs, *args, **named: record(
            inputs, work=lambda: send(inputs, *args, **named)
        ))  # fmt: skip
        patch.setattr(DecodeInputs, "wait_sent", synchronize)
        patch.setattr(ChosenCopy, "begin", begin_chosen)
        patch.setattr(ChosenCopy, "wait_here", synchronize)
        patch.setattr(StepFence, "mark", record)
        patch.setattr(StepFence, "wait", wait_fence)
        patch.setattr(RunTimer, "_mark", mark_time)
        patch.setattr(RunTimer, "take", take_time)
        patch.setattr(FixedStep, "compute", compute)
        patch.setattr(ModelRunner, "_finish_decode", behind(ModelRunner._finish_decode))
        patch.setattr(CopyEngine, "run", behind(CopyEngine.run))
        patch.setattr(TieredAttention, "begin", behind(TieredAttention.begin))
        try:
            yield accelerator
        finally:
            accelerator.stop()

"""An accelerator of a CPU that comes late: a thread does what a CUDA stream would, in its order, each piece late.

What decode steps of fixed form launch (inputs that are sent, captured steps, tokens that are copied back, events)
returns at once and is done by that thread; who waits for an event waits for it. What else computes or copies, the
ordinary path and moves of blocks, begins when all that was launched before is done, as it would in the same stream.
Blocks of the stream lane are brought by a thread of their own, which waits for words in its order, too. No wait for a
word has an end but the word.

What it does not show: that launches take long or fill the driver's queue, that memory which was freed is given to
somebody else, how kernels see what the host writes.
"""

import inspect
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ambidex.storage.lane_clock import TimedRun
from ambidex.storage.step_stream import StepStream
from ambidex.storage.words import HostWords, StepFence

WAIT_S: Final = 60.0
DELAYS_S: Final = (0.0, 0.0, 0.0003, 0.002)


class LateStream:
    """A thread, and what it was given.

    Args:
        rng: draws the delays.
        errors: gets what is raised: nobody is there to hear it.
    """

    def __init__(self, rng: random.Random, errors: list[BaseException]) -> None:
        self._rng = rng
        self.delays_s: Sequence[float] = DELAYS_S
        self.errors = errors
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="late-stream", daemon=True)
        self.thread.start()

    def launch(self, work: Callable[[], object]) -> threading.Event:
        """Do work behind what was given before; returns what is set when it is done."""
        done = threading.Event()

        def run() -> None:
            time.sleep(self._rng.choice(self.delays_s))
            try:
                work()
            except BaseException as error:
                self.errors.append(error)
            finally:
                done.set()

        self._work.put(run)
        return done

    def end(self) -> None:
        """No more is given to it; the thread ends once all is done."""
        self._work.put(None)

    def _run(self) -> None:
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                work()


class LateAccelerator(LateStream):
    """The stream that computes, and those of its copies."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng, [])
        self.num_replays = self.num_done = 0
        """Captured steps that were launched, and that have ended."""
        self._links: dict[StepStream, LateStream] = {}
        self._is_given_up = False

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """See `runner.capture.Capture`: what depends on the batch is as it was when the step was captured."""
        named = inspect.getclosurevars(body).nonlocals
        step = copy(named["self"]._step)
        batch, step._lanes = step._lanes.batch, copy(step._lanes)
        step._lanes.batch = SimpleNamespace(key_batches=batch.key_batches, is_scanned=batch.is_scanned)

        def run() -> None:
            step.compute(named["num_rows"], named["host"])
            self.num_done += 1

        def replay() -> None:
            self.num_replays += 1
            self.launch(run)

        return replay

    def link(self, stream: StepStream) -> LateStream:
        """The stream of a stream lane's copies."""
        if stream not in self._links:
            self._links[stream] = LateStream(self._rng, self.errors)
        return self._links[stream]

    def wait_word(self, word: Tensor) -> None:
        """In one of its threads: until the word is set."""
        while int(word) == 0:
            assert not self._is_given_up, "a stream waited for a word that never came"
            time.sleep(20e-6)

    def wait(self) -> None:
        """Return when all is done that was launched."""
        if threading.current_thread() is not self.thread:
            wait(self.launch(lambda: None))

    def stop(self) -> None:
        """End all threads once all is done."""
        streams = [self, *self._links.values()]
        for stream in streams:
            stream.end()
        for stream in streams:
            stream.thread.join(WAIT_S / 6)
            self._is_given_up |= stream.thread.is_alive()
        for stream in streams:
            stream.thread.join(WAIT_S)


class LinkWords:
    """Words of a stream of copies, which nobody waits for but what stands behind them."""

    def __init__(self, accelerator: LateAccelerator, link: LateStream) -> None:
        self._accelerator, self._link = accelerator, link

    def write(self, word: Tensor) -> None:
        self._link.launch(lambda: word.fill_(1))

    def wait(self, word: Tensor) -> None:
        self._link.launch(lambda: self._accelerator.wait_word(word))


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

    def mark_time(run: TimedRun, place: int) -> None:
        def note() -> None:
            run._times[place] = time.perf_counter()

        record(run, place, note)

    def take_time(run: TimedRun) -> float | None:
        if not run._is_set or not events[id(run), 1].is_set():
            return None
        run._is_set = False
        return run._times[1] - run._times[0]

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

    def on_link(bring: Callable[..., None]) -> Callable[..., None]:
        def launch(stream: StepStream, *args: Any) -> None:
            if stream._inline is None:
                accelerator.link(stream).launch(lambda: bring(stream, *args))
            else:  # in the accelerator's own stream
                bring(stream, *args)

        return launch

    def send_layers(stream: StepStream, layers: range, send: Callable[[int], None]) -> None:
        link = accelerator.link(stream)
        stream._copy_words = LinkWords(accelerator, link)
        try:
            send_now(stream, layers, send)
        finally:
            done = link.launch(lambda: None)
            stream._last_copies = SimpleNamespace(query=done.is_set)  # type: ignore[assignment]  # an event

    run_step, send = FixedStep.compute, DecodeInputs.send
    send_now = StepStream._send_layers
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DecodeInputs, "send", lambda inputs, *args, **named: record(
            inputs, work=lambda: send(inputs, *args, **named)
        ))  # fmt: skip
        patch.setattr(DecodeInputs, "wait_sent", synchronize)
        patch.setattr(ChosenCopy, "begin", begin_chosen)
        patch.setattr(ChosenCopy, "wait_here", synchronize)
        patch.setattr(StepFence, "mark", record)
        patch.setattr(StepFence, "wait", wait_fence)
        patch.setattr(StepFence, "wait_here", synchronize)
        patch.setattr(HostWords, "wait", lambda _, word: accelerator.wait_word(word))
        for name in ("_copy", "_fetch"):
            patch.setattr(StepStream, name, on_link(getattr(StepStream, name)))
        patch.setattr(StepStream, "_send_layers", send_layers)
        patch.setattr(TimedRun, "_mark", mark_time)
        patch.setattr(TimedRun, "take", take_time)
        patch.setattr(FixedStep, "compute", compute)
        patch.setattr(ModelRunner, "_finish_decode", behind(ModelRunner._finish_decode))
        patch.setattr(CopyEngine, "run", behind(CopyEngine.run))
        patch.setattr(TieredAttention, "begin", behind(TieredAttention.begin))
        try:
            yield accelerator
        finally:
            accelerator.stop()

"""`DecodeSteps`: decode steps of a few fixed sizes (buckets), each captured once as a CUDA graph and then replayed.

    requests   1  2  3  4  5 … 8  9 … 16  17 … 24  …      a step of 3 requests runs in the bucket of 4,
    bucket     1  2  4  4  8   8  16  16  24   24         with a row of padding

A step has this form if each request has one new token whose block lies on the accelerator; others take the ordinary
path. Where older keys lie in DRAM the CPU lane answers each layer (`attention/handover.py`); such a step has a graph of
its own, another one where all of them travel to the accelerator, and one where the bounded policy scans them. The first
step of a bucket runs as it is, which is its answer and warms everything up, and is then captured; where it waits for
the CPU it has run before without its answers, so that no lane waits for a compiler. If capturing fails, graphs are
given up with one warning, and every step takes the ordinary path.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import NamedTuple

from ambidex.attention.decode_inputs import DecodeInputs
from ambidex.core.errors import InternalError, LaneError
from ambidex.core.ids import RequestId, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.step import ScheduledRequest
from ambidex.kernels.cpu.native import KeyBatch, ThreadPool
from ambidex.mlp.split_site import WeightLanes
from ambidex.models.base import CausalLM
from ambidex.runner.capture import Capture
from ambidex.runner.chosen_copy import ChosenCopy
from ambidex.runner.decode import DecodeOutput, LaunchedDecode
from ambidex.runner.fixed_step import FixedStep, Forward
from ambidex.runner.host_answers import HostAnswers
from ambidex.runner.step_lanes import LaneSettings, StepLanes
from ambidex.runner.step_under_way import StepUnderWay
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.lane_clock import StepTimes
from ambidex.storage.lane_thread import WorkBeside
from ambidex.storage.pinned import is_out_of_memory
from ambidex.storage.step_stream import StepStream
from ambidex.storage.step_watch import StepWatch
from ambidex.storage.words import WAIT_LIMIT_S, StepFence

logger = logging.getLogger(__name__)


class _Form(NamedTuple):
    """What a captured step is for; others launch other things."""

    num_rows: int
    sees_dram: bool
    has_cpu_keys: bool
    is_scanned: bool


class DecodeSteps:
    """Runs decode steps in buckets.

    Args:
        forward: how the model is called.
        pools: the KV of both tiers; keys in DRAM are part of such steps if that pool is in tile order.
        buckets: numbers of rows, ascending.
        max_context_len: tokens; bounds the block table.
        capture: how a step is captured, `CudaCapture()` or a test's; None: each step is launched anew.
        lanes: those of DRAM.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        spec: ModelSpec,
        forward: Forward,
        pools: Mapping[Tier, KVPool],
        buckets: Sequence[int],
        max_context_len: int,
        capture: Capture | None,
        lanes: LaneSettings,
    ) -> None:
        self._clock = lanes.clock
        self._times: StepTimes | None = None
        """Of the last step, if it was timed."""
        pool = pools[Tier.GPU]
        self._device = pool.device
        self._buckets = tuple(buckets)
        self._capture = capture
        self._watch = StepWatch()
        self._fence = StepFence(is_cuda=pool.device.type == "cuda")
        """Of the last one in which other lanes have a part, also if it broke off."""
        self._is_given_up = False
        self.num_failures = 0
        """Captures that failed: 0 or 1."""
        inputs = DecodeInputs(
            max_rows=buckets[-1],
            max_blocks=pool.spec.num_blocks(max_context_len),
            windows=tuple(dict.fromkeys(spec.windows)),
            device=pool.device,
        )
        self._lanes = StepLanes(spec, pools, inputs, lanes)
        self._batch = self._lanes.batch
        self._step = FixedStep(model, spec, forward, pool, inputs=inputs, lanes=self._lanes, clock=lanes.clock)
        self._launched_rows: dict[RequestId, int] = {}
        self._last: StepUnderWay | None = None
        """The last one in which other lanes have a part: its end may not have been waited for."""
        self._copies = tuple(ChosenCopy(buckets[-1], pool.device) for _ in range(2))  # one waits while one is sent
        self._turns = itertools.cycle(range(len(self._copies)))
        self._replays: dict[_Form, Callable[[], None]] = {}
        self._times_of: dict[_Form, StepTimes] = {}

    def try_run(self, requests: Sequence[ScheduledRequest]) -> DecodeOutput | None:
        """Run a step if it has the form of a decode step, else return None and leave everything as it was.

        Must be called within `torch.inference_mode`.

        Cost: a copy of a few KiB to the device and one launch; waits for nothing.
        """
        num_rows = self._bucket(len(requests))
        self._end_last()
        if self._is_given_up or num_rows is None or not self._batch.try_prepare(requests, num_rows):
            return None
        is_replayed = self._run(num_rows)
        if is_replayed is None:
            return None
        return DecodeOutput(
            logits=self._step.logits[: len(requests)],
            chosen=self._step.chosen[: len(requests)],
            lane_bytes=lambda: self._lanes.lane_bytes(num_rows),
            is_replayed=is_replayed,
            selection=(lambda: self._lanes.selection(requests, num_rows)) if self._lanes.is_bounded else None,
            lane_seconds=None if self._times is None else self._times.read,
        )

    def close(self) -> None:
        """Wait for the end of what was launched: it reads and writes memory that is to go. No step may follow."""
        if not self._end_last():
            logger.warning("the engine is closed behind a step that failed")
        try:
            self._fence.wait(WAIT_LIMIT_S, lambda: "its waits were ended")
        except (LaneError, RuntimeError) as error:  # torch's, of a device that is lost
            logger.warning("the engine is closed, and its memory may still be written: %s", error)

    def forget(self) -> None:
        """Weights were bound anew: what was captured is captured again at its next step. No step is under way."""
        self._end_last()
        self._replays.clear()
        self._times_of.clear()
        self._lanes.forget_weights()

    def try_launch(self, requests: Sequence[ScheduledRequest]) -> LaunchedDecode | None:
        """Replay a step behind the last one, if it has a graph, no weights lie in DRAM, and no keys there are scanned
        (what those left out is read when such a step has ended); see `FixedSteps`.

        Cost: two copies of a few KiB and one launch. Waits for nothing where no key lies in DRAM, else for the end of
        the step before it; what it prepares, it has prepared by then.
        """
        num_rows = self._bucket(len(requests))
        if self._is_given_up or self._clock is not None or num_rows is None:
            return None
        if self._batch.is_scanned or self._lanes.places_weights(num_rows):
            return None
        if not any(form.num_rows == num_rows for form in self._replays):
            return None
        if self._last is None or self._last.has_ended:
            self._end_last()  # what the last step says counts for this one already
        if not self._batch.try_prepare(requests, num_rows, self._launched_rows):
            return None
        launched = self._try_launch_prepared(requests, num_rows)
        if launched is None:
            self._batch.forget_step()
        return launched

    def _try_launch_prepared(self, requests: Sequence[ScheduledRequest], num_rows: int) -> LaunchedDecode | None:
        """Launch the step that was prepared, if it can be."""
        replay = self._replays.get(self._form(num_rows))
        if replay is None or self._batch.is_scanned:
            return None
        self._lanes.settle_weights()
        step: StepUnderWay | None = None
        if self._lanes.sees_dram:
            step = self._try_start(replay, num_rows)
            if step is None:
                return None
        else:
            replay()
        self._launched_rows = {request.request_id: row for row, request in enumerate(requests)}
        lane_bytes = self._lanes.lane_bytes(num_rows)
        selection = self._lanes.selection(requests, num_rows) if self._lanes.is_bounded else None
        copy = self._copies[next(self._turns)].begin(self._step.chosen[: len(requests)], lane_bytes, selection)
        if step is not None:
            step.bring(copy)
        return step or copy

    def _try_start(self, replay: Callable[[], None], num_rows: int) -> StepUnderWay | None:
        """Start the step that was prepared, behind the last one; None if lanes lost each other: those of the last one
        say so themselves, and the next one is run once more if it is wanted then."""
        batches = self._lanes.layer_batches()
        host = self._lanes.host_answers(num_rows, batches)
        if not self._await_last():
            return None
        try:
            return self._start(replay, num_rows, host, batches)
        except LaneError as error:
            logger.warning("a step is not sent ahead: %s", error)
            return None
        finally:
            self._lanes.follow_last()  # the accelerator has its work by now

    def _end_last(self) -> bool:
        """Wait for the end of a step under way, if there is one, and take from the last step what it says of the next
        ones; see `_await_last`."""
        is_whole = self._await_last()
        self._lanes.follow_last()
        return is_whole

    def _await_last(self) -> bool:
        """Wait for the end of a step under way; False: it failed, as it will say to whoever waits for its tokens."""
        is_whole = True
        if self._last is not None:
            try:
                self._last.end()
            except Exception:  # each of its waits raises it: once is enough
                is_whole = False
            self._last = None
        return is_whole

    def _run(self, num_rows: int) -> bool | None:
        """Run the step that was prepared; says whether a graph was replayed, None if graphs had to be given up: where
        there is no pinned memory for what the lanes share, or a capture fails.

        Raises:
            LaneError: the accelerator and the CPU lane lost each other.
            RuntimeError: torch's, of a device that is lost.
        """
        batches = self._lanes.layer_batches()
        try:
            batches = self._lanes.scan(num_rows, batches)
            host = self._lanes.host_answers(num_rows, batches)
        except RuntimeError as error:
            if not is_out_of_memory(error):  # a lost device, or a fault of ours
                raise
            self._give_up(num_rows, error)
            return None
        self._lanes.settle_weights()
        form = self._form(num_rows)
        self._times = None
        replay = self._replays.get(form)
        if replay is None:
            if self._capture is None:
                with self._timing(self._new_times()):
                    self._launch(num_rows, host, batches)
                return False
            return False if self._try_capture(self._capture, num_rows, host, batches) else None
        self._times = self._times_of.get(form)
        if self._clock is not None:
            self._clock.start_cpu(self._times)
        if host is None and self._lanes.stream is None:
            replay()
        else:
            self._start(replay, num_rows, host, batches).end()
        return True

    def _start(
        self,
        replay: Callable[[], None],
        num_rows: int,
        host: HostAnswers | None,
        batches: Sequence[KeyBatch] | None,
    ) -> StepUnderWay:
        """Launch a step in which other lanes have a part. Another thread does the CPU's, `host`, and answers while the
        launch is under way: there are steps of so many launches that the driver takes the last ones only when the first
        have had their answers."""
        stream = self._lanes.stream
        sides: list[HostAnswers | StepStream] = [side for side in (host, stream) if side is not None]
        launched = threading.Event()
        work = WorkBeside(lambda: host.answer(batches)) if host is not None else None
        keys, weights = (None, None) if host is None else (host.keys, host.weights)
        follow = self._lanes.following(keys, has_weights=weights is not None)

        def release() -> None:
            launched.set()
            for side in sides:
                side.release()

        def describe() -> str:
            return "; ".join(side.describe() for side in sides)

        if host is not None:
            host.reset()
        watching = ExitStack()
        try:
            step = watching.enter_context(
                self._watch.watching(f"a step of {num_rows} rows", describe=describe, release=release)
            )
            if stream is not None:
                stream.start(self._batch.stream_runs, launched)
            if work is not None:
                work.start()
            with self._lanes.timer.timing():
                replay()
            self._fence.mark()
            for side in sides:
                side.mark_launched()
            launched.set()
            step.mark_launched()
            if stream is not None:
                # NOTE: before the next step's inputs are sent. Streams may share a queue of the device, where inputs
                # that stand behind this step must not stand before copies that it waits for.
                stream.finish()
            step.mark_alone()
            self._last = StepUnderWay(work, step, watching, follow, release, self._fence.wait_here)
            return self._last
        except BaseException:  # the other sides wait for what is not launched or not answered any more
            release()
            self._fence.mark()
            for side in sides:
                side.mark_launched()
            if work is not None:
                work.give_up()
            watching.close()
            self._last = None
            raise

    def _form(self, num_rows: int) -> "_Form":
        batch = self._batch
        return _Form(
            num_rows,
            sees_dram=batch.key_batches is not None,
            has_cpu_keys=batch.has_cpu_keys,
            is_scanned=batch.is_scanned,
        )

    def _new_times(self) -> StepTimes | None:
        return None if self._clock is None else StepTimes(self._device)

    @contextmanager
    def _timing(self, times: StepTimes | None) -> Iterator[None]:
        """Time the step that runs inside."""
        if self._clock is None or times is None:
            yield
            return
        self._clock.start_cpu(times)
        with self._clock.timing(times):
            yield
        self._times = times

    @property
    def weight_lanes(self) -> WeightLanes | None:
        """The lanes of divided weights; None: all lie on the accelerator."""
        return self._lanes.weights

    @property
    def dram_threads(self) -> ThreadPool | None:
        """Who attends over keys in DRAM; None if no such step has a fixed form."""
        return self._lanes.dram_threads

    def answer_alone(self, num_requests: int) -> None:
        """Do the CPU lane's part of the last step once more, as if all its queries were there: for benchmarks."""
        num_rows = self._bucket(num_requests)
        assert num_rows is not None, "more requests than a step takes"
        self._end_last()
        self._lanes.answer_alone(num_rows)

    def _bucket(self, num_requests: int) -> int | None:
        return next((size for size in self._buckets if size >= num_requests), None)

    def _launch(self, num_rows: int, host: HostAnswers | None, batches: Sequence[KeyBatch] | None) -> None:
        """Run a step without a graph."""
        if host is None:
            with self._lanes.inline_stream():
                self._step.compute(num_rows, None)
            return
        host.reset()
        what = f"a first step of {num_rows} rows"
        with self._watch.watching(what, describe=host.describe, release=host.release) as step:
            step.mark_launched()  # without a graph it takes as long as it takes
            with host.answering(batches), self._lanes.inline_stream():
                self._step.compute(num_rows, host)

    def _rehearse(self, num_rows: int, host: HostAnswers) -> None:
        """Run a step with whatever lies where the CPU's answers would: kernels that are compiled meanwhile, for
        seconds, are ready before one lane waits for another within a limit. What it gives is worthless.

        NOTE: the step that follows stores the same rows in the same slots, and reads none of this one's.
        """
        host.reset()
        host.release()
        try:
            with self._lanes.inline_stream():
                self._step.compute(num_rows, host)
        finally:
            host.mark_launched()

    def _try_capture(
        self, capture: Capture, num_rows: int, host: HostAnswers | None, batches: Sequence[KeyBatch] | None
    ) -> bool:
        """Rehearse the step, compute it, then capture it; False if graphs had to be given up (the step may or may not
        have run).

        NOTE: computing a step twice is harmless: it stores the same rows in the same slots.
        """
        try:
            if host is not None:
                self._rehearse(num_rows, host)
            self._launch(num_rows, host, batches)
            times = self._new_times()
            with self._clock.timing(times) if self._clock is not None and times is not None else nullcontext():
                self._replays[self._form(num_rows)] = capture(lambda: self._step.compute(num_rows, host))
            if times is not None:
                self._times_of[self._form(num_rows)] = times
        except (LaneError, InternalError, AssertionError):  # ours: another way would hide them
            raise
        except Exception as error:  # of torch, the driver, or Triton's compiler: the ordinary path is always there
            self._give_up(num_rows, error)
            return False
        return True

    def _give_up(self, num_rows: int, error: Exception) -> None:
        """From now on every step takes the ordinary path."""
        self.num_failures += 1
        self._is_given_up = True
        self._replays.clear()
        self._times_of.clear()
        logger.warning("CUDA graphs are given up, decode is slower: a step of %d rows failed: %s", num_rows, error)

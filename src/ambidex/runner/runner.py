"""`ModelRunner`: carries out a step on the accelerator. The data plane's only door."""

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from ambidex.attention.bounded_scan import BoundedScan
from ambidex.attention.selective import SelectiveAttention
from ambidex.attention.tiered import TieredAttention
from ambidex.attention.traced import CudaClock
from ambidex.core.errors import InternalError, LaneError
from ambidex.core.ids import Lane, RequestId
from ambidex.core.selection import StageTimes
from ambidex.core.step import SampledToken, SelectionFigures, StepPlan, StepResult
from ambidex.core.trace import NullTracer, Tracer, Track
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.decode import DecodeOutput, FixedSteps, LaunchedDecode
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.sampler import Sampler
from ambidex.runner.torch_threads import TorchThreads
from ambidex.storage.copy import CopyEngine, MoveOutcome
from ambidex.storage.promotions import Promotions

logger = logging.getLogger(__name__)

Forward = Callable[[CausalLM, InputBatch, AttentionOp], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Computed:
    """What computing a step's requests gave."""

    tokens: dict[RequestId, SampledToken] = field(default_factory=dict)
    failures: dict[RequestId, str] = field(default_factory=dict)
    lane_bytes: Mapping[Lane, int] = field(default_factory=dict)
    lane_seconds: Mapping[Lane, float] = field(default_factory=dict)
    selection: SelectionFigures | None = None
    is_replayed: bool = False


class SectionClock:
    """Wall seconds by section of one step."""

    def __init__(self, tracer: Tracer) -> None:
        self.seconds: dict[str, float] = {}
        self._tracer = tracer
        self._start = self._last = time.perf_counter_ns()

    def lap(self, section: str) -> None:
        """Book the time since the last lap on `section`."""
        now = time.perf_counter_ns()
        self.seconds[section] = self.seconds.get(section, 0.0) + (now - self._last) / 1e9
        self._tracer.add_span(Track.STEPS, section, self._last, now)
        self._last = now

    def total(self) -> float:
        """Seconds since the clock was made."""
        return (time.perf_counter_ns() - self._start) / 1e9


@dataclass(frozen=True, slots=True)
class LaunchedPlan:
    """A plan that was sent to the accelerator."""

    plan: StepPlan
    step: LaunchedDecode
    finish: Callable[[StepPlan, LaunchedDecode, float], StepResult]
    start: float
    """When it was sent; `time.perf_counter` seconds."""

    def wait(self) -> StepResult:
        """What it gave, once it has ended."""
        return self.finish(self.plan, self.step, self.start)


class ModelRunner:
    """Runs plans: moves first, then the forward pass and sampling.

    Args:
        forward: how the model is called: `call_model`, or a test's that fails.
        decode_steps: decode steps of fixed shape; None: every step takes the ordinary path.
        torch_threads: how many threads torch computes with in a step of so many tokens; None: as it was set.
        tracer: is told the sections of each step.
        device_clock: tells what the device did meanwhile; None: nobody does.
        bounded: the bounded policy in its native form, which is told what each step writes.
        promotions: copies blocks of DRAM to the accelerator beside a step; None: no plan asks for that.
        before_step: called before each step, when the CPU has no part in one; None: nothing is.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        attention: TieredAttention | SelectiveAttention,
        sampler: Sampler,
        copies: CopyEngine,
        device: torch.device,
        forward: Forward,
        decode_steps: FixedSteps | None = None,
        torch_threads: TorchThreads | None = None,
        tracer: Tracer | None = None,
        device_clock: CudaClock | None = None,
        bounded: BoundedScan | None = None,
        promotions: Promotions | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> None:
        self.model = model
        self._attention = attention
        self._selective = attention if isinstance(attention, SelectiveAttention) else None
        self._sampler = sampler
        self._copies = copies
        self._device = device
        self._forward = forward
        self.decode_steps = decode_steps
        self._torch_threads = torch_threads
        self._tracer = tracer or NullTracer()
        self._device_clock = device_clock
        self._bounded = bounded
        self._promotions = promotions
        self._before_step = before_step
        self._last_end = 0.0  # of the last step that was launched; `time.perf_counter` seconds

    @property
    def selective(self) -> SelectiveAttention | None:
        """Attention whose keys a policy chooses step by step; None: there is none."""
        return self._selective

    def close(self) -> None:
        """Wait for a step under way, and end the threads of a policy; no step may follow. Closing again does
        nothing."""
        if self.decode_steps is not None:
            self.decode_steps.close()
        if self._selective is not None:
            self._selective.close()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens and carry out its moves.

        When the accelerator has no memory left, the request with the most tokens in the step is left out and the others
        are computed again without it. All requests of a step fail whose lanes lost each other.
        """
        if self._device_clock is not None:
            self._device_clock.begin_step()
        clock = SectionClock(self._tracer)
        if self._before_step is not None:
            self._before_step()
            clock.lap("neurons")
        for request_id in plan.finished_requests:
            self._sampler.forget(request_id)
            if self._selective is not None:
                self._selective.forget(request_id)
        for request in plan.new_requests:
            self._sampler.add(request)
            if self._selective is not None:
                self._selective.add(request)
        if self._bounded is not None:
            self._bounded.note(plan)
        if plan.selection is not None and self._selective is not None:
            self._selective.apply(plan.selection)
        moves = self._copies.run([move for move in plan.moves if not move.keeps_source])
        if self._promotions is not None:
            self._promotions.begin([move for move in plan.moves if move.keeps_source])
        clock.lap("moves")
        failures: dict[RequestId, str] = {}
        out_of_memory: dict[RequestId, str] = {}
        computed = _Computed()
        promoted = MoveOutcome(finished=(), failed=())
        try:
            while plan.requests:
                try:
                    with self._device_clock.measure(Track.GPU, "compute") if self._device_clock else nullcontext():
                        computed = self._compute(plan, clock)
                    break
                except torch.OutOfMemoryError as error:
                    self._attention.settle()
                    largest = max(plan.requests, key=lambda request: (len(request.token_ids), request.start))
                    out_of_memory[largest.request_id] = str(error)
                    plan = replace(plan, requests=tuple(r for r in plan.requests if r is not largest))
                except LaneError as error:
                    failures |= {request.request_id: str(error) for request in plan.requests}
                    logger.warning("the requests of a step failed: %s", error)
                    break
        finally:  # also when the step breaks off: nobody may take a block that is still written
            if self._promotions is not None:
                promoted = self._promotions.finish()
                clock.lap("moves")
        clock.seconds["total"] = clock.total()
        if self._device_clock is not None:
            self._device_clock.end_step()
        return StepResult(
            tokens=computed.tokens,
            failures=failures | computed.failures,
            out_of_memory=out_of_memory,
            finished_moves=moves.finished + promoted.finished,
            failed_moves=moves.failed + promoted.failed,
            seconds=clock.seconds,
            lane_bytes=computed.lane_bytes,
            lane_seconds=computed.lane_seconds,
            is_replayed=computed.is_replayed,
            selection=computed.selection,
            stages=self._stage_times(clock) if computed.tokens else None,
            kept_keys=self._bounded.find_kept() if plan.is_look and self._bounded is not None else None,
            num_graph_failures=self.decode_steps.num_failures if self.decode_steps is not None else 0,
            num_row_refusals=self._selective.num_row_refusals if self._selective is not None else 0,
        )

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> "LaunchedPlan | None":
        """Send a decode step to the accelerator behind the last one; None if it must be executed. Returns at once, or
        when the last one has ended (`FixedSteps.try_launch`).

        A step can be sent where the likeliest token of each request is its next one, and the step is one launch.
        """
        is_plain = plan.requests and not plan.moves and not plan.new_requests
        if self.decode_steps is None or not is_plain or self._before_step is not None:
            return None
        ids = [request.request_id for request in plan.requests]
        if not all(request.is_sampled for request in plan.requests) or not self._sampler.takes_likeliest(ids):
            return None
        if self._bounded is not None:
            self._bounded.note(plan)
        start = time.perf_counter()
        launched = self.decode_steps.try_launch(plan.requests)
        if launched is None:
            return None
        return LaunchedPlan(plan, launched, self._finish_launched, start)

    def _finish_launched(self, plan: StepPlan, launched: LaunchedDecode, start: float) -> StepResult:
        try:
            return self._take_launched(plan, launched, start)
        except LaneError as error:
            logger.warning("the requests of a step failed: %s", error)
            return StepResult(failures={request.request_id: str(error) for request in plan.requests})
        finally:
            for request_id in plan.finished_requests:
                self._sampler.forget(request_id)

    def _take_launched(self, plan: StepPlan, launched: LaunchedDecode, start: float) -> StepResult:
        chosen = launched.wait()
        start = max(start, self._last_end)  # before that, the device computed the step before
        self._last_end = time.perf_counter()
        tokens, failures = self._sampler.keep([request.request_id for request in plan.requests], chosen)
        duration = self._last_end - start
        return StepResult(
            tokens=tokens,
            failures=failures,
            seconds={"forward": duration, "total": duration},
            lane_bytes=launched.lane_bytes,
            selection=launched.selection,
            is_replayed=True,
        )

    def _compute(self, plan: StepPlan, clock: SectionClock) -> _Computed:
        if self._torch_threads is not None:
            self._torch_threads.choose(plan.num_tokens)
        output = self.decode_steps.try_run(plan.requests) if self.decode_steps is not None else None
        if output is not None:
            clock.lap("forward")
            return self._finish_decode(plan, output, clock)
        batch = InputBatch.of(plan.requests, self._device)
        self._attention.begin(plan.requests)
        clock.lap("prepare")
        hidden = self._forward(self.model, batch, self._attention)  # [T, E]
        if not batch.sampled_ids:
            clock.lap("forward")
            return _Computed(lane_bytes=self._attention.lane_bytes, selection=self._selection())
        logits = self.model.logits(hidden[batch.sampled_rows])  # [B, V] fp32
        clock.lap("forward")
        tokens, failures = self._sampler.sample(logits, batch.sampled_ids, batch.allowed_tokens)
        clock.lap("sample")
        return _Computed(
            tokens=tokens, failures=failures, lane_bytes=self._attention.lane_bytes, selection=self._selection()
        )

    def _stage_times(self, clock: SectionClock) -> StageTimes | None:
        return self._selective.stage_times(clock.seconds.get("forward", 0.0)) if self._selective is not None else None

    def _selection(self) -> SelectionFigures | None:
        return self._selective.selection if self._selective is not None else None

    def _finish_decode(self, plan: StepPlan, output: DecodeOutput, clock: SectionClock) -> _Computed:
        """Take the tokens that the step has chosen already, or sample from its logits."""
        rows = [row for row, request in enumerate(plan.requests) if request.is_sampled]
        ids = [plan.requests[row].request_id for row in rows]
        tokens: dict[RequestId, SampledToken] = {}
        failures: dict[RequestId, str] = {}
        if self._sampler.takes_likeliest(ids):
            chosen = output.chosen.tolist()
            tokens, failures = self._sampler.keep(ids, [chosen[row] for row in rows])
        elif rows:
            is_whole = len(rows) == len(plan.requests)
            allowed = [plan.requests[row].allowed_tokens for row in rows]
            tokens, failures = self._sampler.sample(output.logits if is_whole else output.logits[rows], ids, allowed)
        clock.lap("sample")
        return _Computed(
            tokens=tokens,
            failures=failures,
            lane_bytes=output.lane_bytes(),
            lane_seconds=output.lane_seconds() if output.lane_seconds is not None else {},
            selection=output.selection() if output.selection is not None else None,
            is_replayed=output.is_replayed,
        )


def call_model(model: CausalLM, batch: InputBatch, attention: AttentionOp) -> torch.Tensor:
    """Hidden states [T, E] of a batch."""
    hidden = model(batch.token_ids, batch.positions, attention)
    if not isinstance(hidden, torch.Tensor):
        raise InternalError(f"the model gave {type(hidden).__name__}, not a tensor")
    return hidden

"""`ModelRunner`: carries out a step on the accelerator. The data plane's only door."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from ambidex.attention.tiered import TieredAttention
from ambidex.core.errors import InternalError
from ambidex.core.ids import RequestId
from ambidex.core.step import SampledToken, StepPlan, StepResult
from ambidex.models.base import CausalLM
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.sampler import Sampler
from ambidex.storage.copy import CopyEngine

logger = logging.getLogger(__name__)

Forward = Callable[[CausalLM, InputBatch, TieredAttention], torch.Tensor]


class SectionClock:
    """Wall seconds by section of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def lap(self, section: str) -> None:
        """Book the time since the last lap on `section`."""
        now = time.perf_counter()
        self.seconds[section] = self.seconds.get(section, 0.0) + now - self._last
        self._last = now

    def total(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._start


class ModelRunner:
    """Runs plans: moves first, then the forward pass and sampling.

    Args:
        forward: how the model is called: `call_model`, or a test's that fails.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        attention: TieredAttention,
        sampler: Sampler,
        copies: CopyEngine,
        device: torch.device,
        forward: Forward,
    ) -> None:
        self._model = model
        self._attention = attention
        self._sampler = sampler
        self._copies = copies
        self._device = device
        self._forward = forward

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens and carry out its moves.

        A request for which the accelerator has no memory left fails, the largest of the step first; the others are
        computed again without it.
        """
        clock = SectionClock()
        for request_id in plan.finished_requests:
            self._sampler.forget(request_id)
        for request in plan.new_requests:
            self._sampler.add(request)
        moves = self._copies.run(plan.moves)
        clock.lap("moves")
        failures: dict[RequestId, str] = {}
        tokens: dict[RequestId, SampledToken] = {}
        while plan.requests:
            try:
                tokens, bad = self._compute(plan, clock)
                failures |= bad
                break
            except torch.OutOfMemoryError as error:
                largest = max(plan.requests, key=lambda request: len(request.token_ids) + request.start)
                failures[largest.request_id] = f"no memory left on the accelerator for this request: {error}"
                logger.warning("request %s failed: out of accelerator memory", largest.request_id)
                plan = replace(plan, requests=tuple(r for r in plan.requests if r is not largest))
        lane_bytes = self._attention.lane_bytes if plan.requests else {}
        clock.seconds["total"] = clock.total()
        return StepResult(
            tokens=tokens,
            failures=failures,
            finished_moves=moves.finished,
            failed_moves=moves.failed,
            seconds=clock.seconds,
            lane_bytes=lane_bytes,
        )

    def _compute(
        self, plan: StepPlan, clock: SectionClock
    ) -> tuple[dict[RequestId, SampledToken], dict[RequestId, str]]:
        batch = InputBatch.of(plan.requests, self._device)
        self._attention.begin(plan.requests)
        clock.lap("prepare")
        hidden = self._forward(self._model, batch, self._attention)  # [T, E]
        if not batch.sampled_ids:
            clock.lap("forward")
            return {}, {}
        logits = self._model.logits(hidden[batch.sampled_rows])  # [B, V] fp32
        clock.lap("forward")
        tokens, failures = self._sampler.sample(logits, batch.sampled_ids, batch.allowed_tokens)
        clock.lap("sample")
        return tokens, failures


def call_model(model: CausalLM, batch: InputBatch, attention: TieredAttention) -> torch.Tensor:
    """Hidden states [T, E] of a batch."""
    hidden = model(batch.token_ids, batch.positions, attention)
    if not isinstance(hidden, torch.Tensor):
        raise InternalError(f"the model gave {type(hidden).__name__}, not a tensor")
    return hidden

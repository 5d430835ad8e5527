"""`PolicySteps`: decode steps of policies that choose keys, in a few fixed sizes (buckets), each captured once as a
CUDA graph. How keys are chosen is the affair of the policy's way (`attention/ways/`).

A step has this form if each request has one new token whose block lies on the accelerator
(`attention/early_decode.py`). How many far keys there are, how many are chosen and where rows lie is read on the
device, or counted there, so that neither a longer context nor another number of selected keys needs another graph. Each
mode has graphs of its own.

    accelerator   one graph, with its waits for words of pinned memory
    CPU           behind its launch, layer after layer: attention over keys in DRAM in the layers that attend all,
                  scores of far keys in the others, in mode post (`runner/early_answers.py`); nothing where all layers
                  choose by themselves

As in `graphs.py` the first step of a bucket is rehearsed without the CPU's answers, so that no lane waits for a
compiler, then computed, then captured; if capturing fails, graphs are given up with one warning, and every step takes
the form of steps that are launched op by op.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Final

import torch

from ambidex.attention.decode_batch import DecodeBatch
from ambidex.attention.decode_inputs import DecodeInputs
from ambidex.attention.early_requests import FixedPlan
from ambidex.attention.fixed_inputs import ChosenCounts, FixedInputs
from ambidex.attention.fixed_scores import FixedScores
from ambidex.attention.handover import Handover
from ambidex.attention.hybrid import HybridAttention
from ambidex.attention.paged import PagedAttention
from ambidex.attention.selective import SelectiveAttention
from ambidex.attention.ways.way import StepParts
from ambidex.core.errors import InternalError, LaneError
from ambidex.core.ids import Lane, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.selection import StageTimes
from ambidex.core.step import ScheduledRequest
from ambidex.kernels import api
from ambidex.kernels.cpu.native import KeyBatch, ThreadPool
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.capture import Capture
from ambidex.runner.decode import DecodeOutput, LaunchedDecode
from ambidex.runner.early_answers import EarlyAnswers
from ambidex.runner.fixed_step import Forward
from ambidex.runner.input_batch import InputBatch
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.lane_clock import LaneClock, Part, StepTimes
from ambidex.storage.pinned import is_out_of_memory
from ambidex.storage.step_watch import StepWatch
from ambidex.storage.tiled_pool import TiledKVPool

logger = logging.getLogger(__name__)


MOST_LAYERS_BEHIND: Final = 40
"""Of a graph behind whose launch the CPU answers: the driver takes the last launches of one that has some thousand, as
it has of more layers, only when the accelerator has gone through the first, which wait for answers. So it is with
weights in DRAM; of this graph it was counted, not measured: one of 32 layers was launched at once."""

_Form = tuple[int, bool, bool]
"""Rows of a step, whether keys lie in DRAM, and whether the CPU scores far ones: others launch other things."""


class PolicySteps:
    """Runs decode steps in buckets.

    Args:
        forward: how the model is called.
        pools: the KV of both tiers; keys in DRAM are part of such steps if that pool is in tile order.
        selective: the policy's attention, with an `EarlyDecode` whose scores the accelerator can read.
        buckets: numbers of rows, ascending.
        max_context_len: tokens; bounds the block table.
        max_far: far keys of a step, at most.
        capture: how a step is captured, `CudaCapture()` or a test's; None: each step is launched anew.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        spec: ModelSpec,
        forward: Forward,
        pools: Mapping[Tier, KVPool],
        selective: SelectiveAttention,
        buckets: Sequence[int],
        max_context_len: int,
        max_far: int,
        capture: Capture | None,
    ) -> None:
        assert selective.early is not None, "the policy has its fast form"
        pool, dram = pools[Tier.GPU], pools[Tier.DRAM]
        self._model, self._spec, self._forward = model, spec, forward
        self._pools = dict(pools)
        self._dram = dram if isinstance(dram, TiledKVPool) and dram.num_blocks else None
        self._selective, self._early = selective, selective.early
        self._buckets = tuple(buckets)
        self._max_far = max_far
        self._capture = capture
        self._watch = StepWatch()
        self._is_given_up = False
        self.num_failures = 0
        """Captures that failed: 0 or 1."""
        windows = tuple(dict.fromkeys(spec.windows))
        max_rows, device = buckets[-1], pool.device
        self._inputs = DecodeInputs(
            max_rows=max_rows, max_blocks=pool.spec.num_blocks(max_context_len), windows=windows, device=device
        )
        self._batch = DecodeBatch(self._inputs, block_size=pool.spec.block_size, has_cpu_lane=self._dram is not None)
        self._way = self._early.requests.way
        self._fixed_inputs = FixedInputs(
            max_rows=max_rows,
            num_layers=spec.num_layers,
            names=self._way.names,
            layer_names=self._way.layer_names,
            device=device,
        )
        self._chosen_counts = ChosenCounts(
            max_rows=max_rows,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            by_head=self._way.counts_by_head,
            device=device,
        )
        self._logits = torch.empty(max_rows, spec.vocab_size, dtype=torch.float32, device=device)
        self._chosen = torch.empty(max_rows, dtype=torch.int64, device=device)
        self._all_rows = torch.arange(max_rows, device=device)
        self._scores: dict[int, FixedScores] = {}
        self._handovers: dict[int, Handover] = {}
        self._replays: dict[_Form, Callable[[], None]] = {}
        self._clock = LaneClock() if selective.early.is_timed else None
        self._times: StepTimes | None = None
        """Of the last step, if it was timed."""
        self._times_of: dict[_Form, StepTimes] = {}

    @property
    def dram_threads(self) -> ThreadPool | None:
        """Who attends over keys in DRAM; None if no step has any."""
        return self._dram.native.threads if self._dram is not None else None

    def close(self) -> None:
        """See `FixedSteps`: none is sent ahead, and whoever ran one has waited for its tokens."""

    def forget(self) -> None:
        """Weights were bound anew: what was captured is captured again at its next step. No step is under way."""
        self._replays.clear()
        self._times_of.clear()

    def try_launch(self, requests: Sequence[ScheduledRequest]) -> LaunchedDecode | None:
        """See `FixedSteps`: the CPU has a part in each step, so none is sent behind another."""
        del requests
        return None

    def try_run(self, requests: Sequence[ScheduledRequest]) -> DecodeOutput | None:
        """Run a step if it has the form, else return None and leave everything as it was.

        Must be called within `torch.inference_mode`.

        Cost: two copies of a few KiB to the device and one launch; waits for the CPU's part of the step.
        Raises:
            LaneError: the accelerator and the CPU lost each other.
        """
        num = len(requests)
        num_rows = next((size for size in self._buckets if size >= num), None)
        if self._is_given_up or num_rows is None or not self._batch.try_prepare(requests, num_rows):
            return None
        plan = self._selective.plan_fixed(requests, max_far=self._max_far)
        if plan is None:
            return None
        self._fixed_inputs.send(num_rows, plan.numbers, plan.layer_numbers)
        is_replayed = self._run(num_rows, plan)
        if is_replayed is None:
            return None
        self._selective.finish_fixed(
            None if self._times is None else partial(self._read_times, self._times, num_rows),
            partial(self._chosen_counts.total, num_rows) if plan.form.counts_rows else None,
        )
        return DecodeOutput(
            logits=self._logits[:num],
            chosen=self._chosen[:num],
            lane_bytes=self._lane_bytes,
            is_replayed=is_replayed,
            selection=lambda: self._selective.selection,
        )

    def _run(self, num_rows: int, plan: FixedPlan) -> bool | None:
        """Run the step that was prepared; says whether a graph was replayed, None if graphs had to be given up: where
        there is no pinned memory for what the lanes share, or a capture fails."""
        batches = self._layer_batches() if self._way.first_layer else None
        try:
            host = self._answers(num_rows, has_keys=batches is not None)
        except RuntimeError as error:
            if not is_out_of_memory(error):  # a lost device, or a fault of ours
                raise
            self._give_up(num_rows, error)
            return None
        form = (num_rows, batches is not None, plan.far.is_scored)
        self._times = None
        replay = self._replays.get(form)
        if replay is None and self._capture is not None:
            return False if self._try_capture(self._capture, form, host, plan, batches) else None
        try:
            if replay is None:
                self._times = self._new_times()
                with self._timing(self._times):
                    self._launch(num_rows, host, plan, batches)
            else:
                self._times = self._times_of.get(form)
                self._replay(replay, num_rows, host, plan, batches)
        except BaseException:
            self._break_off(host)
            raise
        return replay is not None

    def _replay(
        self,
        replay: Callable[[], None],
        num_rows: int,
        host: EarlyAnswers,
        plan: FixedPlan,
        batches: Sequence[KeyBatch] | None,
    ) -> None:
        host.reset()
        what = f"a step of {num_rows} rows"
        with self._watch.watching(what, describe=host.describe, release=host.release) as step:
            if self._spec.num_layers > MOST_LAYERS_BEHIND:
                with host.answering(plan.far, batches):
                    replay()
                    step.mark_launched()
                return
            try:
                replay()
            finally:
                host.mark_launched()
            step.mark_launched()
            host.answer(plan.far, batches)

    def _launch(self, num_rows: int, host: EarlyAnswers, plan: FixedPlan, batches: Sequence[KeyBatch] | None) -> None:
        """Run a step without a graph."""
        host.reset()
        what = f"a first step of {num_rows} rows"
        with self._watch.watching(what, describe=host.describe, release=host.release) as step:
            step.mark_launched()  # without a graph it takes as long as it takes
            with host.answering(plan.far, batches):
                self._compute(num_rows, host, plan)

    def _rehearse(self, num_rows: int, host: EarlyAnswers, plan: FixedPlan) -> None:
        """Run a step with whatever lies where the CPU's answers would, so that kernels are compiled and loaded. What it
        gives is worthless.

        NOTE: the step that follows stores the same rows in the same slots, and reads none of this one's.
        """
        host.reset()
        host.release()
        try:
            self._compute(num_rows, host, plan)
        finally:
            host.mark_launched()

    def _try_capture(
        self,
        capture: Capture,
        form: _Form,
        host: EarlyAnswers,
        plan: FixedPlan,
        batches: Sequence[KeyBatch] | None,
    ) -> bool:
        """Rehearse the step, compute it, then capture it; False if graphs had to be given up (the step may or may not
        have run).

        NOTE: computing a step twice is harmless: it stores the same rows in the same slots.
        """
        num_rows = form[0]
        try:
            self._rehearse(num_rows, host, plan)
            self._launch(num_rows, host, plan, batches)
            times = self._new_times()
            with self._timing(times):
                self._replays[form] = capture(lambda: self._compute(num_rows, host, plan))
            if times is not None:
                self._times_of[form] = times
        except (LaneError, InternalError, AssertionError):  # ours: another way would hide them
            self._break_off(host)
            raise
        except Exception as error:  # of torch, the driver, or Triton's compiler: the other form is always there
            self._break_off(host)
            self._give_up(num_rows, error)
            return False
        return True

    def _break_off(self, host: EarlyAnswers) -> None:
        """End a step's waits, and wait for its end: what it reads may soon be nobody's."""
        host.release()
        with suppress(LaneError):  # what broke it off is what is told
            host.settle()

    def _give_up(self, num_rows: int, error: Exception) -> None:
        """From now on every step takes the other form."""
        self.num_failures += 1
        self._is_given_up = True
        self._replays.clear()
        logger.warning("CUDA graphs are given up, decode is slower: a step of %d rows failed: %s", num_rows, error)

    def _compute(self, num_rows: int, host: EarlyAnswers, plan: FixedPlan) -> None:
        """Launch all of a step. Of the plan only what is the same for all steps of a form is looked at."""
        rows = self._inputs.device(num_rows)
        rows.extend_table()
        batch = InputBatch(
            token_ids=rows.token_ids,
            positions=rows.positions,
            sampled_rows=self._all_rows[:num_rows],
            sampled_ids=(),
        )
        attention = self._attention(num_rows, host, plan)
        logits = self._logits[:num_rows]
        with self._clock.span(Part.STEP) if self._clock is not None else nullcontext():
            logits.copy_(self._model.logits(self._forward(self._model, batch, attention)))
        self._chosen[:num_rows].copy_(api.likeliest(logits))

    def _attention(self, num_rows: int, host: EarlyAnswers, plan: FixedPlan) -> AttentionOp:
        paged = PagedAttention(self._spec, self._pools[Tier.GPU], self._inputs.device(num_rows))
        return self._way.attention(
            StepParts(
                near=self._early.requests.near,
                rows=self._fixed_inputs.device(num_rows),
                own=self._fixed_inputs.own(num_rows),
                of_layer=partial(self._fixed_inputs.of_layer, num_rows),
                num_chosen=partial(self._chosen_counts.of_layer, num_rows),
                exact=paged if host.keys is None else HybridAttention(paged, host.keys, None),
                scores=host.scores,
                is_scored=plan.far.is_scored,
                max_far=self._max_far,
                clock=self._clock,
            )
        )

    def _new_times(self) -> StepTimes | None:
        return None if self._clock is None else StepTimes(self._pools[Tier.GPU].device)

    def _timing(self, times: StepTimes | None) -> AbstractContextManager[None]:
        """Time the step that runs, or is captured, inside."""
        return nullcontext() if self._clock is None or times is None else self._clock.timing(times)

    def _read_times(self, times: StepTimes, num_rows: int) -> StageTimes:
        """Of the last step, which had so many rows; waits for its end."""
        found = times.read()
        transfer_s = found[Lane.STREAM]
        is_cuda = self._pools[Tier.GPU].device.type == "cuda"  # else it is left out of the accelerator's already
        gpu_s = found[Lane.GPU] - (transfer_s if is_cuda else 0.0)
        return StageTimes(gpu_s=max(0.0, gpu_s), cpu_s=self._scores[num_rows].cpu_s, transfer_s=transfer_s)

    def _layer_batches(self) -> list[KeyBatch] | None:
        """The CPU lane's keys of each layer; None if none lie in DRAM."""
        batches = self._batch.key_batches
        return None if batches is None else [batches[window] for window in self._spec.windows]

    def _answers(self, num_rows: int, *, has_keys: bool) -> EarlyAnswers:
        """What the CPU does in steps of so many rows."""
        pool = self._pools[Tier.GPU]
        if num_rows not in self._scores:
            self._scores[num_rows] = FixedScores(
                self._early.scores,
                self._spec,
                num_rows,
                max_far=self._max_far,
                dtype=pool.k.dtype,
                device=pool.device,
                clock=self._clock,
            )
        if has_keys and num_rows not in self._handovers:
            assert self._dram is not None, "a batch without a CPU lane has no keys in DRAM"
            self._handovers[num_rows] = Handover(
                self._spec, self._dram, num_rows, dtype=pool.k.dtype, device=pool.device
            )
        keys = self._handovers[num_rows] if has_keys else None
        return EarlyAnswers(self._scores[num_rows], keys, self._spec.num_layers)

    def _lane_bytes(self) -> dict[Lane, int]:
        """Bytes of K and V that each lane read in the step."""
        read = dict(self._selective.fixed_lane_bytes)
        for lane, tier in ((Lane.GPU, Tier.GPU), (Lane.CPU, Tier.DRAM)):
            num_keys = self._batch.num_keys[None][tier]
            read[lane] += self._way.first_layer * num_keys * self._pools[tier].spec.bytes_per_token_layer
        return read

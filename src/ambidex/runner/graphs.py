"""`DecodeSteps`: decode steps of a few fixed sizes (buckets), each captured once as a CUDA graph and then replayed.

    requests   1  2  3  4  5 … 8  9 … 16  17 … 24  …      a step of 3 requests runs in the bucket of 4,
    bucket     1  2  4  4  8   8  16  16  24   24         with a row of padding

A step has this form if each request has one new token whose block lies on the accelerator; others take the ordinary
path. Where older keys lie in DRAM the CPU lane answers each layer (`attention/handover.py`); such a step has a graph of
its own, and another one where the bounded policy scans those keys. The first step of a bucket runs as it is, which is
its answer and warms everything up, and is then captured. If capturing fails, graphs are given up with one warning, and
every step takes the ordinary path.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from ambidex.attention.bounded_scan import BoundedScan, collect_figures, join_lanes, scanned_bytes
from ambidex.attention.decode_batch import DecodeBatch
from ambidex.attention.decode_inputs import DecodeInputs, DecodeRows, DecodeTokens
from ambidex.attention.handover import Handover
from ambidex.attention.hybrid import HybridAttention
from ambidex.attention.paged import PagedAttention
from ambidex.attention.scan_rule import ScanAlways, ScanRule
from ambidex.attention.scanned import ScanLane, ScannedAttention
from ambidex.attention.streamed import LaneBalance, StreamedAttention
from ambidex.core.errors import InternalError, LaneError
from ambidex.core.ids import Lane, RequestId, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.selection import ShareDecision
from ambidex.core.step import ScheduledRequest, SelectionFigures
from ambidex.kernels import api
from ambidex.kernels.cpu.native import KeyBatch, ThreadPool
from ambidex.kernels.cpu.recorded import Arena
from ambidex.mlp.handover import WeightHandover
from ambidex.mlp.split_site import WeightLanes
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.decode import DecodeOutput, LaunchedDecode
from ambidex.runner.host_answers import HostAnswers
from ambidex.runner.input_batch import InputBatch
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.lane_clock import LaneClock, Part, StepTimes
from ambidex.storage.pinned import is_out_of_memory
from ambidex.storage.step_stream import StepStream
from ambidex.storage.tiled_pool import TiledKVPool
from ambidex.storage.words import HostWords, StreamWords

logger = logging.getLogger(__name__)


Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Records what a function launches, without running it, and gives a function that launches the same again."""


class _Form(NamedTuple):
    """What a captured step is for; others launch other things."""

    num_rows: int
    has_cpu_keys: bool
    is_scanned: bool


class CudaCapture:
    """Captures CUDA graphs. They share one pool of memory, so no two may run at once."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        """Capture `body`, which must have run before: kernels are compiled then, and libraries ready."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            body()
        replay: Callable[[], None] = graph.replay
        return replay


class ChosenCopy:
    """Brings a step's chosen tokens to the host while the device goes on; for one step at a time.

    Args:
        max_rows: of a step.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._host = torch.empty(max_rows, dtype=torch.int64, pin_memory=is_cuda)
        self._copied = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]  # torch has no types here
        self._num_rows = 0
        self.lane_bytes: Mapping[Lane, int] = {}

    def begin(self, chosen: Tensor, lane_bytes: Mapping[Lane, int]) -> "ChosenCopy":
        """Copy tokens [B] behind what was sent to the device; waits for nothing."""
        self._num_rows, self.lane_bytes = len(chosen), lane_bytes
        self._host[: len(chosen)].copy_(chosen, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return self

    def wait(self) -> list[int]:
        """The tokens."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens: list[int] = self._host[: self._num_rows].tolist()
        return tokens


class DecodeSteps:
    """Runs decode steps in buckets.

    Args:
        forward: how the model is called.
        pools: the KV of both tiers; keys in DRAM are part of such steps if that pool is in tile order.
        buckets: numbers of rows, ascending.
        max_context_len: tokens; bounds the block table.
        stream_share: of the keys in DRAM that the stream lane reads, 0 to 1; needs what `can_stream` asks for.
        stream_blocks: blocks of a layer that it may hold at once.
        follows_lanes: that share changes from step to step so that the lanes end together, as does the scan lane's.
        capture: how a step is captured, `CudaCapture()` or a test's; None: each step is launched anew.
        weights: the lanes of divided weights; None: all lie on the accelerator.
        bounded: the bounded policy, by which the lanes of DRAM leave out keys; None: they attend all of their own.
        scan_rule: which steps scan their keys, with `bounded`; in the others all are attended. None: all steps do.
        scan_lane: what the accelerator scans with in such steps, with `bounded`; None: the CPU lane scans all.
        clock: times the lanes of each step; None: nobody does.
        tell: is told how that share changes; None: nobody is.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        spec: ModelSpec,
        forward: Callable[[CausalLM, InputBatch, AttentionOp], Tensor],
        pools: Mapping[Tier, KVPool],
        buckets: Sequence[int],
        max_context_len: int,
        stream_share: float,
        stream_blocks: int,
        follows_lanes: bool,
        capture: Capture | None,
        weights: WeightLanes | None = None,
        bounded: BoundedScan | None = None,
        scan_rule: ScanRule | ScanAlways | None = None,
        scan_lane: ScanLane | None = None,
        clock: LaneClock | None = None,
        tell: Callable[[ShareDecision], None] | None = None,
    ) -> None:
        self._model = model
        self._clock = clock
        self._times: StepTimes | None = None
        """Of the last step, if it was timed."""
        self._spec = spec
        self._forward = forward
        pool, dram = pools[Tier.GPU], pools[Tier.DRAM]
        self._pools = dict(pools)
        self._dram = dram if isinstance(dram, TiledKVPool) and dram.num_blocks else None
        self._handovers: dict[tuple[int, bool], Handover] = {}  # by rows, and whether keys are scanned
        self._empty_batches: dict[int, KeyBatch] = {}
        self._bounded = bounded
        self._scan_rule = scan_rule or ScanAlways(0)
        self._scan_lane = scan_lane
        self._weights = weights
        self._weight_handovers: dict[int, WeightHandover] = {}
        self._arena = Arena() if weights is not None else None
        follows = follows_lanes and stream_share > 0
        self._balance = LaneBalance(stream_share, tell=tell) if follows else None
        self._scan_balance = LaneBalance(stream_share, tell=tell) if follows and scan_lane is not None else None
        self._stream = None
        if self._dram is not None and stream_share > 0 and stream_blocks > 0:
            words = StreamWords() if pool.device.type == "cuda" else HostWords()
            self._stream = StepStream(self._dram, stream_blocks, pool.device, words, row_dtype=pool.k.dtype)
        self._buckets = tuple(buckets)
        self._capture = capture
        self._is_given_up = False
        self.num_failures = 0
        """Captures that failed: 0 or 1."""
        kv = pool.spec
        self._inputs = DecodeInputs(
            max_rows=buckets[-1],
            max_blocks=kv.num_blocks(max_context_len),
            windows=tuple(dict.fromkeys(spec.windows)),
            device=pool.device,
        )
        self._batch = DecodeBatch(
            self._inputs,
            block_size=kv.block_size,
            has_cpu_lane=self._dram is not None,
            stream_share=stream_share,
            max_streamed=stream_blocks,
            scans=self._scan_rule.is_scanned if bounded is not None else None,
            scan_share=stream_share if scan_lane is not None else 0.0,
            max_scanned=scan_lane.max_blocks if scan_lane is not None else 0,
        )
        self._num_layers = Counter(spec.windows)
        self._logits = torch.empty(buckets[-1], spec.vocab_size, dtype=torch.float32, device=pool.device)
        self._all_rows = torch.arange(buckets[-1], device=pool.device)
        self._chosen = torch.empty(buckets[-1], dtype=torch.int64, device=pool.device)
        self._tokens = DecodeTokens(max_rows=buckets[-1], device=pool.device)
        self._launched_rows: dict[RequestId, int] = {}
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
        if self._is_given_up or num_rows is None or not self._batch.try_prepare(requests, num_rows):
            return None
        is_replayed = self._run(num_rows)
        if is_replayed is None:
            return None
        return DecodeOutput(
            logits=self._logits[: len(requests)],
            chosen=self._chosen[: len(requests)],
            lane_bytes=lambda: self._lane_bytes(num_rows),
            is_replayed=is_replayed,
            selection=None if self._bounded is None else lambda: self._selection(len(requests), num_rows),
            lane_seconds=None if self._times is None else self._times.read,
        )

    def forget(self) -> None:
        """Weights were bound anew: what was captured is captured again at its next step. No step is under way."""
        self._replays.clear()
        self._times_of.clear()
        self._weight_handovers.clear()

    def try_launch(self, requests: Sequence[ScheduledRequest]) -> LaunchedDecode | None:
        """Replay a step behind the last one, if it has a graph and the CPU lane has no part in it; see `FixedSteps`.

        Cost: two copies of a few KiB and one launch; waits for nothing.
        """
        num_rows = self._bucket(len(requests))
        if self._is_given_up or num_rows is None:
            return None
        replay = self._replays.get(_Form(num_rows, has_cpu_keys=False, is_scanned=False))
        if replay is None or (self._weights is not None and self._weights.places(num_rows)):
            return None
        if not self._batch.try_prepare(requests, num_rows, self._launched_rows, may_see_dram=False):
            return None
        self._settle_weights()
        replay()
        self._launched_rows = {request.request_id: row for row, request in enumerate(requests)}
        return self._copies[next(self._turns)].begin(self._chosen[: len(requests)], self._lane_bytes(num_rows))

    def _run(self, num_rows: int) -> bool | None:
        """Run the step that was prepared; says whether a graph was replayed, None if graphs had to be given up: where
        there is no pinned memory for what the lanes share, or a capture fails.

        Raises:
            LaneError: the accelerator and the CPU lane lost each other.
            RuntimeError: torch's, of a device that is lost.
        """
        batches = self._layer_batches()
        try:
            batches = self._scan(num_rows, batches)
            host = self._host_answers(num_rows, batches)
        except RuntimeError as error:
            if not is_out_of_memory(error):  # a lost device, or a fault of ours
                raise
            self._give_up(num_rows, error)
            return None
        self._settle_weights()
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
        if host is None:
            replay()
            return True
        stream = self._stream if form.has_cpu_keys and not form.is_scanned else None
        host.reset()
        try:
            if stream is not None:
                stream.start(self._batch.stream_runs)
            replay()
            host.mark_launched()
            host.answer(batches)
            if stream is not None:
                stream.finish()
        except BaseException:  # the other sides wait for what is not launched or not answered any more
            host.release()
            if stream is not None:
                stream.release()
            host.mark_launched()
            raise
        if host.keys is not None:
            self._follow_lanes(host.keys, is_alone=host.weights is None)
        return True

    def _follow_lanes(self, keys: Handover, *, is_alone: bool) -> None:
        """Take from the last step what the next ones are to do.

        Args:
            is_alone: the CPU has nothing but keys to answer.
        """
        batch = self._batch
        if batch.is_scanned:
            num_scanned = self._spec.num_layers * self._spec.num_kv_heads * batch.num_keys[None][Tier.DRAM]
            if num_scanned:
                self._scan_rule.note(float(keys.figures[..., 4].sum()) / self._spec.group_size / num_scanned)
        balance = self._scan_balance if batch.is_scanned else self._balance
        if balance is None or not is_alone:
            return
        share = balance.update(keys.num_last / self._spec.num_layers, batch.streamed_share)
        if batch.is_scanned:
            batch.scan_share = share
        else:
            batch.stream_share = share

    def _form(self, num_rows: int) -> "_Form":
        batch = self._batch
        return _Form(num_rows, has_cpu_keys=batch.key_batches is not None, is_scanned=batch.is_scanned)

    def _new_times(self) -> StepTimes | None:
        return None if self._clock is None else StepTimes(self._pools[Tier.GPU].device)

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
        return self._weights

    @property
    def dram_threads(self) -> ThreadPool | None:
        """Who attends over keys in DRAM; None if no such step has a fixed form."""
        return self._dram.native.threads if self._dram is not None else None

    def answer_alone(self, num_requests: int) -> None:
        """Do the CPU lane's part of the last step once more, as if all its queries were there: for benchmarks."""
        batches, num_rows = self._layer_batches(), self._bucket(num_requests)
        assert batches is not None, "the last step had no keys in DRAM"
        assert num_rows is not None, "more requests than a step takes"
        batches = self._scan(num_rows, batches)
        assert batches is not None, "there are as many as before"
        self._handover(num_rows).answer_alone(batches)

    def _bucket(self, num_requests: int) -> int | None:
        return next((size for size in self._buckets if size >= num_requests), None)

    def _launch(self, num_rows: int, host: HostAnswers | None, batches: Sequence[KeyBatch] | None) -> None:
        """Run a step without a graph."""
        if host is None:
            self._compute(num_rows, None)
            return
        host.reset()
        streams = self._stream is not None and batches is not None and not self._batch.is_scanned
        with host.answering(batches), self._inline_stream() if streams else nullcontext():
            self._compute(num_rows, host)

    def _inline_stream(self) -> AbstractContextManager[None]:
        assert self._stream is not None, "there is a stream lane"
        return self._stream.inline(self._batch.stream_runs)

    def _settle_weights(self) -> None:
        """Order what follows behind copies that steps of other forms have left under way."""
        if self._weights is not None:
            self._weights.ring.settle()

    def _layer_batches(self) -> list[KeyBatch] | None:
        """The CPU lane's keys of each layer; None if it has nothing to do."""
        batches = self._batch.key_batches
        return None if batches is None else [batches[window] for window in self._spec.windows]

    def _scan(self, num_rows: int, batches: list[KeyBatch] | None) -> list[KeyBatch] | None:
        """Leave the CPU lane's keys to the bounded policy, if the step scans; returns those attended exactly."""
        if self._bounded is None or batches is None or not self._batch.is_scanned:
            return batches
        self._bounded.make_missing(Tier.DRAM, self._batch.dram_ids)
        self._handover(num_rows).scan(batches)
        if num_rows not in self._empty_batches:
            none = torch.zeros(num_rows, dtype=torch.int64)
            self._empty_batches[num_rows] = KeyBatch(
                none[:0], torch.zeros(num_rows + 1, dtype=torch.int64), none, none, torch.arange(num_rows + 1),
                block_size=self._pools[Tier.DRAM].spec.block_size,
            )  # fmt: skip
        return [self._empty_batches[num_rows]] * len(batches)

    def _handover(self, num_rows: int) -> Handover:
        key = (num_rows, self._batch.is_scanned)
        if key not in self._handovers:
            assert self._dram is not None, "a batch without a CPU lane has no keys in DRAM"
            pool = self._pools[Tier.GPU]
            self._handovers[key] = Handover(
                self._spec, self._dram, num_rows, dtype=pool.k.dtype, device=pool.device,
                bounded=self._bounded if self._batch.is_scanned else None, clock=self._clock,
            )  # fmt: skip
        return self._handovers[key]

    def _host_answers(self, num_rows: int, batches: Sequence[KeyBatch] | None) -> HostAnswers | None:
        """What the CPU does in a step; None: nothing."""
        weights = self._weight_handover(num_rows)
        if batches is None and weights is None:
            return None
        keys = None if batches is None else self._handover(num_rows)
        places = self._weights.places(num_rows) if self._weights is not None else ()
        return HostAnswers(keys, weights, places, self._spec.num_layers)

    def _weight_handover(self, num_rows: int) -> WeightHandover | None:
        if self._weights is None or not self._weights.places(num_rows):
            return None
        if num_rows not in self._weight_handovers:
            is_recorded = self._weights.is_native(num_rows)
            pool = self._pools[Tier.GPU]
            self._weight_handovers[num_rows] = WeightHandover(
                [place.side for place in self._weights.places(num_rows)],
                num_rows,
                dtype=self._weights.dtype,
                device=pool.device,
                arena=self._arena if is_recorded else None,
                clock=self._clock,
            )
        return self._weight_handovers[num_rows]

    def _selection(self, num_requests: int, num_rows: int) -> SelectionFigures:
        """What the lanes of DRAM left out in the last step."""
        by_tier = self._batch.num_keys[None]
        num_visible = sum(by_tier.values()) + self._batch.num_streamed
        if not self._batch.is_scanned:
            num_choices = self._spec.num_layers * num_requests * self._spec.num_q_heads
            num_keys = self._spec.num_layers * self._spec.num_q_heads * num_visible
            return SelectionFigures(
                num_choices=num_choices, num_visible=num_keys, num_attended=num_keys, num_bounded=num_choices
            )
        handover = self._handovers[num_rows, True]
        figures = {Tier.DRAM: handover.figures[:, :num_requests].numpy()}
        if self._scan_lane is not None:
            lane_figures = handover.lane_figures[:, :num_requests].numpy()
            figures[Tier.DRAM] = join_lanes(figures[Tier.DRAM], lane_figures)
        num_scanned = {Tier.DRAM: by_tier[Tier.DRAM] + self._batch.num_streamed}
        return collect_figures(figures, num_scanned, num_visible, handover.out_norms[:, :num_requests].numpy())

    def _lane_bytes(self, num_rows: int) -> dict[Lane, int]:
        """Bytes of K and V that each lane read in the step."""
        near, dram = (self._pools[tier].spec.bytes_per_token_layer for tier in (Tier.GPU, Tier.DRAM))
        num_keys = self._batch.num_keys.items()
        if self._bounded is not None and self._batch.is_scanned:
            num_near, num_dram = (self._batch.num_keys[None][tier] for tier in (Tier.GPU, Tier.DRAM))
            handover = self._handovers[num_rows, True]
            figures = {Tier.DRAM: handover.figures.numpy()}
            read = scanned_bytes(
                {Tier.DRAM: self._bounded.copies[Tier.DRAM]}, figures, {Tier.DRAM: num_dram}, self._spec,
                {Tier.DRAM: Lane.CPU},
            )  # fmt: skip
            streamed = 0
            if self._scan_lane is not None:
                num_kept = int(handover.lane_figures[..., 2].sum()) // self._spec.group_size
                num_keys_read = self._spec.num_layers * self._spec.num_kv_heads * self._batch.num_streamed
                streamed = num_keys_read * self._scan_lane.key_bytes + num_kept * self._scan_lane.kept_bytes
            return {Lane.GPU: near * num_near * self._spec.num_layers, Lane.STREAM: streamed} | read
        return {
            Lane.GPU: near * sum(num[Tier.GPU] * self._num_layers[window] for window, num in num_keys),
            Lane.CPU: dram * sum(num[Tier.DRAM] * self._num_layers[window] for window, num in num_keys),
            Lane.STREAM: dram * self._batch.num_streamed * self._spec.num_layers,
        }

    def _compute(self, num_rows: int, host: HostAnswers | None) -> None:
        """All that a graph holds: from the inputs on the device to logits and chosen tokens there."""
        rows = self._inputs.device(num_rows)
        rows.extend_table()
        batch = InputBatch(
            token_ids=self._tokens.read(rows),
            positions=rows.positions,
            sampled_rows=self._all_rows[:num_rows],
            sampled_ids=(),
        )
        paged = PagedAttention(self._spec, self._pools[Tier.GPU], rows)
        attention: AttentionOp = paged
        hybrid: HybridAttention | None = None
        if host is not None and host.keys is not None:
            attention = hybrid = self._hybrid(paged, host.keys, rows)
        logits = self._logits[:num_rows]
        with self._handing_over(host), self._clock.span(Part.STEP) if self._clock is not None else nullcontext():
            if hybrid is not None:
                hybrid.begin()
            hidden = self._forward(self._model, batch, attention)
            if hybrid is not None:
                hybrid.end()
            logits.copy_(self._model.logits(hidden))
        self._settle_weights()
        chosen = api.likeliest(logits)
        self._chosen[:num_rows].copy_(chosen)
        self._tokens.write(chosen)

    def _hybrid(self, paged: PagedAttention, keys: Handover, rows: DecodeRows) -> HybridAttention:
        """The attention of a step with keys in DRAM."""
        if self._batch.is_scanned:
            scanned = ScannedAttention(self._scan_lane, rows) if self._scan_lane is not None else None
            return HybridAttention(paged, keys, None, is_bounded=True, scanned=scanned)
        streamed = StreamedAttention(self._spec, self._stream, rows) if self._stream is not None else None
        return HybridAttention(paged, keys, streamed)

    def _handing_over(self, host: HostAnswers | None) -> AbstractContextManager[None]:
        if self._weights is None or host is None or host.weights is None:
            return nullcontext()
        return self._weights.handing_over(host.weights.begin)

    def _try_capture(
        self, capture: Capture, num_rows: int, host: HostAnswers | None, batches: Sequence[KeyBatch] | None
    ) -> bool:
        """Compute the step, then capture it; False if graphs had to be given up (the step may or may not have run).

        NOTE: computing a step twice is harmless: it stores the same rows in the same slots.
        """
        try:
            self._launch(num_rows, host, batches)
            times = self._new_times()
            with self._clock.timing(times) if self._clock is not None and times is not None else nullcontext():
                self._replays[self._form(num_rows)] = capture(lambda: self._compute(num_rows, host))
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

"""`StepLanes`: the lanes of DRAM in decode steps of fixed form: who answers what, and what they read and left out.

    keys in DRAM      the CPU lane (`attention/handover.py`); the accelerator over those that travel to it
                      (`attention/streamed.py`), or under the bounded policy over those that it scans there
                      (`attention/scanned.py`)
    weights in DRAM   the CPU's rows (`mlp/handover.py`); chunks that travel (`storage/weight_ring.py`)

Buffers are made when a step of so many rows first needs them.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from ambidex.attention.bounded_scan import BoundedScan, collect_figures, find_bounds, join_lanes, scanned_bytes
from ambidex.attention.decode_batch import DecodeBatch
from ambidex.attention.decode_inputs import DecodeInputs, DecodeRows
from ambidex.attention.handover import Handover
from ambidex.attention.hybrid import HybridAttention
from ambidex.attention.lane_share import LaneBalance
from ambidex.attention.paged import PagedAttention
from ambidex.attention.scan_check import AnswerCopies
from ambidex.attention.scan_rule import ScanAlways, ScanRule
from ambidex.attention.scanned import ScanLane, ScannedAttention
from ambidex.attention.streamed import LaneRates, StreamedAttention
from ambidex.core.ids import Lane, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.selection import LaneTimes, ShareDecision, ShareSeen
from ambidex.core.step import ScheduledRequest, SelectionFigures
from ambidex.kernels.cpu.native import KeyBatch, ThreadPool
from ambidex.kernels.cpu.recorded import Arena
from ambidex.mlp.handover import WeightHandover
from ambidex.mlp.split_site import WeightLanes
from ambidex.runner.host_answers import HostAnswers
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.lane_clock import LaneClock, RunTimer, TimedRun
from ambidex.storage.step_stream import StepStream
from ambidex.storage.tiled_pool import TiledKVPool
from ambidex.storage.words import HostWords, KernelWords


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSettings:
    """Which lanes there are.

    `stream_share` of the keys in DRAM, 0 to 1, is what the stream lane reads, if `why_no_stream` has nothing against
    it, in at most `stream_blocks` blocks of a layer. With `follows_lanes` that share changes from step to step
    (`attention/lane_share.py`), as does the scan lane's; `tell` is told how, and `rates` are what both lanes read with.
    `weights` are the lanes of divided weights; None: all lie on the accelerator. By `bounded` the lanes of DRAM leave
    out keys; None: they attend all of their own. With it, `scan_rule` says which steps scan their keys (in the others
    all are attended; None: all steps do), and `scan_lane` is what the accelerator scans with; None: the CPU lane scans
    all. `clock` times the lanes of each step.
    """

    stream_share: float
    stream_blocks: int
    follows_lanes: bool
    rates: LaneRates | None = None
    weights: WeightLanes | None = None
    bounded: BoundedScan | None = None
    scan_rule: ScanRule | ScanAlways | None = None
    scan_lane: ScanLane | None = None
    clock: LaneClock | None = None
    tell: Callable[[ShareDecision], None] | None = None


class StepLanes:
    """The lanes of all steps.

    Args:
        pools: the KV of both tiers; keys in DRAM are part of such steps if that pool is in tile order.
        inputs: where the steps' few numbers lie.

    Attributes:
        batch: the step that is prepared.
        weights: the lanes of divided weights; None: all lie on the accelerator.
    """

    def __init__(
        self, spec: ModelSpec, pools: Mapping[Tier, KVPool], inputs: DecodeInputs, settings: LaneSettings
    ) -> None:
        dram, scan_lane = pools[Tier.DRAM], settings.scan_lane
        scan_rule = settings.scan_rule or ScanAlways(0)
        share = settings.stream_share
        self._spec = spec
        self._pools = dict(pools)
        self._dram = dram if isinstance(dram, TiledKVPool) and dram.num_blocks else None
        self._clock = settings.clock
        self._handovers: dict[tuple[int, bool], Handover] = {}  # by rows, and whether keys are scanned
        self._empty_batches: dict[int, KeyBatch] = {}
        self._copies: dict[int, AnswerCopies] = {}
        self._bounded = settings.bounded
        self._scan_rule = scan_rule
        self._scan_lane = scan_lane
        self.weights = settings.weights
        self._weight_handovers: dict[int, WeightHandover] = {}
        self._arena = Arena() if settings.weights is not None else None
        follows = settings.follows_lanes and share > 0
        self._balance = LaneBalance(share, tell=settings.tell) if follows else None
        self._scan_balance = LaneBalance(share, tell=settings.tell) if follows and scan_lane is not None else None
        self._rates = settings.rates
        self.timer = RunTimer(pools[Tier.GPU].device)
        """Of a step that is replayed."""
        self._ended: tuple[Callable[[float | None], None], TimedRun] | None = None
        """What the last step leaves to `follow_last`, from its seconds; and its time."""
        self._stream = None
        if self._dram is not None and share > 0 and settings.stream_blocks > 0:
            near = pools[Tier.GPU]
            words = KernelWords() if near.device.type == "cuda" else HostWords()
            self._stream = StepStream(self._dram, settings.stream_blocks, near.device, words, row_dtype=near.k.dtype)
        self.batch = DecodeBatch(
            inputs,
            block_size=pools[Tier.GPU].spec.block_size,
            has_cpu_lane=self._dram is not None,
            stream_share=share,
            max_streamed=settings.stream_blocks,
            scans=scan_rule.is_scanned if settings.bounded is not None else None,
            scan_share=share if scan_lane is not None else 0.0,
            max_scanned=scan_lane.max_blocks if scan_lane is not None else 0,
        )
        self._num_layers = Counter(spec.windows)

    @property
    def is_bounded(self) -> bool:
        """The lanes of DRAM may leave out keys."""
        return self._bounded is not None

    @property
    def dram_threads(self) -> ThreadPool | None:
        """Who attends over keys in DRAM; None if no step has any."""
        return self._dram.native.threads if self._dram is not None else None

    def forget_weights(self) -> None:
        """Weights were bound anew."""
        self._weight_handovers.clear()

    def places_weights(self, num_rows: int) -> bool:
        """Weights in DRAM have a part in steps of so many rows."""
        return self.weights is not None and bool(self.weights.places(num_rows))

    def answer_alone(self, num_rows: int) -> None:
        """Do the CPU lane's part of the last step once more, as if all its queries were there: for benchmarks."""
        by_window = self.batch.key_batches
        assert by_window is not None, "the last step had no keys in DRAM"
        batches = self.scan(num_rows, [by_window[window] for window in self._spec.windows])
        assert batches is not None, "there are as many as before"
        self._handover(num_rows).answer_alone(batches)

    def settle_weights(self) -> None:
        """Order what follows behind copies that steps of other forms have left under way."""
        if self.weights is not None:
            self.weights.ring.settle()

    def layer_batches(self) -> list[KeyBatch] | None:
        """The CPU lane's keys of each layer; None if it has nothing to do."""
        batches = self.batch.key_batches
        if batches is None or not self.batch.has_cpu_keys:
            return None
        return [batches[window] for window in self._spec.windows]

    def scan(self, num_rows: int, batches: list[KeyBatch] | None) -> list[KeyBatch] | None:
        """Leave the CPU lane's keys to the bounded policy, if the step scans; returns those attended exactly."""
        if self._bounded is None or batches is None or not self.batch.is_scanned:
            return batches
        self._bounded.make_missing(Tier.DRAM, self.batch.dram_ids)
        self._handover(num_rows).scan(batches)
        if num_rows not in self._empty_batches:
            none = torch.zeros(num_rows, dtype=torch.int64)
            self._empty_batches[num_rows] = KeyBatch(
                none[:0], torch.zeros(num_rows + 1, dtype=torch.int64), none, none, torch.arange(num_rows + 1),
                block_size=self._pools[Tier.DRAM].spec.block_size,
            )  # fmt: skip
        return [self._empty_batches[num_rows]] * len(batches)

    def _handover(self, num_rows: int) -> Handover:
        key = (num_rows, self.batch.is_scanned)
        if key not in self._handovers:
            assert self._dram is not None, "a batch without a CPU lane has no keys in DRAM"
            pool = self._pools[Tier.GPU]
            self._handovers[key] = Handover(
                self._spec, self._dram, num_rows, dtype=pool.k.dtype, device=pool.device,
                bounded=self._bounded if self.batch.is_scanned else None, clock=self._clock,
            )  # fmt: skip
        return self._handovers[key]

    def host_answers(self, num_rows: int, batches: Sequence[KeyBatch] | None) -> HostAnswers | None:
        """What the CPU does in a step; None: nothing."""
        weights = self._weight_handover(num_rows)
        if batches is None and weights is None:
            return None
        keys = None if batches is None else self._handover(num_rows)
        places = self.weights.places(num_rows) if self.weights is not None else ()
        return HostAnswers(keys, weights, places, self._spec.num_layers)

    def _weight_handover(self, num_rows: int) -> WeightHandover | None:
        if self.weights is None or not self.weights.places(num_rows):
            return None
        if num_rows not in self._weight_handovers:
            is_recorded = self.weights.is_native(num_rows)
            pool = self._pools[Tier.GPU]
            self._weight_handovers[num_rows] = WeightHandover(
                self.weights.places(num_rows),
                num_rows,
                dtype=self.weights.dtype,
                device=pool.device,
                arena=self._arena if is_recorded else None,
                clock=self._clock,
            )
        return self._weight_handovers[num_rows]

    @property
    def sees_dram(self) -> bool:
        """Some keys of the step lie in DRAM."""
        return self.batch.key_batches is not None

    def following(self, keys: Handover | None, *, has_weights: bool) -> Callable[[], None]:
        """What is to be done when the prepared step has been answered: take from it what the next ones are to do.

        Args:
            keys: what the CPU lane has; None: no keys.
            has_weights: the CPU has weights to multiply, too: then its keys' answers say little of both lanes.
        """
        batch = self.batch
        is_scanned, sees_dram, num_keys = batch.is_scanned, self.sees_dram, batch.num_dram_keys
        num_scanned = 0
        if is_scanned:
            num_scanned = self._spec.num_layers * self._spec.num_kv_heads * batch.num_keys[None][Tier.DRAM]
        asked, achieved = batch.asked_share, batch.streamed_share

        def follow() -> None:
            if num_scanned and keys is not None:
                self._scan_rule.note(float(keys.figures[..., 4].sum()) / self._spec.group_size / num_scanned)
            if sees_dram:
                self._scan_rule.count(num_keys, was_scanned=is_scanned)
            if has_weights or not sees_dram:
                return
            cpu_last = None if keys is None else keys.num_last / self._spec.num_layers
            if is_scanned:
                if self._scan_balance is not None:
                    seen = ShareSeen(cpu_last=cpu_last, asked=asked, achieved=achieved)
                    batch.scan_share = self._scan_balance.update(seen)
                self._ended = self._rule_follows(num_keys), self.timer.newest
            elif self._balance is not None:
                ended = self._share_follows(self._balance, cpu_last, asked, achieved, num_keys)
                self._ended = ended, self.timer.newest

        return follow

    def _share_follows(
        self, balance: LaneBalance, cpu_last: float | None, asked: float, achieved: float, num_keys: int
    ) -> Callable[[float | None], None]:
        """What is left to do when the step has ended and its seconds are known."""
        batch, rates, dram = self.batch, self._rates, self._pools[Tier.DRAM].spec
        num_bytes = self._spec.num_layers * dram.bytes_per_token_layer * num_keys

        def follow(step_s: float | None) -> None:
            if asked != balance.share:  # it was prepared before the step in front of it had ended
                return
            times = None
            if step_s is not None and rates is not None:
                times = LaneTimes(step_s=step_s, link_s=num_bytes / rates.link, dram_s=num_bytes / rates.dram)
            if times is not None or cpu_last is not None:
                seen = ShareSeen(cpu_last=cpu_last, asked=asked, achieved=achieved, times=times)
                batch.stream_share = balance.update(seen)

        return follow

    def _rule_follows(self, num_keys: int) -> Callable[[float | None], None]:
        """The same of a step that scanned so many keys."""

        def follow(step_s: float | None) -> None:
            if step_s is not None:
                self._scan_rule.note_time(step_s / self._spec.num_layers, num_keys)

        return follow

    def follow_last(self) -> None:
        """What the last step's time says about those that are prepared from now on; the next one may run already."""
        ended, self._ended = self._ended, None
        if ended is not None:
            follow, run = ended
            follow(run.take())

    @property
    def stream(self) -> StepStream | None:
        """The stream lane, if it has a part in the step; of a step that scans none."""
        return self._stream if self.sees_dram and not self.batch.is_scanned else None

    def inline_stream(self) -> AbstractContextManager[None]:
        """Within this the stream lane's copies are launched with the step."""
        stream = self.stream
        return nullcontext() if stream is None else stream.inline(self.batch.stream_runs)

    def hybrid(self, paged: PagedAttention, keys: Handover | None, rows: DecodeRows) -> HybridAttention:
        """The attention of a step with keys in DRAM.

        Args:
            keys: the way to the CPU lane; None: it has none.
        """
        if self.batch.is_scanned:
            scanned = ScannedAttention(self._scan_lane, rows) if self._scan_lane is not None else None
            return HybridAttention(paged, keys, None, is_bounded=True, scanned=scanned, copies=self._copies_of(rows))
        streamed = StreamedAttention(self._spec, self._stream, rows) if self._stream is not None else None
        return HybridAttention(paged, keys, streamed)

    def _copies_of(self, rows: DecodeRows) -> AnswerCopies | None:
        """Where the layers of a step leave what is checked; None: nothing is."""
        if self._bounded is None or self._bounded.check is None:
            return None
        num_rows, pool = len(rows.token_ids), self._pools[Tier.GPU]
        if num_rows not in self._copies:
            self._copies[num_rows] = AnswerCopies(self._spec, num_rows, dtype=pool.k.dtype, device=pool.device)
        return self._copies[num_rows]

    def handing_over(self, host: HostAnswers | None) -> AbstractContextManager[None]:
        if self.weights is None or host is None or host.weights is None:
            return nullcontext()
        return self.weights.handing_over(host.weights.begin)

    def selection(self, requests: Sequence[ScheduledRequest], num_rows: int) -> SelectionFigures:
        """What the lanes of DRAM left out in the last step, which was of these requests.

        Raises:
            BoundError: an answer was computed again and differs by more than its bound.
        """
        num_requests = len(requests)
        by_tier = self.batch.num_keys[None]
        num_visible = sum(by_tier.values()) + self.batch.num_streamed
        if not self.batch.is_scanned:
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
        num_scanned = {Tier.DRAM: by_tier[Tier.DRAM] + self.batch.num_streamed}
        out_norms = handover.out_norms[:, :num_requests].numpy()
        found = collect_figures(figures, num_scanned, num_visible, out_norms)
        if self._bounded is None or self._bounded.check is None:
            return found
        num_verified, max_error = self._bounded.check.check(
            requests, range(num_requests), self._copies[num_rows], find_bounds(figures, out_norms)
        )
        return replace(found, num_verified=num_verified, max_error=max_error)

    def lane_bytes(self, num_rows: int) -> dict[Lane, int]:
        """Bytes of K and V that each lane read in the step."""
        near, dram = (self._pools[tier].spec.bytes_per_token_layer for tier in (Tier.GPU, Tier.DRAM))
        num_keys = self.batch.num_keys.items()
        if self._bounded is not None and self.batch.is_scanned:
            num_near, num_dram = (self.batch.num_keys[None][tier] for tier in (Tier.GPU, Tier.DRAM))
            handover = self._handovers[num_rows, True]
            figures = {Tier.DRAM: handover.figures.numpy()}
            read = scanned_bytes(
                {Tier.DRAM: self._bounded.copies[Tier.DRAM]}, figures, {Tier.DRAM: num_dram}, self._spec,
                {Tier.DRAM: Lane.CPU},
            )  # fmt: skip
            streamed = 0
            if self._scan_lane is not None:
                num_kept = int(handover.lane_figures[..., 2].sum()) // self._spec.group_size
                num_keys_read = self._spec.num_layers * self._spec.num_kv_heads * self.batch.num_streamed
                streamed = num_keys_read * self._scan_lane.key_bytes + num_kept * self._scan_lane.kept_bytes
            return {Lane.GPU: near * num_near * self._spec.num_layers, Lane.STREAM: streamed} | read
        return {
            Lane.GPU: near * sum(num[Tier.GPU] * self._num_layers[window] for window, num in num_keys),
            Lane.CPU: dram * sum(num[Tier.DRAM] * self._num_layers[window] for window, num in num_keys),
            Lane.STREAM: dram * self.batch.num_streamed * self._spec.num_layers,
        }

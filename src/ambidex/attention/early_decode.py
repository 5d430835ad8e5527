"""`EarlyDecode`: decode steps of HybridGen in their fast form, for steps whose requests have one new token each.

    near keys   the newest ones, on the accelerator: true scores                    ┐
    far keys    in host memory, scored by the CPU a layer ahead (`EarlyScores`)     ├ one softmax, values added up
                the K best of each KV head: their rows of V come over the link      ┘

In mode pre the CPU scores nothing: partial keys on the accelerator choose, and rows of K of the chosen keys come, too.
What is selected and what it weighs is as `select/hybridgen.py` has it; steps of other forms answer each query by
itself, with a mask over all keys. Here there is no mask, and the host waits for nothing but the CPU's scores. Layers
that do not look ahead attend all keys exactly, each tier by its lane.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from ambidex.attention.context_rows import ContextRows
from ambidex.attention.early_scores import EarlyScores
from ambidex.attention.fixed_scores import FarRows
from ambidex.attention.near_rows import Angles, NearRows
from ambidex.attention.row_store import RowStore, take_rows
from ambidex.attention.select.partial_keys import PartialKeys, PartialSelector
from ambidex.attention.select.policy import DecodeRow, FarSelector, Selector
from ambidex.attention.tiered import TieredAttention
from ambidex.attention.transfer_clock import TransferClock
from ambidex.core.ids import KVPart, Lane, RequestId, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.selection import StageTimes
from ambidex.core.step import ScheduledRequest
from ambidex.kernels import api
from ambidex.kernels.cpu.native import ThreadPool
from ambidex.storage.host_rows import HostRows


class LookAhead(Protocol):
    """Makes queries a layer early."""

    def ahead(self, layer_idx: int) -> Tensor | None:
        """Queries [T, Hq, D] of the layer behind one whose attention has its input, not rotated; None: there are none.

        The last layer has none behind it.
        """
        ...


class EarlyWork(Protocol):
    """A request of a step, as `SelectiveAttention` has it."""

    request_id: RequestId
    start: int
    num_prompt_rows: int
    num_rows: int
    selectors: list[Selector]

    @property
    def max_tokens(self) -> int: ...

    @property
    def context(self) -> ContextRows: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPlan:
    """A step of fixed form, whose rows are ready: what the CPU scores, if it does; and for `EarlyInputs` the numbers of
    its requests, and by layer the partial keys by which they choose, if they do."""

    far: FarRows
    numbers: Mapping[str, Sequence[int]]
    partial: Mapping[int, Sequence[PartialKeys]]


@dataclass(frozen=True, slots=True)
class FarAnswer:
    """What a query attended: `places` [Hkv, M] and `probs` [Hkv, G, M], far ones first."""

    places: Tensor
    probs: Tensor


class EarlyDecode:
    """Answers whole steps.

    Args:
        spec: heads, layers and head_dim (the scale is head_dim ** -0.5).
        exact: attends all keys, for layers that do not look ahead; nobody else's.
        look_ahead: makes the early queries.
        row_store: keeps rows in host memory.
        threads: who scores on the CPU.
        num_near: newest keys before a query's own that are near.
        max_requests: whose near rows are on the accelerator, at most.
        is_timed: stages are timed.
    """

    def __init__(
        self,
        spec: ModelSpec,
        exact: TieredAttention,
        look_ahead: LookAhead,
        row_store: RowStore,
        threads: ThreadPool,
        *,
        num_near: int,
        max_requests: int,
        is_timed: bool,
    ) -> None:
        pool = exact.pools[Tier.GPU]
        self._spec = spec
        self._exact = exact
        self._pool = pool
        self._device = pool.device
        self._num_layers = spec.num_layers
        self._row_bytes = spec.head_dim * pool.k.itemsize
        self.look_ahead = look_ahead
        self._nothing = (
            torch.empty(spec.num_kv_heads, 0, dtype=torch.int64, device=pool.device),
            torch.empty(spec.num_kv_heads, spec.group_size, 0, device=pool.device),
        )
        self._scale = spec.head_dim**-0.5
        self._shape = (spec.num_kv_heads, spec.group_size, spec.head_dim)
        self._store = row_store
        self.scores = EarlyScores(
            self._shape,
            dtype=pool.k.dtype,
            device=pool.device,
            threads=threads,
            max_keys=row_store.max_rows,
            memory=row_store.home.memory,
        )
        self.near = NearRows(pool, num_near=num_near, max_requests=max_requests)
        self._clock = TransferClock(pool.device, is_on=is_timed)
        self.is_timed = is_timed
        self._read_fixed: Callable[[], StageTimes] | None = None
        self._works: Sequence[EarlyWork] = ()
        self._rows: list[HostRows] = []
        self._is_far: dict[type[Selector], bool] = {}
        self._early: dict[int, Tensor] = {}
        self.num_bytes = 0
        """Bytes of a policy's own copies that were read since `begin`."""
        self.num_rows = [0, 0]
        """Rows of K or V read since `begin`, on the accelerator and in host memory, without those of exact layers."""
        self.num_attended = self.num_visible = 0
        """Keys, over query heads and layers, since `begin`."""

    @property
    def num_near_requests(self) -> int:
        """Requests whose near rows are on the accelerator now."""
        return self.near.num_requests

    @property
    def row_store(self) -> RowStore:
        """Who keeps rows in host memory."""
        return self._store

    @property
    def pin_refusal(self) -> str | None:
        """Why the buffers of scores are not pinned, on a GPU."""
        return self.scores.pin_refusal

    @property
    def lane_bytes(self) -> dict[Lane, int]:
        """Bytes that layers without look-ahead read since `begin`."""
        return dict(self._exact.lane_bytes)

    def begin(self, requests: Sequence[ScheduledRequest], works: Sequence[EarlyWork]) -> bool:
        """Prepare for a step, if it has the form: one new token each, behind the prompt.

        Returns:
            False if it has not, or there is no memory for rows: others must do it.
        Cost: a request's first step copies all its rows to host memory.
        """
        self._clear()
        if not works or any(work.num_prompt_rows or work.num_rows != 1 for work in works):
            return False
        rows = self._prepare_rows(works)
        if rows is None:
            return False
        self._works, self._rows = works, rows
        self.near.begin(requests, rows)
        self._exact.begin(requests)
        return True

    def _clear(self) -> None:
        """Count anew, for another step."""
        self.scores.begin()
        self._clock.begin()
        self._read_fixed = None
        self._works, self._early = (), {}
        self.num_bytes = self.num_attended = self.num_visible = 0
        self.num_rows = [0, 0]

    def _prepare_rows(self, works: Sequence[EarlyWork]) -> list[HostRows] | None:
        """Rows in host memory of each request, up to its new one; None: there is no memory for those of one."""
        rows = []
        for work in works:
            found = self._store.prepare(
                work.request_id, work.start, 1, max_tokens=work.max_tokens, make_context=_context_of(work)
            )
            if found is None:
                return None
            rows.append(found)
        return rows

    def _first_layer(self, work: EarlyWork) -> int | None:
        """The first layer that looks ahead, as all behind it do; None: there is none."""
        is_far = [self._looks_ahead(selector) for selector in work.selectors]
        first = is_far.index(True) if True in is_far else len(is_far)
        return first if 0 < first < len(is_far) and all(is_far[first:]) else None

    def plan_fixed(
        self, requests: Sequence[ScheduledRequest], works: Sequence[EarlyWork], *, max_far: int
    ) -> FixedPlan | None:
        """Prepare for a step of fixed form, if the step has it: one new token each, behind the prompt, and layers that
        look ahead.

        Args:
            max_far: far keys of all requests together, at most.
        Returns:
            None if it has not, or there is no memory for rows: then nothing has changed.
        Cost: as `begin`; the first step in mode pre behind others brings what partial keys lack.
        """
        if any(work.num_prompt_rows or work.num_rows != 1 for work in works):
            return None
        first = self._first_layer(works[0])
        if first is None:
            return None
        far = [cast("FarSelector", work.selectors[first]) for work in works]
        num_far = [selector.num_far(work.start + 1) for selector, work in zip(far, works, strict=True)]
        if sum(num_far) > max_far:
            return None
        is_scored = far[0].scores_all
        assert all(selector.scores_all is is_scored for selector in far), "all requests are in one mode"
        rows = self._prepare_rows(works)
        if rows is None:
            return None
        self._clear()
        self._works, self._rows = works, rows
        self.near.begin(requests, rows)
        layers = range(0) if is_scored else range(first, self._num_layers)
        partial = {layer: self._extend_partial(layer, num_far) for layer in layers}
        num_selected = [min(selector.num_selected, num) for selector, num in zip(far, num_far, strict=True)]
        num_layers = self._num_layers - first
        for work, num, chosen in zip(works, num_far, num_selected, strict=True):
            num_near = work.start + 1 - num
            self.num_rows[0] += num_layers * 2 * self._shape[0] * num_near
            self.num_rows[1] += num_layers * self._shape[0] * (chosen + (num if is_scored else chosen))
            self.num_visible += self._spec.num_q_heads * self._num_layers * (work.start + 1)
            self.num_attended += self._spec.num_q_heads * (first * (work.start + 1) + num_layers * (chosen + num_near))
        places = range(len(works))
        return FixedPlan(
            far=FarRows(rows, num_far, first, is_scored=is_scored),
            partial=partial,
            numbers={
                "near_slots": [self.near.place(row, works[row].start) for row in places],
                "near_first": [self.near.place(row, num_far[row]) for row in places],
                "near_num": [works[row].start + 1 - num_far[row] for row in places],
                "far_num": num_far,
                "num_selected": num_selected,
                "score_first": [self._spec.num_q_heads * sum(num_far[:row]) for row in places],
                "k_address": [part.k.data_ptr() for part in rows],
                "v_address": [part.v.data_ptr() for part in rows],
                "capacity": [part.capacity for part in rows],
            },
        )

    def _extend_partial(self, layer_idx: int, num_far: Sequence[int]) -> list[PartialKeys]:
        """The partial keys of each request in a layer, those of all older keys, with room for that of its new one."""
        found = []
        for row, work in enumerate(self._works):
            selector = cast("PartialSelector", work.selectors[layer_idx])
            self._tell_missing(layer_idx, row, selector)
            found.append(selector.extend_partial())
            if num_far[row]:  # else nobody reads them
                self.num_bytes += found[-1].num_bytes
        return found

    def finish_fixed(self, read_times: Callable[[], StageTimes] | None) -> None:
        """Launch: the step that was planned has been launched; keep its rows.

        Args:
            read_times: tells the times of its stages once it has ended; None: nobody timed them.
        """
        self.near.keep_new(self._rows)
        self._read_fixed = read_times

    def set_num_threads(self, num_threads: int) -> None:
        """How many threads score from now on; no step is under way."""
        self.scores.set_num_threads(num_threads)

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a request that ended."""
        self._store.forget(request_id)
        self.near.forget(request_id)

    def close(self) -> None:
        """End the thread that scores; no step may follow."""
        self.scores.close()

    def stage_times(self, forward_s: float) -> StageTimes | None:
        """Times of the last step's stages: the CPU's scores, which run beside the accelerator; the transfer of scores
        and rows; and the rest of the forward pass, but for what the accelerator's side waited for scores."""
        if self._read_fixed is not None:
            return self._read_fixed()
        cpu_s, transfer_s = self.scores.cpu_s, self._clock.seconds()
        if cpu_s + transfer_s == 0:
            return None
        return StageTimes(
            gpu_s=max(0.0, forward_s - self.scores.wait_s - transfer_s), cpu_s=cpu_s, transfer_s=transfer_s
        )

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        angles: Angles | None,
        store: Callable[[int, Tensor, Tensor], None],
        watch: Callable[[int, int, FarAnswer], None] | None,
    ) -> Tensor:
        """Store K and V of the step and attend.

        Args:
            q: [B, Hq, D]; k, v: [B, Hkv, D], on the accelerator, not rotated.
            store: keeps K and V of a layer in the pools.
            watch: is told what each row attended in a layer that looks ahead.
        Returns:
            [B, Hq, D] in the dtype of q.
        Cost: some 11 launches a layer and request; the host waits for the CPU's scores, once a layer.
        """
        q, make_k = self.near.add(layer_idx, q, k, v, angles)
        self._ask_ahead(layer_idx, angles)
        if self._find_far(layer_idx):
            if not self.near.is_stored_late:
                store(layer_idx, make_k(), v)
            out = self._attend_selected(layer_idx, q, watch)
        else:
            out = self._exact.attend(layer_idx, q, make_k(), v)
            self._count(sum(work.start + 1 for work in self._works), sum(work.start + 1 for work in self._works))
        if layer_idx == self._num_layers - 1:
            self.near.keep_new(self._rows)
        return out

    def _find_far(self, layer_idx: int) -> list[FarSelector]:
        """The selectors of a layer that looks ahead, one for each request; none of one that does not."""
        selectors = [work.selectors[layer_idx] for work in self._works]
        return cast("list[FarSelector]", selectors) if self._looks_ahead(selectors[0]) else []

    def _looks_ahead(self, selector: Selector) -> bool:
        kind = type(selector)
        if kind not in self._is_far:  # a protocol is looked up member by member, which takes longer than many a launch
            self._is_far[kind] = isinstance(selector, FarSelector)
        return self._is_far[kind]

    def _ask_ahead(self, layer_idx: int, angles: Angles | None) -> None:
        """Make the queries of the next layer, and have the CPU score its far keys with them."""
        following = layer_idx + 1
        far = self._find_far(following) if following < self._num_layers else []
        if not far:
            return
        early = self.look_ahead.ahead(layer_idx)
        assert early is not None, "the layer's input has been seen"
        self._early[following] = early if angles is None else api.rotate(early, *angles)
        if not far[0].scores_all:
            return
        num_far = [selector.num_far(work.start + 1) for selector, work in zip(far, self._works, strict=True)]
        num_bytes = sum(num_far) * self._row_bytes * self._shape[0]
        self.scores.ask(
            following,
            self._early[following],
            [rows.keys[following] for rows in self._rows],
            num_far,
            self._scale,
            self._store.home.pace(KVPart.K, following, num_bytes),
        )

    def _attend_selected(
        self, layer_idx: int, q: Tensor, watch: Callable[[int, int, FarAnswer], None] | None
    ) -> Tensor:
        """[B, Hq, D] of a layer that looks ahead."""
        stale, far = self._early.pop(layer_idx), self._find_far(layer_idx)
        found: list[Tensor] | None = None
        outs = []
        for row, selector in enumerate(far):
            if selector.keeps_rows and not selector.scores_all:
                self._tell_rows(layer_idx, row, selector)
            scores = None
            if selector.scores_all:
                found = found or self.scores.wait(layer_idx)
                with self._clock.measure():
                    scores = self.scores.bring(found[row])
            outs.append(self._answer(layer_idx, row, q[row], stale[row], selector, scores, watch))
        out = outs[0][None] if len(outs) == 1 else torch.stack(outs)
        return out.to(q.dtype)

    def _tell_rows(self, layer_idx: int, row: int, selector: FarSelector) -> None:
        """Tell a selector of the rows that it has not been told of, the step's own last."""
        start = self._works[row].start
        self._tell_missing(layer_idx, row, selector)
        new_k, new_v = self.near.rows(layer_idx, row, start, start + 1)
        selector.add_rows(new_k.float(), new_v.float())

    def _tell_missing(self, layer_idx: int, row: int, selector: FarSelector) -> None:
        """Tell a selector of the rows in host memory that it has not been told of."""
        start, rows = self._works[row].start, self._rows[row]
        first = selector.first_missing(start + 1)
        if first < start:
            num_bytes = (start - first) * self._shape[0] * self._row_bytes
            with self._clock.measure(), self._store.home.copying(KVPart.K, layer_idx, num_bytes):
                missing = rows.k_there[layer_idx, :, first:start].to(self._device).float()
            selector.add_rows(missing, rows.v_there[layer_idx, :, first:start])

    def _answer(
        self,
        layer_idx: int,
        row: int,
        q: Tensor,
        stale_q: Tensor,
        selector: FarSelector,
        scores: Tensor | None,
        watch: Callable[[int, int, FarAnswer], None] | None,
    ) -> Tensor:
        """Attend one query [Hq, D]."""
        rows, num_keys = self._rows[row], self._works[row].start + 1
        num_far = selector.num_far(num_keys)
        near_k, near_v = self.near.rows(layer_idx, row, num_far, num_keys)  # [Hkv, n, D]
        if num_far == 0:
            places, given = self._nothing
        elif scores is not None:
            places, given = selector.choose_scored(scores)
        else:
            places, given = selector.choose_far(self._query(layer_idx, row, q, stale_q), num_far)
        num_selected = places.shape[1]
        # Rows of V come over the link as they are added up.
        with self._clock.measure(), self._store.home.copying(KVPart.V, layer_idx, places.numel() * self._row_bytes):
            out = api.attend_chosen(q, near_k, near_v, places, given, rows.v_there[layer_idx], scale=self._scale)
        if watch is not None:
            probs = api.chosen_probs(q, near_k, given, scale=self._scale)
            watch(layer_idx, row, FarAnswer(places=places, probs=probs))
        num_heads, num_near = self._shape[0], num_keys - num_far
        self.num_rows[0] += 2 * num_heads * num_near
        self.num_rows[1] += num_heads * (num_selected + (num_far if scores is not None else 0))
        self._count(num_keys, num_selected + num_near)
        return out

    def _query(self, layer_idx: int, row: int, q: Tensor, stale_q: Tensor) -> DecodeRow:
        """What a selector is shown that chooses before anything is scored."""
        rows = self._rows[row]
        keys = rows.k_there[layer_idx]
        return DecodeRow(
            q=q.float(),
            stale_q=stale_q.float(),
            num_keys=self._works[row].start + 1,
            scale=self._scale,
            read_keys=lambda num: keys[:, :num].float(),
            take_keys=lambda some: self._take_keys(layer_idx, rows, some),
            note_bytes=self._note_bytes,
        )

    def _take_keys(self, layer_idx: int, rows: HostRows, places: Tensor) -> Tensor:
        with self._clock.measure(), rows.home.copying(KVPart.K, layer_idx, places.numel() * self._row_bytes):
            taken = take_rows(rows.k_there[layer_idx], places, rows.base)
        self.num_rows[1] += places.numel()
        return taken.float()

    def _note_bytes(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def _count(self, num_visible: int, num_attended: int) -> None:
        self.num_visible += self._spec.num_q_heads * num_visible
        self.num_attended += self._spec.num_q_heads * num_attended


def _context_of(work: EarlyWork) -> Callable[[], ContextRows]:
    return lambda: work.context

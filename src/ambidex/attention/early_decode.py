"""`EarlyDecode`: decode steps of HybridGen in their fast form, for steps whose requests have one new token each.

    near keys   the newest ones, on the accelerator: true scores                    ┐
    far keys    in host memory, scored by the CPU a layer ahead (`EarlyScores`)     ├ one softmax, values added up
                the K best of each KV head: their rows of V come over the link      ┘

What is selected and what it weighs is as `select/hybridgen.py` has it; steps of other forms answer each query by
itself, with a mask over all keys. Here there is no mask, and the host waits for nothing but the CPU's scores. Layers
that do not look ahead attend all keys exactly, each tier by its lane.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ambidex.attention.context_rows import ContextRows
from ambidex.attention.early_scores import EarlyScores
from ambidex.attention.row_store import RowStore, take_rows
from ambidex.attention.select.policy import DecodeRow, FarSelector, Selector
from ambidex.attention.tiered import TieredAttention
from ambidex.core.ids import KVPart, Lane, RequestId, Tier
from ambidex.core.kv_spec import num_near_rows
from ambidex.core.model_spec import ModelSpec
from ambidex.core.selection import StageTimes
from ambidex.core.step import ScheduledRequest
from ambidex.kernels import api
from ambidex.storage.host_rows import HostRows

Angles = tuple[Tensor, Tensor]


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


@dataclass(slots=True)
class _Near:
    """The newest rows of a request on the accelerator: k, v [L, Hkv, n, D], of positions `base` …"""

    k: Tensor
    v: Tensor
    base: int
    next_position: int


@dataclass(frozen=True, slots=True)
class FarAnswer:
    """What a query attended: `places` [Hkv, M] and `probs` [Hkv, G, M], far ones first."""

    out: Tensor
    places: Tensor
    probs: Tensor


class EarlyDecode:
    """Answers whole steps.

    Args:
        spec: heads, layers and head_dim (the scale is head_dim ** -0.5).
        exact: attends all keys, for layers that do not look ahead; nobody else's.
        look_ahead: makes the early queries.
        row_store: keeps rows in host memory.
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
        *,
        num_near: int,
        max_requests: int,
        is_timed: bool,
    ) -> None:
        pool = exact.pools[Tier.GPU]
        self._spec = spec
        self._exact = exact
        self._look_ahead = look_ahead
        self._num_near = num_near
        self._max_requests = max_requests
        self._pool = pool
        self._device = pool.device
        self._scale = spec.head_dim**-0.5
        self._shape = (spec.num_kv_heads, spec.group_size, spec.head_dim)
        self._store = row_store
        self._scores = EarlyScores(
            self._shape,
            dtype=pool.k.dtype,
            device=pool.device,
            max_keys=row_store.max_rows,
            memory=row_store.home.memory,
        )
        self._near: dict[RequestId, _Near] = {}
        self._clock = _TransferClock(pool.device, is_on=is_timed)
        self._works: Sequence[EarlyWork] = ()
        self._rows: list[HostRows] = []
        self._new: list[tuple[Tensor, Tensor]] = []
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
        return len(self._near)

    @property
    def row_store(self) -> RowStore:
        """Who keeps rows in host memory."""
        return self._store

    @property
    def pin_refusal(self) -> str | None:
        """Why the buffers of scores are not pinned, on a GPU."""
        return self._scores.pin_refusal

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
        self._scores.begin()
        self._clock.begin()
        self._works, self._new, self._early = (), [], {}
        self.num_bytes = self.num_attended = self.num_visible = 0
        self.num_rows = [0, 0]
        if not works or any(work.num_prompt_rows or work.num_rows != 1 for work in works):
            return False
        rows = []
        for work in works:
            found = self._store.prepare(
                work.request_id, work.start, 1, max_tokens=work.max_tokens, make_context=_context_of(work)
            )
            if found is None:
                return False
            rows.append(found)
        self._works, self._rows = works, rows
        self._make_room_near(works)
        for work, found in zip(works, rows, strict=True):
            self._follow_near(work, found)
        self._exact.begin(requests)
        return True

    def set_num_threads(self, num_threads: int) -> None:
        """How many threads score from now on; no step is under way."""
        self._scores.set_num_threads(num_threads)

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a request that ended."""
        self._store.forget(request_id)
        self._near.pop(request_id, None)

    def close(self) -> None:
        """End the thread that scores; no step may follow."""
        self._scores.close()

    def stage_times(self, forward_s: float) -> StageTimes | None:
        """Times of the last step's stages: the CPU's scores, which run beside the accelerator; the transfer of scores
        and rows; and the rest of the forward pass, but for what the accelerator's side waited for scores."""
        cpu_s, transfer_s = self._scores.cpu_s, self._clock.seconds()
        if cpu_s + transfer_s == 0:
            return None
        return StageTimes(
            gpu_s=max(0.0, forward_s - self._scores.wait_s - transfer_s), cpu_s=cpu_s, transfer_s=transfer_s
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
        Cost: some 25 launches a layer and request; the host waits for the CPU's scores, once a layer.
        """
        if angles is not None:
            q, k = api.rotate(q, *angles), api.rotate(k, *angles)
        self._ask_ahead(layer_idx, angles)
        new_k, new_v = self._pool.round(KVPart.K, k), self._pool.round(KVPart.V, v)
        self._new.append((new_k, new_v))
        for row, work in enumerate(self._works):
            near = self._near[work.request_id]
            place = work.start - near.base
            near.k[layer_idx, :, place] = new_k[row]
            near.v[layer_idx, :, place] = new_v[row]
        if isinstance(self._works[0].selectors[layer_idx], FarSelector):
            store(layer_idx, k, v)
            out = self._attend_selected(layer_idx, q, new_k, new_v, watch)
        else:
            out = self._exact.attend(layer_idx, q, k, v)
            self._count(sum(work.start + 1 for work in self._works), sum(work.start + 1 for work in self._works))
        if layer_idx == self._spec.num_layers - 1:
            self._keep_new()
        return out

    def _ask_ahead(self, layer_idx: int, angles: Angles | None) -> None:
        """Make the queries of the next layer, and have the CPU score its far keys with them."""
        following = layer_idx + 1
        if following == self._spec.num_layers:
            return
        selectors = [work.selectors[following] for work in self._works]
        far = [selector for selector in selectors if isinstance(selector, FarSelector)]
        if not far:
            return
        early = self._look_ahead.ahead(layer_idx)
        assert early is not None, "the layer's input has been seen"
        self._early[following] = early if angles is None else api.rotate(early, *angles)
        if not far[0].scores_all:
            return
        keys = [
            rows.k[following, :, : selector.num_far(work.start + 1)]
            for rows, selector, work in zip(self._rows, far, self._works, strict=True)
        ]
        num_bytes = sum(part.numel() * part.itemsize for part in keys)
        reading = self._rows[0].home.reading(KVPart.K, following, num_bytes)
        self._scores.ask(following, self._early[following], keys, self._scale, reading)

    def _attend_selected(
        self,
        layer_idx: int,
        q: Tensor,
        new_k: Tensor,
        new_v: Tensor,
        watch: Callable[[int, int, FarAnswer], None] | None,
    ) -> Tensor:
        """[B, Hq, D] of a layer that looks ahead."""
        stale = self._early.pop(layer_idx)
        found: list[Tensor] | None = None
        outs = []
        for row, work in enumerate(self._works):
            selector = work.selectors[layer_idx]
            assert isinstance(selector, FarSelector), "all requests have one policy"
            if selector.keeps_rows:
                selector.add_rows(new_k[row][:, None].float(), new_v[row][:, None].float())
            scores = None
            if selector.scores_all:
                found = found or self._scores.wait(layer_idx)
                with self._clock.measure():
                    scores = self._scores.bring(found[row])
            answer = self._answer(layer_idx, row, q[row].float(), stale[row].float(), selector, scores)
            outs.append(answer.out)
            if watch is not None:
                watch(layer_idx, row, answer)
        return torch.stack(outs).to(q.dtype)

    def _answer(
        self, layer_idx: int, row: int, q: Tensor, stale_q: Tensor, selector: FarSelector, scores: Tensor | None
    ) -> FarAnswer:
        """Attend one query [Hq, D]."""
        work, rows = self._works[row], self._rows[row]
        near = self._near[work.request_id]
        num_keys = work.start + 1
        num_far = selector.num_far(num_keys)
        places, given = self._choose(layer_idx, row, q, stale_q, selector, scores)
        with self._clock.measure(), rows.home.copying(KVPart.V, layer_idx, _bytes_of(places, rows)):
            values = take_rows(rows.v_there[layer_idx], places, rows.base)  # [Hkv, K, D]
        seen = slice(num_far - near.base, num_keys - near.base)
        near_k, near_v = near.k[layer_idx, :, seen], near.v[layer_idx, :, seen]  # [Hkv, n, D]
        true = q.view(self._shape) @ near_k.float().transpose(1, 2) * self._scale
        probs = torch.cat((given, true), dim=2).softmax(2)  # [Hkv, G, K + n]
        out = probs @ torch.cat((values, near_v), dim=1).float()
        num_heads, num_selected = places.shape
        num_near = num_keys - num_far
        self.num_rows[0] += 2 * num_heads * num_near
        self.num_rows[1] += num_heads * (num_selected + (num_far if selector.scores_all else 0))
        self._count(num_keys, num_selected + num_near)
        return FarAnswer(out=out.flatten(0, 1), places=places, probs=probs)

    def _choose(
        self, layer_idx: int, row: int, q: Tensor, stale_q: Tensor, selector: FarSelector, scores: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The far keys that a query attends, and their scores; see `FarSelector.choose_far`."""
        num_heads, group_size, _ = self._shape
        num_keys = self._works[row].start + 1
        num_far = selector.num_far(num_keys)
        if num_far == 0:
            nothing = torch.empty(num_heads, group_size, 0, device=self._device)
            return nothing[:, 0].long(), nothing
        rows = self._rows[row]
        keys = rows.k_there[layer_idx]
        query = DecodeRow(
            q=q,
            stale_q=stale_q,
            num_keys=num_keys,
            scale=self._scale,
            read_keys=lambda num: keys[:, :num].float(),
            take_keys=lambda some: self._take_keys(layer_idx, rows, some),
            note_bytes=self._note_bytes,
        )
        return selector.choose_far(query, num_far, scores)

    def _take_keys(self, layer_idx: int, rows: HostRows, places: Tensor) -> Tensor:
        with self._clock.measure(), rows.home.copying(KVPart.K, layer_idx, _bytes_of(places, rows)):
            taken = take_rows(rows.k_there[layer_idx], places, rows.base)
        self.num_rows[1] += places.numel()
        return taken.float()

    def _note_bytes(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def _count(self, num_visible: int, num_attended: int) -> None:
        self.num_visible += self._spec.num_q_heads * num_visible
        self.num_attended += self._spec.num_q_heads * num_attended

    def _make_room_near(self, works: Sequence[EarlyWork]) -> None:
        """Drop near rows of requests that are not in the step, if there were too many with its own."""
        ids = [work.request_id for work in works]
        if len(self._near.keys() | set(ids)) > self._max_requests:
            self._near = {request_id: self._near[request_id] for request_id in ids if request_id in self._near}

    def _follow_near(self, work: EarlyWork, rows: HostRows) -> None:
        """See to it that the near rows before a request's new one are on the accelerator, with room for that one."""
        near = self._near.get(work.request_id)
        first = max(0, work.start - self._num_near)
        if near is not None and near.next_position == work.start and work.start - near.base < near.k.shape[2]:
            near.next_position += 1
            return
        del near
        self._near.pop(work.request_id, None)  # given back before others are made
        num_layers, num_heads, _, head_dim = rows.k.shape
        shape = (num_layers, num_heads, num_near_rows(self._num_near), head_dim)
        made = _Near(
            k=torch.empty(shape, dtype=rows.k.dtype, device=self._device),
            v=torch.empty(shape, dtype=rows.v.dtype, device=self._device),
            base=first,
            next_position=work.start + 1,
        )
        made.k[:, :, : work.start - first] = rows.k_there[:, :, first : work.start]
        made.v[:, :, : work.start - first] = rows.v_there[:, :, first : work.start]
        self._near[work.request_id] = made

    def _keep_new(self) -> None:
        """The step's rows are rows of host memory from now on."""
        for row, rows in enumerate(self._rows):
            rows.append(torch.stack([k[row] for k, _ in self._new]), torch.stack([v[row] for _, v in self._new]))


def _bytes_of(places: Tensor, rows: HostRows) -> int:
    """Of the rows at some places."""
    return places.numel() * rows.k.shape[3] * rows.k.itemsize


def _context_of(work: EarlyWork) -> Callable[[], ContextRows]:
    return lambda: work.context


class _TransferClock:
    """Seconds of copies over the link in a step; on CUDA by events, which are read when they are asked for."""

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        self._device = device
        self._is_on = is_on
        self.begin()

    def begin(self) -> None:
        """Start anew."""
        self._host_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Book what runs inside."""
        if not self._is_on:
            yield
        elif self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
            start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            start.record(stream)
            yield
            end.record(stream)
            self._events.append((start, end))
        else:
            begin = time.perf_counter()
            yield
            self._host_s += time.perf_counter() - begin

    def seconds(self) -> float:
        """Of all; waits for the last of them."""
        if self._events:
            self._events[-1][1].synchronize()
        return self._host_s + sum(float(start.elapsed_time(end)) for start, end in self._events) / 1e3

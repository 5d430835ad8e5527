"""`EarlyDecode`: decode steps of policies that look ahead, in their fast form: requests have one new token each.

    near keys   the newest ones, on the accelerator: true scores                    ┐
    far keys    in host memory, scored by the CPU a layer ahead (`EarlyScores`)     ├ one softmax, values added up
                the K best of each KV head: their rows of V come over the link      ┘

Where the CPU scores nothing (HybridGen in mode pre, InfiniGen), partial keys on the accelerator choose, and rows of K
of the chosen keys come, too, for scores of the early query or of the true one. What is selected and what it weighs is
as `select/` has it (`AheadPolicy`, `FarSelector`); steps of other forms answer each query by itself, with a mask over
all keys. Here there is no mask, and the host waits for nothing but the CPU's scores, or where predictions say how many
keys are chosen for that number. Layers that do not look ahead attend all keys exactly, each tier by its lane.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.attention.early_requests import EarlyRequests, FixedPlan, is_decode
from ambidex.attention.early_scores import EarlyScores
from ambidex.attention.near_rows import Angles
from ambidex.attention.row_store import RowStore
from ambidex.attention.select.policy import DecodeRow, FarSelector
from ambidex.attention.tiered import TieredAttention
from ambidex.attention.ways.way import DecodeWork, Way
from ambidex.core.ids import KVPart, Lane, RequestId, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.selection import StageTimes
from ambidex.core.step import ScheduledRequest
from ambidex.kernels import api
from ambidex.kernels.cpu.native import ThreadPool


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
        way: how keys are chosen. One that looks ahead has both forms; steps of others have the fixed form, or are
            others'.
        row_store: keeps rows in host memory.
        threads: who scores on the CPU.
        num_near: newest keys before a query's own that are near.
        max_requests: whose near rows are on the accelerator, at most.
        max_scored: far keys of a step that the CPU scores, at most; 0: it scores none.
        is_timed: stages are timed.
    """

    def __init__(
        self,
        spec: ModelSpec,
        exact: TieredAttention,
        way: Way,
        row_store: RowStore,
        threads: ThreadPool,
        *,
        num_near: int,
        max_requests: int,
        max_scored: int,
        is_timed: bool,
    ) -> None:
        pool = exact.pools[Tier.GPU]
        self._exact = exact
        self._num_layers = spec.num_layers
        self._row_bytes = spec.head_dim * pool.k.itemsize
        self._look_ahead = way.look_ahead
        self._nothing = (
            torch.empty(spec.num_kv_heads, 0, dtype=torch.int64, device=pool.device),
            torch.empty(spec.num_kv_heads, spec.group_size, 0, device=pool.device),
        )
        self._scale = spec.head_dim**-0.5
        self._shape = (spec.num_kv_heads, spec.group_size, spec.head_dim)
        self._home = row_store.home
        self.scores = EarlyScores(
            self._shape,
            dtype=pool.k.dtype,
            device=pool.device,
            threads=threads,
            max_keys=max_scored,
            memory=row_store.home.memory,
        )
        self.requests = EarlyRequests(
            spec, pool, row_store, way, num_near=num_near, max_requests=max_requests, is_timed=is_timed
        )
        """The requests of the step, and what was read of their rows since `begin`."""
        self.is_timed = is_timed
        self._read_fixed: Callable[[], StageTimes] | None = None
        self._early: dict[int, Tensor] = {}

    @property
    def num_near_requests(self) -> int:
        """Requests whose near rows are on the accelerator now."""
        return self.requests.near.num_requests

    @property
    def pin_refusal(self) -> str | None:
        """Why the buffers of scores are not pinned, on a GPU."""
        return self.scores.pin_refusal

    @property
    def lane_bytes(self) -> dict[Lane, int]:
        """Bytes that layers without look-ahead read since `begin`."""
        return dict(self._exact.lane_bytes)

    def begin(self, requests: Sequence[ScheduledRequest], works: Sequence[DecodeWork]) -> bool:
        """Prepare for a step, if it has the form: one new token each, behind the prompt.

        Returns:
            False if it has not, nothing looks ahead, or there is no memory for rows: others must do it.
        Cost: a request's first step copies all its rows to host memory.
        """
        self._clear()
        if self._look_ahead is None or not works or not is_decode(works):
            return False
        rows = self.requests.prepare_rows(works)
        if rows is None:
            return False
        self.requests.begin(requests, works, rows)
        self._exact.begin(requests)
        return True

    def _clear(self) -> None:
        """Count anew, for another step."""
        self.scores.begin()
        self.requests.clear()
        self._read_fixed = None
        self._early = {}

    def plan_fixed(
        self, requests: Sequence[ScheduledRequest], works: Sequence[DecodeWork], *, max_far: int
    ) -> FixedPlan | None:
        """Prepare for a step of fixed form, if the step has it: one new token each, behind the prompt, and layers that
        choose.

        Args:
            max_far: far keys of all requests together, at most.
        Returns:
            None if it has not, or there is no memory for rows: then nothing has changed.
        Cost: as `begin`, and that of `EarlyRequests.plan_fixed`.
        """
        form = self.requests.find_form(works, max_far=max_far)
        if form is None:
            return None
        self.scores.begin()  # what a broken step has asked for reads rows, which may move now or be another's
        rows = self.requests.prepare_rows(works)
        if rows is None:
            return None
        self._clear()
        self.requests.begin(requests, works, rows)
        return self.requests.plan_fixed(form)

    def finish_fixed(self, read_times: Callable[[], StageTimes] | None, read_chosen: Callable[[], int] | None) -> None:
        """Launch: the step that was planned has been launched; keep its rows.

        Args:
            read_times: tells the times of its stages once it has ended; None: nobody timed them.
            read_chosen: see `EarlyRequests.expect_chosen`; None: the plan has counted all.
        """
        self.requests.keep_new()
        self.requests.way.keep_new(self.requests.works)
        self._read_fixed = read_times
        if read_chosen is not None:
            self.requests.expect_chosen(read_chosen)

    def set_num_threads(self, num_threads: int) -> None:
        """How many threads score from now on; no step is under way."""
        self.scores.set_num_threads(num_threads)

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a request that ended."""
        self.requests.forget(request_id)

    def close(self) -> None:
        """End the thread that scores; no step may follow."""
        self.scores.close()

    def stage_times(self, forward_s: float) -> StageTimes | None:
        """Times of the last step's stages: the CPU's scores, which run beside the accelerator; the transfer of scores
        and rows; and the rest of the forward pass, but for what the accelerator's side waited for scores."""
        if self._read_fixed is not None:
            return self._read_fixed()
        cpu_s, transfer_s = self.scores.cpu_s, self.requests.clock.seconds()
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
        Cost: some 11 launches a layer and request; the host waits for the CPU's scores, once a layer, and with `alpha`
            for the device, once a layer and request.
        """
        q, make_k = self.requests.near.add(layer_idx, q, k, v, angles)
        self._ask_ahead(layer_idx, angles)
        if self.requests.find_far(layer_idx):
            if not self.requests.near.is_stored_late:
                store(layer_idx, make_k(), v)
            out = self._attend_selected(layer_idx, q, watch)
        else:
            out = self._exact.attend(layer_idx, q, make_k(), v)
            num_keys = sum(work.start + 1 for work in self.requests.works)
            self.requests.count(num_keys, num_keys)
        if layer_idx == self._num_layers - 1:
            self.requests.keep_new()
        return out

    def _ask_ahead(self, layer_idx: int, angles: Angles | None) -> None:
        """Make the queries of the next layer, and have the CPU score its far keys with them."""
        following = layer_idx + 1
        far = self.requests.find_far(following) if following < self._num_layers else []
        if not far:
            return
        assert self._look_ahead is not None, "its policy looks ahead"
        early = self._look_ahead.ahead(layer_idx)
        assert early is not None, "the layer's input has been seen"
        self._early[following] = early if angles is None else api.rotate(early, *angles)
        if not far[0].scores_all:
            return
        num_far = [selector.num_far(work.start + 1) for selector, work in zip(far, self.requests.works, strict=True)]
        num_bytes = sum(num_far) * self._row_bytes * self._shape[0]
        self.scores.ask(
            following,
            self._early[following],
            [rows.keys[following] for rows in self.requests.rows],
            num_far,
            self._scale,
            self._home.pace(KVPart.K, following, num_bytes),
        )

    def _attend_selected(
        self, layer_idx: int, q: Tensor, watch: Callable[[int, int, FarAnswer], None] | None
    ) -> Tensor:
        """[B, Hq, D] of a layer that looks ahead."""
        stale, far = self._early.pop(layer_idx), self.requests.find_far(layer_idx)
        found: list[Tensor] | None = None
        outs = []
        for row, selector in enumerate(far):
            if selector.keeps_rows and not selector.scores_all:
                self.requests.tell_rows(layer_idx, row, selector)
            scores = None
            if selector.scores_all:
                found = found or self.scores.wait(layer_idx)
                with self.requests.clock.measure():
                    scores = self.scores.bring(found[row])
            outs.append(self._answer(layer_idx, row, q[row], stale[row], selector, scores, watch))
        out = outs[0][None] if len(outs) == 1 else torch.stack(outs)
        return out.to(q.dtype)

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
        rows, num_keys = self.requests.rows[row], self.requests.works[row].start + 1
        num_far = selector.num_far(num_keys)
        near_k, near_v = self.requests.near.rows(layer_idx, row, num_far, num_keys)  # [Hkv, n, D]
        if num_far == 0:
            places, given = self._nothing
        elif scores is not None:
            places, given = selector.choose_scored(scores)
        else:
            places, given = selector.choose_far(self._query(layer_idx, row, q, stale_q), num_far)
        num_selected = places.shape[1]
        # Rows of V come over the link as they are added up.
        with self.requests.clock.measure(), self._home.copying(KVPart.V, layer_idx, places.numel() * self._row_bytes):
            out = api.attend_chosen(q, near_k, near_v, places, given, rows.v_there[layer_idx], scale=self._scale)
        if watch is not None:
            probs = api.chosen_probs(q, near_k, given, scale=self._scale)
            watch(layer_idx, row, FarAnswer(places=places, probs=probs))
        num_heads, num_near = self._shape[0], num_keys - num_far
        self.requests.num_rows[0] += 2 * num_heads * num_near
        self.requests.num_rows[1] += num_heads * (num_selected + (num_far if scores is not None else 0))
        self.requests.count(num_keys, num_selected + num_near)
        return out

    def _query(self, layer_idx: int, row: int, q: Tensor, stale_q: Tensor) -> DecodeRow:
        """What a selector is shown that chooses before anything is scored."""
        keys = self.requests.rows[row].k_there[layer_idx]
        return DecodeRow(
            q=q.float(),
            stale_q=stale_q.float(),
            num_keys=self.requests.works[row].start + 1,
            scale=self._scale,
            read_keys=lambda num: keys[:, :num].float(),
            take_keys=lambda some: self.requests.take_keys(layer_idx, row, some),
            note_bytes=self.requests.note_bytes,
        )

"""`SelectiveAttention`: prompts attend all keys, decode queries those that a policy chooses.

A token is a decode query when it stands behind the prompt, whether it comes alone or, after a preemption, among others:
then each is attended with the state that the ones before it left, as it was the first time. So an answer depends
neither on how it is cut into steps nor on who shares them.

    prompt rows   TieredAttention, exactly; then the policy is shown what it needs of them
    decode rows   stored; then for each row: choose, read the chosen rows, softmax over them, tell the policy

This is the reference path, in plain torch on the accelerator: rows of the DRAM tier are brought there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ambidex.attention.decode_queries import Choice, DecodeQueries
from ambidex.attention.early_decode import EarlyDecode, FarAnswer
from ambidex.attention.early_requests import FixedPlan
from ambidex.attention.row_store import RowStore
from ambidex.attention.select.policy import Policy
from ambidex.attention.selected_rows import SelectedRows
from ambidex.attention.shown_prompts import ShownPrompts
from ambidex.attention.step_requests import KeptState, RequestStates, Work, find_new_rows, prepare_rows
from ambidex.attention.tiered import TieredAttention
from ambidex.core.errors import ShapeError
from ambidex.core.ids import Lane, RequestId, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.selection import SelectionSetting, StageTimes
from ambidex.core.step import NewRequest, ScheduledRequest, SelectionFigures
from ambidex.kernels import api
from ambidex.storage.kv_pool import KVPool


class LookAhead(Protocol):
    """Knows what each layer's attention was given in this step."""

    def query(self, layer_idx: int) -> Tensor | None:
        """Queries [T, Hq, D] of a layer made from the input of the layer before, not rotated; None: there is none."""
        ...


class SelectiveAttention:
    """What `models.base.AttentionOp` asks for, with the keys of decode queries chosen by a policy.

    Args:
        exact: attends for prompts, and owns the pools.
        look_ahead: for policies that need it.
        verify_every: each so many-th choice is computed again over all keys and held against its bound; 0: none is.
        watch: is told each choice.
        early: answers steps of the form that it knows; None: none are.
        row_store: keeps rows, from which those that are chosen are read; None: they are read from the pools.
    """

    def __init__(
        self,
        policy: Policy,
        spec: ModelSpec,
        exact: TieredAttention,
        *,
        look_ahead: LookAhead | None = None,
        verify_every: int = 0,
        watch: Callable[[Choice], None] | None = None,
        early: EarlyDecode | None = None,
        row_store: RowStore | None = None,
    ) -> None:
        self._early = early
        self._row_store = row_store
        self._is_early = False
        self._policy = policy
        self._spec = spec
        self._exact = exact
        self._look_ahead = look_ahead
        self._device = exact.pools[Tier.GPU].device
        self._states = RequestStates(policy, spec.num_layers, exact.pools)
        self._rows = SelectedRows(spec, exact.pools, policy.dtype)
        self._queries = DecodeQueries(
            policy, spec, self._rows, device=self._device, verify_every=verify_every, watch=watch
        )
        self._prompts = ShownPrompts(policy, spec, exact.pools[Tier.GPU], order=exact.settle, settle=self.settle)
        self.begin(())

    @property
    def pools(self) -> Mapping[Tier, KVPool]:
        """The pools of both tiers."""
        return self._exact.pools

    @property
    def lane_bytes(self) -> Mapping[Lane, int]:
        """Bytes that were read since `begin`: rows of K and V of each tier by its lane, as the policy asked for them; a
        policy's copies count for the GPU lane.

        Cost: waits for the device.
        """
        parts = [self._exact.lane_bytes, self._rows.lane_bytes()]
        if self._is_early and self._early is not None:
            self._early.requests.count_chosen()
            parts += [
                self._rows.bytes_of(self._early.requests.num_rows),
                self._early.lane_bytes,
                {Lane.GPU: self._early.requests.num_bytes},
            ]
        read: dict[Lane, int] = {}
        for part in parts:
            for lane, num_bytes in part.items():
                read[lane] = read.get(lane, 0) + num_bytes
        return read

    @property
    def selection(self) -> SelectionFigures:
        """What was chosen since `begin`.

        Cost: waits for the device.
        """
        if self._is_early and self._early is not None:
            self._early.requests.count_chosen()
            num_choices = self._spec.num_layers * self._spec.num_q_heads * len(self._works)
            return SelectionFigures(
                num_choices=num_choices,
                num_visible=self._early.requests.num_visible,
                num_attended=self._early.requests.num_attended,
            )
        return self._queries.figures()

    def add(self, request: NewRequest) -> None:
        """Make a request known before its first step."""
        self._states.add(request)

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a request that ended."""
        self._states.forget(request_id)
        if self._early is not None:
            self._early.forget(request_id)
        if self._row_store is not None:
            self._row_store.forget(request_id)

    def close(self) -> None:
        """End the threads of its own; no step may follow."""
        if self._early is not None:
            self._early.close()

    @property
    def early(self) -> EarlyDecode | None:
        """Who answers steps of one token a request, with scores made a layer ahead; None: nobody."""
        return self._early

    @property
    def row_store(self) -> RowStore | None:
        """Who keeps rows, of whichever form of steps; None: nobody."""
        return self._early.requests.row_store if self._early is not None else self._row_store

    @property
    def num_row_refusals(self) -> int:
        """Requests so far for whose rows the machine had no memory."""
        return self.row_store.num_refusals if self.row_store is not None else 0

    @property
    def has_prompts(self) -> bool:
        """Tokens of a prompt are among those of the step."""
        return any(work.num_prompt_rows for work in self._works)

    def verify_every(self, num_choices: int) -> None:
        """From now on each so many-th choice is computed again over all keys and held against its bound; 0: none is."""
        self._queries.verify_every(num_choices)

    def skip_prompts(self) -> None:
        """Take the step's prompts as computed, with K and V that lie in the pools: for benchmarks, which fill them with
        random numbers. Selectors that must see queries are shown random ones, as large as the keys."""
        assert all(not work.decode_rows for work in self._works), "the step has nothing but prompts"
        for work in self._works:
            self._prompts.show_random(work)
        self._states.commit(self._works)

    def keep(self, request_id: RequestId) -> KeptState:
        """What is kept of a request between steps, to `restore` it later."""
        return self._states.keep(request_id)

    def restore(self, request_id: RequestId, kept: KeptState) -> None:
        """Take a request back to where it was: steps since then may be computed again, under another setting, if its
        blocks are still its own. What grew since is dropped."""
        self._states.restore(request_id, kept)

    def apply(self, setting: SelectionSetting) -> None:
        """What the policy shall select from the next step on."""
        self._policy.apply(setting)

    def stage_times(self, forward_s: float) -> StageTimes | None:
        """Times of the stages of the last step, if all its tokens were decode queries and the policy asks for times.

        Args:
            forward_s: seconds of the whole forward pass.
        """
        if any(work.num_prompt_rows for work in self._works):
            return None
        if self._is_early and self._early is not None:
            return self._early.stage_times(forward_s)
        return self._queries.times(forward_s)

    def kept(self, request_id: RequestId, layer_idx: int) -> Tensor | None:
        """[H, S] bool: False where a key of a request is dropped for good; None: nothing is."""
        return self._states.kept(request_id, layer_idx)

    def begin(self, requests: Sequence[ScheduledRequest]) -> None:
        """Prepare for a step whose T tokens are those of `requests`, in their order.

        Raises:
            InternalError: a request is not known, or its tokens do not follow those that were computed.
        """
        self._rows.begin()
        self._queries.begin()
        self._works: list[Work] = []
        self._num_tokens = 0
        prompts = []
        for request in requests:
            work = self._states.open(request, first_row=self._num_tokens)
            self._works.append(work)
            self._num_tokens += work.num_rows
            if work.num_prompt_rows:
                prompts.append(replace(request, token_ids=request.token_ids[: work.num_prompt_rows]))
        self._exact.begin(prompts)
        self._is_early = self._early is not None and self._early.begin(requests, self._works)
        if self._row_store is not None and not self._is_early:
            prepare_rows(self._works, self._row_store)
        chosen = [row for work in self._works for row in range(work.prompt_rows.start, work.prompt_rows.stop)]
        self._prompt_rows = (
            None if len(chosen) == self._num_tokens else torch.tensor(chosen, dtype=torch.int64, device=self._device)
        )
        self._new_rows = find_new_rows(self._works, self._exact.pools, self._device)

    def plan_fixed(self, requests: Sequence[ScheduledRequest], *, max_far: int) -> FixedPlan | None:
        """Prepare for a step of fixed form, which others compute, if the step has it; see `EarlyDecode.plan_fixed`.

        Args:
            requests: with one new token each.
        Returns:
            None if it has not, or somebody is told each choice; then nothing has changed.
        Raises:
            InternalError: see `begin`.
        """
        if self._early is None or self._queries.is_watched:
            return None
        works = [self._states.open(request, first_row=row) for row, request in enumerate(requests)]
        plan = self._early.plan_fixed(requests, works, max_far=max_far)
        if plan is not None:
            self._works, self._num_tokens, self._is_early = works, len(works), True
        return plan

    def finish_fixed(
        self,
        read_times: Callable[[], StageTimes] | None = None,
        read_chosen: Callable[[], int] | None = None,
    ) -> None:
        """Launch: keep what the step that was planned has given; it was launched as a whole.

        Args:
            read_times, read_chosen: see `EarlyDecode.finish_fixed`.
        """
        assert self._early is not None, "a step was planned"
        self._early.finish_fixed(read_times, read_chosen)
        self._states.commit(self._works)

    @property
    def fixed_lane_bytes(self) -> dict[Lane, int]:
        """Bytes that a step of fixed form read in layers that look ahead; see `lane_bytes`."""
        assert self._early is not None, "a step was planned"
        self._early.requests.count_chosen()
        read = dict(self._rows.bytes_of(self._early.requests.num_rows))
        read[Lane.GPU] = read.get(Lane.GPU, 0) + self._early.requests.num_bytes
        return read

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Store K and V of the step; prompt tokens attend all keys, decode queries what the policy chooses.

        Args and returns: as `TieredAttention.attend`.
        Raises:
            ShapeError: T is not what `begin` was told, or the tensors do not fit the pools.
            BoundError: an output was computed again and differs by more than its bound.
        Cost: waits for the device, several times for each decode query.
        """
        if q.shape[0] != self._num_tokens:
            raise ShapeError(f"q: expected T={self._num_tokens} tokens of this step, got {q.shape[0]}")
        if self._is_early and self._early is not None:
            return self._attend_early(self._early, layer_idx, q, k, v, angles)
        stale_q = self._look_ahead.query(layer_idx) if self._look_ahead is not None else None
        if angles is not None:
            q, k = api.rotate(q, *angles), api.rotate(k, *angles)
            stale_q = None if stale_q is None else api.rotate(stale_q, *angles)
        out = self._attend_prompts(layer_idx, q, k, v)
        self._store_new(layer_idx, k, v)
        for work in self._works:
            self._prompts.show(layer_idx, work, q, k, v)
            if work.decode_rows:
                if work.num_prompt_rows:
                    self.settle()  # the rows that were just stored are read, those in DRAM by the host
                self._queries.attend(layer_idx, work, q, k, v, stale_q, out)
        if layer_idx == self._spec.num_layers - 1:
            self._states.commit(self._works)
        return out

    def _attend_early(
        self,
        early: EarlyDecode,
        layer_idx: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        angles: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        watch = self._tell if self._queries.is_watched else None
        out = early.attend(layer_idx, q, k, v, angles=angles, store=self._store_new, watch=watch)
        if layer_idx == self._spec.num_layers - 1:
            self._states.commit(self._works)
        return out

    def _tell(self, layer_idx: int, row: int, answer: FarAnswer) -> None:
        self._queries.tell(layer_idx, self._works[row], answer)

    def _store_new(self, layer_idx: int, k: Tensor, v: Tensor) -> None:
        """Store the rows of decode queries."""
        for tier, rows, slots in self._new_rows:
            pool = self._exact.pools[tier]
            pool.store(layer_idx, slots, k[rows].to(pool.device), v[rows].to(pool.device))

    def settle(self) -> None:
        """Wait for what the device was given: rows that were just stored may be read by the host, and after a step that
        broke off blocks and rows in host memory may soon be another's, or nobody's."""
        self._exact.settle()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _attend_prompts(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[T, Hq, D], whose decode rows are still to be filled."""
        rows = self._prompt_rows
        if rows is None:
            return self._exact.attend(layer_idx, q, k, v)
        out = torch.empty_like(q)
        if len(rows):
            out[rows] = self._exact.attend(layer_idx, q[rows], k[rows], v[rows])
        return out

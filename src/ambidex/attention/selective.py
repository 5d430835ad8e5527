"""`SelectiveAttention`: prompts attend all keys, decode queries those that a policy chooses.

A token is a decode query when it stands behind the prompt, whether it comes alone or, after a preemption, among others:
then each is attended with the state that the ones before it left, as it was the first time. So an answer depends
neither on how it is cut into steps nor on who shares them.

    prompt rows   TieredAttention, exactly; then the policy is shown what it needs of them
    decode rows   stored; then for each row: choose, read the chosen rows, softmax over them, tell the policy

This is the reference path, in plain torch on the accelerator: rows of the DRAM tier are brought there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import torch
from torch import Tensor

from ambidex.attention.context_rows import TIERS, ContextRows
from ambidex.attention.early_decode import EarlyDecode, FarAnswer
from ambidex.attention.row_store import RowStore, take_rows
from ambidex.attention.select.policy import (
    AllKeys,
    DecodeRow,
    Need,
    Policy,
    PolicyRequest,
    Positions,
    PromptRows,
    Selection,
    Selector,
    find_places,
)
from ambidex.attention.selection_log import SelectionLog
from ambidex.attention.stage_clock import StageClock
from ambidex.attention.tiered import TieredAttention
from ambidex.core.errors import InternalError, ShapeError
from ambidex.core.ids import KVPart, Lane, RequestId, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.selection import SelectionSetting, StageTimes
from ambidex.core.step import BlockRef, NewRequest, ScheduledRequest, SelectionFigures
from ambidex.kernels import api
from ambidex.layers.rope import compute_inv_freq
from ambidex.storage.host_rows import HostRows
from ambidex.storage.kv_pool import KVPool

SHOWN_QUERIES: Final = 64
"""Of a prompt that is not computed."""
MAX_PROMPT_SCORES: Final = 1 << 24
"""Scores of a prompt's queries that are held at once: 64 MiB in fp32."""


class LookAhead(Protocol):
    """Knows what each layer's attention was given in this step."""

    def query(self, layer_idx: int) -> Tensor | None:
        """Queries [T, Hq, D] of a layer made from the input of the layer before, not rotated; None: there is none."""
        ...


@dataclass(slots=True, kw_only=True)
class _State:
    """What is kept of a request from its first step until it is forgotten."""

    request: PolicyRequest
    selectors: list[Selector] = field(default_factory=list)
    num_computed: int = 0
    """Tokens that the selectors have taken in."""


@dataclass(frozen=True, slots=True)
class KeptState:
    """A request between two steps."""

    selectors: tuple[Selector, ...]
    num_computed: int


@dataclass(slots=True, kw_only=True)
class _Work:
    """One request of a step. Rows are places among the step's T tokens; `start` is the position of the first."""

    request_id: RequestId
    state: _State
    start: int
    first_row: int
    num_prompt_rows: int
    num_rows: int
    blocks: Sequence[BlockRef]
    make_context: Callable[[], ContextRows]
    selectors: list[Selector]
    """Copies of the state's, which take their place when the step is at its end."""
    made: ContextRows | None = None
    rows: HostRows | None = None
    """K and V as rows in host memory; None: they are read from the pools."""

    @property
    def context(self) -> ContextRows:
        """K and V by position; made when it is first asked for."""
        if self.made is None:
            self.made = self.make_context()
        return self.made

    @property
    def prompt_rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_prompt_rows)

    @property
    def decode_rows(self) -> range:
        return range(self.first_row + self.num_prompt_rows, self.first_row + self.num_rows)

    def num_keys(self, row: int) -> int:
        """Keys that the query in a row sees, its own included."""
        return self.start + row - self.first_row + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attended:
    """What a decode query got: `out` [Hq, D], `lse` [Hq], `mask` [Hkv, G, S] bool, and `probs` over `places`."""

    out: Tensor
    lse: Tensor
    mask: Tensor
    probs: Tensor  # [Hkv, G, M]
    places: Tensor  # [Hkv, M]

    def spread(self) -> Tensor:
        """Probabilities by position, [Hq, S]; 0 where nothing was attended."""
        num_kv_heads, group_size, num_keys = self.mask.shape
        spread = torch.zeros((num_kv_heads, group_size, num_keys), dtype=self.probs.dtype, device=self.probs.device)
        # Padding has probability 0, so it adds nothing to the key at its place.
        spread.scatter_add_(2, self.places[:, None].expand(self.probs.shape), self.probs)
        return spread.flatten(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What one decode query attended in one layer: `mask` [Hq, S] bool, `probs` [Hq, S], and its selector after it."""

    request_id: RequestId
    layer_idx: int
    position: int
    mask: Tensor
    probs: Tensor
    selector: Selector


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
        self._watch = watch
        self._early = early
        self._row_store = row_store
        self._is_early = False
        self._policy = policy
        self._spec = spec
        self._exact = exact
        self._look_ahead = look_ahead
        self._scale = spec.head_dim**-0.5
        self._block_size = exact.pools[Tier.GPU].spec.block_size
        self._device = exact.pools[Tier.GPU].device
        is_turned = policy.positions is Positions.IN_CACHE and spec.rope is not None
        self._inv_freq = compute_inv_freq(spec.rope).to(self._device) if is_turned and spec.rope is not None else None
        self._states: dict[RequestId, _State] = {}
        self._log = SelectionLog(self._device, verify_every=verify_every)
        self._clock = StageClock(self._device, is_on=Need.TIMES in policy.needs)
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
        rows = self._num_rows.tolist()  # by tier
        read = dict(self._exact.lane_bytes)
        for count, tier, lane in zip(rows, TIERS, (Lane.GPU, Lane.CPU), strict=True):
            spec = self._exact.pools[tier].spec
            read[lane] = read.get(lane, 0) + count * spec.bytes_per_token_layer // (2 * spec.num_kv_heads)
        read[Lane.GPU] += self._num_own_bytes
        if self._is_early and self._early is not None:
            self._add_early_bytes(read, self._early)
        return read

    def _add_early_bytes(self, read: dict[Lane, int], early: EarlyDecode) -> None:
        for count, tier, lane in zip(early.num_rows, TIERS, (Lane.GPU, Lane.CPU), strict=True):
            spec = self._exact.pools[tier].spec
            read[lane] += count * spec.bytes_per_token_layer // (2 * spec.num_kv_heads)
        for lane, num_bytes in early.lane_bytes.items():
            read[lane] = read.get(lane, 0) + num_bytes
        read[Lane.GPU] += early.num_bytes

    @property
    def selection(self) -> SelectionFigures:
        """What was chosen since `begin`.

        Cost: waits for the device.
        """
        if self._is_early and self._early is not None:
            num_choices = self._spec.num_layers * self._spec.num_q_heads * len(self._works)
            return SelectionFigures(
                num_choices=num_choices, num_visible=self._early.num_visible, num_attended=self._early.num_attended
            )
        return self._log.figures()

    def add(self, request: NewRequest) -> None:
        """Make a request known before its first step."""
        self._states[request.request_id] = _State(
            request=PolicyRequest(
                num_prompt_tokens=len(request.prompt_token_ids), max_output_tokens=request.params.max_output_tokens
            )
        )

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a request that ended."""
        self._states.pop(request_id, None)
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
    def has_prompts(self) -> bool:
        """Tokens of a prompt are among those of the step."""
        return any(work.num_prompt_rows for work in self._works)

    def verify_every(self, num_choices: int) -> None:
        """From now on each so many-th choice is computed again over all keys and held against its bound; 0: none is."""
        self._log = SelectionLog(self._device, verify_every=num_choices)

    def skip_prompts(self) -> None:
        """Take the step's prompts as computed, with K and V that lie in the pools: for benchmarks, which fill them with
        random numbers. Selectors that must see queries are shown random ones, as large as the keys."""
        assert all(not work.decode_rows for work in self._works), "the step has nothing but prompts"
        needs = self._policy.needs
        for work in self._works if needs & {Need.ROWS, Need.PROMPT} else ():
            for layer_idx, selector in enumerate(work.selectors):
                if not isinstance(selector, AllKeys):
                    k, v = (work.context.read(part, layer_idx, torch.float32) for part in KVPart)
                    selector.add_rows(k[:, work.start :], v[:, work.start :])
                    shape = (min(work.num_rows, SHOWN_QUERIES), self._spec.num_q_heads, self._spec.head_dim)
                    selector.see_prompt(
                        PromptRows(q=torch.randn(shape, device=self._device) * k.std(), k=k, scale=self._scale)
                    )
        self._commit()

    def keep(self, request_id: RequestId) -> "KeptState":
        """What is kept of a request between steps, to `restore` it later."""
        state = self._states[request_id]
        return KeptState(tuple(state.selectors), state.num_computed)

    def restore(self, request_id: RequestId, kept: "KeptState") -> None:
        """Take a request back to where it was: steps since then may be computed again, under another setting, if its
        blocks are still its own. What grew since is dropped."""
        state = self._states[request_id]
        state.selectors, state.num_computed = list(kept.selectors), kept.num_computed

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
        return self._clock.times(forward_s)

    def kept(self, request_id: RequestId, layer_idx: int) -> Tensor | None:
        """[H, S] bool: False where a key of a request is dropped for good; None: nothing is."""
        return self._states[request_id].selectors[layer_idx].kept

    def begin(self, requests: Sequence[ScheduledRequest]) -> None:
        """Prepare for a step whose T tokens are those of `requests`, in their order.

        Raises:
            InternalError: a request is not known, or its tokens do not follow those that were computed.
        """
        self._num_own_bytes = 0
        self._num_rows = torch.zeros(len(TIERS), dtype=torch.int64, device=self._device)
        self._log.begin()
        self._clock.begin()
        self._works: list[_Work] = []
        self._num_tokens = 0
        prompts = []
        for request in requests:
            work = self._open(request)
            self._works.append(work)
            self._num_tokens += work.num_rows
            if work.num_prompt_rows:
                prompts.append(replace(request, token_ids=request.token_ids[: work.num_prompt_rows]))
        self._exact.begin(prompts)
        self._is_early = self._early is not None and self._early.begin(requests, self._works)
        if self._row_store is not None and not self._is_early:
            self._prepare_rows(self._row_store)
        chosen = [row for work in self._works for row in range(work.prompt_rows.start, work.prompt_rows.stop)]
        self._prompt_rows = None if len(chosen) == self._num_tokens else self._index(chosen)
        self._new_rows = self._find_new_rows()

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
            self._show_prompt(layer_idx, work, q, k, v)
            if work.decode_rows:
                self._attend_decode(layer_idx, work, q, k, v, stale_q, out)
        if layer_idx == self._spec.num_layers - 1:
            self._commit()
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
        watch = None if self._watch is None else self._tell
        out = early.attend(layer_idx, q, k, v, angles=angles, store=self._store_new, watch=watch)
        if layer_idx == self._spec.num_layers - 1:
            self._commit()
        return out

    def _tell(self, layer_idx: int, row: int, answer: FarAnswer) -> None:
        """Tell whoever watches what a row attended."""
        assert self._watch is not None, "someone watches"
        work, near = self._works[row], answer.probs.shape[2] - answer.places.shape[1]
        num_keys = work.num_keys(work.first_row)
        newest = torch.arange(num_keys - near, num_keys, device=answer.places.device)
        places = torch.cat((answer.places, newest.expand(len(answer.places), -1)), dim=1)[:, None]
        places = places.expand(answer.probs.shape)  # [Hkv, G, K + near]
        probs = torch.zeros((*places.shape[:2], num_keys), dtype=answer.probs.dtype, device=places.device)
        self._watch(
            Choice(
                request_id=work.request_id,
                layer_idx=layer_idx,
                position=num_keys - 1,
                mask=torch.zeros_like(probs, dtype=torch.bool).scatter_(2, places, True).flatten(0, 1),
                probs=probs.scatter_(2, places, answer.probs).flatten(0, 1),
                selector=work.selectors[layer_idx],
            )
        )

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

    def _open(self, request: ScheduledRequest) -> _Work:
        state = self._states.get(request.request_id)
        if state is None:
            raise InternalError(f"request {request.request_id} was not made known to the policy")
        if request.start == 0:  # its first step, or the first after a preemption
            state.num_computed = 0
            state.selectors = [
                self._policy.open(state.request, layer_idx) for layer_idx in range(self._spec.num_layers)
            ]
        elif not state.selectors or state.num_computed != request.start:
            raise InternalError(
                f"request {request.request_id}: a step begins at token {request.start}, its policy has seen "
                f"{state.num_computed}: K and V that another request computed cannot be used with a policy"
            )
        num_rows = len(request.token_ids)
        return _Work(
            request_id=request.request_id,
            state=state,
            start=request.start,
            first_row=self._num_tokens,
            num_prompt_rows=min(num_rows, max(0, state.request.num_prompt_tokens - request.start)),
            num_rows=num_rows,
            blocks=request.blocks,
            make_context=lambda: ContextRows(request.blocks, request.start + num_rows, pools=self._exact.pools),
            selectors=[selector.snapshot() for selector in state.selectors],
        )

    def _prepare_rows(self, store: RowStore) -> None:
        """Rows of the requests that have no prompt in this step."""
        for work in self._works:
            if not work.num_prompt_rows:
                work.rows = store.prepare(work.request_id, work.start, work.num_rows, work.make_context)

    def _find_new_rows(self) -> list[tuple[Tier, Tensor, Tensor]]:
        """Where the decode queries' own rows go: tier, rows among T, slots on the tier's device."""
        rows: dict[Tier, list[int]] = {tier: [] for tier in TIERS}
        slots: dict[Tier, list[int]] = {tier: [] for tier in TIERS}
        for work in self._works:
            if not work.decode_rows:
                continue
            for row in work.decode_rows:
                place, offset = divmod(work.num_keys(row) - 1, self._block_size)
                block = work.blocks[place]
                rows[block.tier].append(row)
                slots[block.tier].append(block.block_id * self._block_size + offset)
        return [
            (tier, self._index(rows[tier]), self._index(slots[tier]).to(self._exact.pools[tier].device))
            for tier in TIERS
            if rows[tier]
        ]

    def _attend_prompts(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[T, Hq, D], whose decode rows are still to be filled."""
        rows = self._prompt_rows
        if rows is None:
            return self._exact.attend(layer_idx, q, k, v)
        out = torch.empty_like(q)
        if len(rows):
            out[rows] = self._exact.attend(layer_idx, q[rows], k[rows], v[rows])
        return out

    def _show_prompt(self, layer_idx: int, work: _Work, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Tell the policy what it needs of the prompt's tokens."""
        rows, selector, needs = work.prompt_rows, work.selectors[layer_idx], self._policy.needs
        if not work.num_prompt_rows or work.state.request.max_output_tokens == 1:  # then nothing is decoded
            return
        if Need.ROWS in needs:
            selector.add_rows(*self._as_kept(k[rows], v[rows]))
        if Need.PROMPT in needs:
            self.settle()  # the rows that were just stored are read, those in DRAM by the host
            keys = work.context.read(KVPart.K, layer_idx, torch.float32)
            piece = max(1, MAX_PROMPT_SCORES // (self._spec.num_q_heads * work.context.num_keys))
            for first in range(rows.start, rows.stop, piece):
                last = min(first + piece, rows.stop)
                seen = keys[:, : work.num_keys(last - 1)]
                selector.see_prompt(PromptRows(q=q[first:last].float(), k=seen, scale=self._scale))

    def _attend_decode(
        self, layer_idx: int, work: _Work, q: Tensor, k: Tensor, v: Tensor, stale_q: Tensor | None, out: Tensor
    ) -> None:
        """Answer a request's decode queries, one after the other, into `out`."""
        if work.num_prompt_rows:
            self.settle()  # the rows that were just stored are read, those in DRAM by the host
        selector, dtype = work.selectors[layer_idx], self._policy.dtype
        if work.rows is not None:
            self._write_rows(layer_idx, work, work.rows, k, v)
        keys = _Once(lambda: self._read(work, KVPart.K, layer_idx, dtype))
        for row in work.decode_rows:
            num_keys = work.num_keys(row)
            if Need.ROWS in self._policy.needs:
                own = torch.full((self._spec.num_kv_heads, 1), num_keys - 1, device=self._device)
                selector.add_rows(*(self._take(work, part, layer_idx, own, torch.float32) for part in KVPart))
            query = DecodeRow(
                q=q[row].to(dtype),
                stale_q=None if stale_q is None else stale_q[row].to(dtype),
                num_keys=num_keys,
                scale=self._scale,
                read_keys=self._reading(work, keys),
                take_keys=self._taking(work, layer_idx),
                note_bytes=self._note_bytes,
            )
            with self._clock.measure("scores"):
                selection = selector.select(query)
            attended = self._attend_selected(layer_idx, work, query, selection)
            if Need.PROBS in self._policy.needs:
                selector.attended(attended.spread())
            if self._watch is not None:
                self._watch(
                    Choice(
                        request_id=work.request_id,
                        layer_idx=layer_idx,
                        position=num_keys - 1,
                        mask=attended.mask.flatten(0, 1),
                        probs=attended.spread(),
                        selector=selector,
                    )
                )
            measure = selector.measure(attended.out, attended.lse)
            self._log.add(attended.mask, measure)
            if measure is not None and self._log.is_verified():
                truth = self._attend_all(layer_idx, work, query.q.double(), num_keys)
                self._log.verify(attended.out, truth, measure, place=f"layer {layer_idx}, token {num_keys - 1}")
            out[row] = attended.out.to(out.dtype)

    def _attend_selected(self, layer_idx: int, work: _Work, query: DecodeRow, selection: Selection) -> _Attended:
        """Softmax over the chosen keys of one query."""
        num_kv_heads, group_size, num_keys = self._spec.num_kv_heads, self._spec.group_size, query.num_keys
        mask = _by_group(selection.mask, num_kv_heads, group_size).clone()  # [Hkv, G, S]
        mask[:, :, -1] = True
        union = mask.any(1)  # [Hkv, S]: each row is read once for the heads that share it
        places, is_real = find_places(union)
        taken = places[:, None].expand(-1, group_size, -1)  # [Hkv, G, M]
        scores = self._scores(layer_idx, work, query, selection, places, is_real, taken, union)
        scores = scores.masked_fill(~(mask.gather(2, taken) & is_real[:, None]), -torch.inf)
        with self._clock.measure("transfer"):
            values = self._take(work, KVPart.V, layer_idx, places, self._policy.dtype)
        self._count(work, union)
        probs = scores.softmax(-1)
        return _Attended(
            out=(probs @ values).flatten(0, 1),
            lse=scores.logsumexp(-1).flatten(),
            mask=mask.expand(num_kv_heads, group_size, num_keys),
            probs=probs,
            places=places,
        )

    def _scores(
        self,
        layer_idx: int,
        work: _Work,
        query: DecodeRow,
        selection: Selection,
        places: Tensor,
        is_real: Tensor,
        taken: Tensor,
        union: Tensor,
    ) -> Tensor:
        """[Hkv, G, M]: the policy's scores where it gives any, else q·k · scale of the rows, which are read."""
        num_kv_heads, group_size = self._spec.num_kv_heads, self._spec.group_size
        given = None
        if selection.scores is not None:
            given = _by_group(selection.scores, num_kv_heads, group_size).gather(2, taken)
            if selection.is_scored is None:
                return given
        rows = self._take(work, KVPart.K, layer_idx, places, self._policy.dtype)  # [Hkv, M, D]
        self._count(work, union)
        if self._inv_freq is not None:
            rows = self._turn(rows, places, is_real, query.num_keys)
        scores = query.q.view(num_kv_heads, group_size, -1) @ rows.transpose(1, 2) * query.scale
        if given is None or selection.is_scored is None:
            return scores
        return torch.where(_by_group(selection.is_scored, num_kv_heads, group_size).gather(2, taken), given, scores)

    def _turn(self, rows: Tensor, places: Tensor, is_real: Tensor, num_keys: int) -> Tensor:
        """Turn keys on to the positions at which they would stand side by side, the query's own last.

        A rotation by the difference of two positions is one more rotation; the query stays where it is.
        """
        assert self._inv_freq is not None, "only keys with rotary positions are turned"
        num_heads, num_places, head_dim = rows.shape
        ranks = torch.arange(num_places, device=rows.device)
        steps = num_keys - is_real.sum(1, keepdim=True) + ranks - places  # [Hkv, M]
        angles = steps.flatten().to(torch.float32)[:, None] * self._inv_freq
        flat = rows.reshape(-1, 1, head_dim)
        return api.rotate(flat, angles.cos(), angles.sin()).view(num_heads, num_places, head_dim)

    def _attend_all(self, layer_idx: int, work: _Work, q: Tensor, num_keys: int) -> Tensor:
        """The exact answer, [Hq, D] fp64."""
        k, v = (self._read(work, part, layer_idx, torch.float64)[:, :num_keys] for part in KVPart)
        grouped = q.view(self._spec.num_kv_heads, self._spec.group_size, -1)
        probs = (grouped @ k.transpose(1, 2) * self._scale).softmax(-1)
        out: Tensor = probs @ v
        return out.flatten(0, 1)

    def _write_rows(self, layer_idx: int, work: _Work, rows: HostRows, k: Tensor, v: Tensor) -> None:
        """Write a request's new rows of a layer behind those that are there."""
        new, to = slice(work.first_row, work.first_row + work.num_rows), slice(work.start, work.start + work.num_rows)
        pool = self._exact.pools[Tier.GPU]
        rows.k_there[layer_idx, :, to] = pool.round(KVPart.K, k[new]).transpose(0, 1)
        rows.v_there[layer_idx, :, to] = pool.round(KVPart.V, v[new]).transpose(0, 1)

    def _take(self, work: _Work, part: KVPart, layer_idx: int, places: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of K or V at some places [Hkv, M], on the device: [Hkv, M, D]."""
        if work.rows is None:
            return work.context.take(part, layer_idx, places, dtype)
        there = work.rows.k_there if part is KVPart.K else work.rows.v_there
        num_bytes = places.numel() * there.shape[3] * there.itemsize
        with work.rows.home.copying(part, layer_idx, num_bytes):
            return take_rows(there[layer_idx], places, work.rows.base).to(dtype)

    def _read(self, work: _Work, part: KVPart, layer_idx: int, dtype: torch.dtype) -> Tensor:
        """All rows of K or V, on the device: [Hkv, S, D]."""
        if work.rows is None:
            return work.context.read(part, layer_idx, dtype)
        there = work.rows.k_there if part is KVPart.K else work.rows.v_there
        rows = there[layer_idx, :, : work.start + work.num_rows]
        with work.rows.home.copying(part, layer_idx, rows.numel() * rows.itemsize):
            return rows.to(self._device, dtype)

    def _as_kept(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [n, Hkv, D] as the pools keep them: [Hkv, n, D] fp32."""
        pool = self._exact.pools[Tier.GPU]
        rounded = [pool.round(part, rows).float().transpose(0, 1) for part, rows in zip(KVPart, (k, v), strict=True)]
        return rounded[0], rounded[1]

    def _reading(self, work: _Work, keys: "_Once") -> Callable[[int], Tensor]:
        def read(num_keys: int) -> Tensor:
            is_dram = work.context.is_dram[:num_keys]
            on_dram = is_dram.sum() * self._spec.num_kv_heads
            self._num_rows += torch.stack((num_keys * self._spec.num_kv_heads - on_dram, on_dram))
            return keys.get()[:, :num_keys]

        return read

    def _taking(self, work: _Work, layer_idx: int) -> Callable[[Tensor], Tensor]:
        def take(places: Tensor) -> Tensor:
            on_dram = work.context.is_dram[places].sum()
            self._num_rows += torch.stack((places.numel() - on_dram, on_dram))
            return self._take(work, KVPart.K, layer_idx, places, self._policy.dtype)

        return take

    def _note_bytes(self, num_bytes: int) -> None:
        self._num_own_bytes += num_bytes

    def _count(self, work: _Work, union: Tensor) -> None:
        """Count rows of K or V that are read, by tier."""
        on_dram = (union & work.context.is_dram[: union.shape[1]]).sum()
        self._num_rows += torch.stack((union.sum() - on_dram, on_dram))

    def _commit(self) -> None:
        """The step is at its end: what selectors became in it holds."""
        for work in self._works:
            work.state.selectors = work.selectors
            work.state.num_computed = work.start + work.num_rows
            if work.rows is not None:
                work.rows.length = work.start + work.num_rows

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


class _Once:
    """A value that is made when it is first asked for."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._value: Tensor | None = None

    def get(self) -> Tensor:
        if self._value is None:
            self._value = self._make()
        return self._value


def _by_group(values: Tensor, num_kv_heads: int, group_size: int) -> Tensor:
    """[Hq, Hkv or 1, S] → [Hkv, G, S]."""
    if len(values) == num_kv_heads * group_size:
        return values.view(num_kv_heads, group_size, -1)
    return values[:, None].expand(num_kv_heads, group_size, -1)

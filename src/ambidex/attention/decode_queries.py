"""`DecodeQueries`: attention of decode queries over the keys that a policy chooses, in plain torch on the accelerator.

For each query: choose, read the chosen rows, softmax over them, tell the policy. Rows of the DRAM tier are brought to
the accelerator. Each query is attended with the state that the ones before it left.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.attention.early_decode import FarAnswer
from ambidex.attention.select.policy import DecodeRow, Need, Policy, Positions, Selection, Selector, find_places
from ambidex.attention.selected_rows import SelectedRows
from ambidex.attention.selection_log import SelectionLog
from ambidex.attention.stage_clock import StageClock
from ambidex.attention.step_requests import Work
from ambidex.core.ids import KVPart, RequestId
from ambidex.core.model_spec import ModelSpec
from ambidex.core.selection import StageTimes
from ambidex.core.step import SelectionFigures
from ambidex.kernels import api
from ambidex.layers.rope import compute_inv_freq


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
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


class DecodeQueries:
    """Answers decode queries.

    Args:
        spec: heads and head_dim (the scale is head_dim ** -0.5).
        rows: K and V of the step's requests.
        device: the accelerator.
        verify_every: each so many-th choice is computed again over all keys and held against its bound; 0: none is.
        watch: is told each choice; None: nobody is.
    """

    def __init__(
        self,
        policy: Policy,
        spec: ModelSpec,
        rows: SelectedRows,
        *,
        device: torch.device,
        verify_every: int,
        watch: Callable[[Choice], None] | None,
    ) -> None:
        self._policy = policy
        self._spec = spec
        self._rows = rows
        self._device = device
        self._watch = watch
        self._scale = spec.head_dim**-0.5
        is_turned = policy.positions is Positions.IN_CACHE and spec.rope is not None
        self._inv_freq = compute_inv_freq(spec.rope).to(device) if is_turned and spec.rope is not None else None
        self._log = SelectionLog(device, verify_every=verify_every)
        self._clock = StageClock(device, is_on=Need.TIMES in policy.needs)

    def begin(self) -> None:
        """Start anew with a step."""
        self._log.begin()
        self._clock.begin()

    @property
    def is_watched(self) -> bool:
        """Somebody is told each choice."""
        return self._watch is not None

    def figures(self) -> SelectionFigures:
        """What was chosen since `begin`.

        Cost: waits for the device.
        """
        return self._log.figures()

    def times(self, forward_s: float) -> StageTimes | None:
        """Times of the stages since `begin`, if the policy asks for them; `forward_s`: of the whole forward pass."""
        return self._clock.times(forward_s)

    def verify_every(self, num_choices: int) -> None:
        """From now on each so many-th choice is computed again over all keys and held against its bound; 0: none is."""
        self._log = SelectionLog(self._device, verify_every=num_choices)

    def attend(
        self, layer_idx: int, work: Work, q: Tensor, k: Tensor, v: Tensor, stale_q: Tensor | None, out: Tensor
    ) -> None:
        """Answer a request's decode queries, one after the other.

        Args:
            q: [T, Hq, D]; k, v: [T, Hkv, D], of all tokens of the step, rotated, and stored; stale_q: as q, made from
                the input of the layer before; None: the policy needs none, or there is none.
            out: [T, Hq, D], whose rows of this request's decode queries are filled.
        Raises:
            BoundError: an output was computed again and differs by more than its bound.
        """
        selector, dtype = work.selectors[layer_idx], self._policy.dtype
        if work.rows is not None:
            self._rows.write(layer_idx, work, work.rows, k, v)
        read_keys, take_keys = self._rows.key_reader(work, layer_idx), self._rows.key_taker(work, layer_idx)
        for row in work.decode_rows:
            num_keys = work.num_keys(row)
            if Need.ROWS in self._policy.needs:
                new = torch.arange(selector.first_missing(num_keys), num_keys, device=self._device)
                places = new.expand(self._spec.num_kv_heads, -1)
                selector.add_rows(*(self._rows.take(work, part, layer_idx, places, torch.float32) for part in KVPart))
            query = DecodeRow(
                q=q[row].to(dtype),
                stale_q=None if stale_q is None else stale_q[row].to(dtype),
                num_keys=num_keys,
                scale=self._scale,
                read_keys=read_keys,
                take_keys=take_keys,
                note_bytes=self._rows.note_bytes,
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

    def tell(self, layer_idx: int, work: Work, answer: FarAnswer) -> None:
        """Tell whoever watches what a request's query attended elsewhere."""
        assert self._watch is not None, "someone watches"
        near = answer.probs.shape[2] - answer.places.shape[1]
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

    def _attend_selected(self, layer_idx: int, work: Work, query: DecodeRow, selection: Selection) -> Attended:
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
            values = self._rows.take(work, KVPart.V, layer_idx, places, self._policy.dtype)
        self._rows.count(work, union)
        probs = scores.softmax(-1)
        return Attended(
            out=(probs @ values).flatten(0, 1),
            lse=scores.logsumexp(-1).flatten(),
            mask=mask.expand(num_kv_heads, group_size, num_keys),
            probs=probs,
            places=places,
        )

    def _scores(
        self,
        layer_idx: int,
        work: Work,
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
        rows = self._rows.take(work, KVPart.K, layer_idx, places, self._policy.dtype)  # [Hkv, M, D]
        self._rows.count(work, union)
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

    def _attend_all(self, layer_idx: int, work: Work, q: Tensor, num_keys: int) -> Tensor:
        """The exact answer, [Hq, D] fp64."""
        k, v = (self._rows.read(work, part, layer_idx, torch.float64)[:, :num_keys] for part in KVPart)
        grouped = q.view(self._spec.num_kv_heads, self._spec.group_size, -1)
        probs = (grouped @ k.transpose(1, 2) * self._scale).softmax(-1)
        out: Tensor = probs @ v
        return out.flatten(0, 1)


def _by_group(values: Tensor, num_kv_heads: int, group_size: int) -> Tensor:
    """[Hq, Hkv or 1, S] → [Hkv, G, S]."""
    if len(values) == num_kv_heads * group_size:
        return values.view(num_kv_heads, group_size, -1)
    return values[:, None].expand(num_kv_heads, group_size, -1)

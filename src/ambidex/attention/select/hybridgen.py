"""`hybridgen`: scores computed one layer early, where the keys lie, and used as they are. Source: arXiv:2604.18529, of
which no full text and no code was at hand: what digests say of it, and where they are silent what is said here.

Keys are near (the newest `near_tokens` and the step's own, which the paper has in GPU memory) or far (all older ones,
which it has in host memory). The query of a layer is made from the input of the layer before, and with it

    post   all far keys are scored, and the K best of each KV head are selected;
    pre    a light predictor (some turned columns of K, `partial_keys.py`) selects K far keys, and these are scored.

One softmax joins the true scores of near keys and the early scores of the selected far ones, as they are: the early
query decides what is selected and what it weighs. The first `exact_layers` layers attend all keys. Nothing is dropped
for good.

What is not published, and chosen here: K (the budget), near_tokens, the predictor, selection by KV head (the largest
score of its query heads), the first layers. Which keys are near is a matter of their age alone, not of the tier on
which they happen to lie, so that an answer does not depend on other requests.

The paper changes K and the mode by feedback from measured stage times: `sched/feedback.py` decides, from the times that
`SelectiveAttention` takes, and `apply` is told. With `hybridgen_feedback` off both are fixed; with `mode` K is; with
`full` K is what feedback says, for all requests alike. docs/hybridgen.md says more.
"""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from ambidex.attention.select.infinigen import Predicting
from ambidex.attention.select.policy import (
    AheadPolicy,
    AllKeys,
    DecodeRow,
    Need,
    PolicyRequest,
    Selection,
    Selector,
    find_places,
    group_scores,
    max_groups,
    pad_keys,
    top_mask,
)
from ambidex.core.errors import InternalError
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import HybridGenFeedback, HybridGenMode, PolicySettings
from ambidex.core.selection import SelectionSetting


class HybridGen(AheadPolicy):
    """Near keys, and far ones that an early query scores best."""

    weighs_early: ClassVar[bool] = True

    def __init__(self, settings: PolicySettings, spec: ModelSpec) -> None:
        super().__init__(settings, spec)
        assert settings.budget is not None, "hybridgen selects K keys"
        assert settings.near_tokens is not None, "hybridgen has near keys"
        self._budget = settings.budget
        self._num_near = settings.near_tokens
        self._is_pre = settings.hybridgen_mode is HybridGenMode.PRE
        self._feedback = settings.hybridgen_feedback or HybridGenFeedback.OFF
        self._steering = _Steering(is_pre=self._is_pre)
        is_steered = self._feedback is not HybridGenFeedback.OFF
        self.needs = (
            frozenset({Need.LOOK_AHEAD})
            | (frozenset({Need.ROWS, Need.PROMPT}) if self._is_pre or is_steered else frozenset())
            | (frozenset({Need.TIMES}) if is_steered else frozenset())
        )

    def apply(self, setting: SelectionSetting) -> None:
        self._steering.is_pre = setting.mode is HybridGenMode.PRE
        self._steering.num_selected = setting.num_selected if self._feedback is HybridGenFeedback.FULL else None

    def open(self, request: PolicyRequest, layer_idx: int) -> Selector:
        if layer_idx < self.first_layer:
            return AllKeys()
        num_selected = self._budget.of(request.num_prompt_tokens)
        if Need.TIMES in self.needs:
            return _Steered(
                self._percent,
                request,
                num_kv_heads=self.spec.num_kv_heads,
                num_selected=num_selected,
                num_near=self._num_near,
                steering=self._steering,
            )
        if not self._is_pre:
            return _AfterScores(self.spec.num_kv_heads, num_selected=num_selected, num_near=self._num_near)
        return _BeforeScores(
            self._percent,
            request,
            num_kv_heads=self.spec.num_kv_heads,
            num_selected=num_selected,
            num_near=self._num_near,
        )


@dataclass(slots=True)
class _Steering:
    """What feedback says; all selectors of an engine look at it. `num_selected` None: each request's own."""

    is_pre: bool
    num_selected: int | None = None


class _AfterScores(Selector):
    """Post: all far keys are scored first."""

    keeps_rows: ClassVar[bool] = False
    scores_all: ClassVar[bool] = True

    def __init__(self, num_kv_heads: int, *, num_selected: int, num_near: int) -> None:
        self._num_kv_heads = num_kv_heads
        self.num_selected = num_selected
        self._num_near = num_near

    def select(self, row: DecodeRow) -> Selection:
        num_far = max(0, row.num_keys - 1 - self._num_near)
        if num_far == 0:
            return AllKeys().select(row)
        return _select_after(row, num_far, self._num_kv_heads, self.num_selected)

    def num_far(self, num_keys: int) -> int:
        return max(0, num_keys - 1 - self._num_near)

    def choose_scored(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return _choose_after(scores, self.num_selected)

    def choose_far(self, row: DecodeRow, num_far: int) -> tuple[Tensor, Tensor]:
        del row, num_far
        raise InternalError("hybridgen in mode post chooses by scores of all far keys")

    def snapshot(self) -> Self:
        return self  # it holds nothing that a step changes


class _BeforeScores(Predicting):
    """Pre: a predictor selects, then only what is selected is scored."""

    @property
    def scores_all(self) -> bool:
        return False

    @property
    def num_selected(self) -> int:
        return self._num_selected

    def __init__(
        self, percent: int, request: PolicyRequest, *, num_kv_heads: int, num_selected: int, num_near: int
    ) -> None:
        super().__init__(percent, request, num_kv_heads=num_kv_heads)
        self._num_selected = num_selected
        self._num_near = num_near

    def select(self, row: DecodeRow) -> Selection:
        num_far = max(0, row.num_keys - 1 - self._num_near)
        if num_far == 0:
            return AllKeys().select(row)
        return self._select_before(row, num_far, self.num_selected)

    def num_far(self, num_keys: int) -> int:
        return max(0, num_keys - 1 - self._num_near)

    def choose_scored(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return _choose_after(scores, self.num_selected)

    def choose_far(self, row: DecodeRow, num_far: int) -> tuple[Tensor, Tensor]:
        return self._choose_before(row, num_far, self.num_selected)

    def _choose_before(self, row: DecodeRow, num_far: int, num_selected: int) -> tuple[Tensor, Tensor]:
        assert row.stale_q is not None, "a layer before this one has been attended"
        predicted = self.predict_groups(row)[:, :num_far]
        places = predicted.topk(min(num_selected, num_far), dim=1, sorted=False).indices
        return places, self.weigh(row, row.stale_q, places)

    def _select_before(self, row: DecodeRow, num_far: int, num_selected: int) -> Selection:
        assert row.stale_q is not None, "a layer before this one has been attended"
        selected = top_mask(self.predict_groups(row)[:, :num_far], num_selected)
        places, _ = find_places(selected)  # [Hkv, K], no padding: each head selects as many
        early = self.weigh(row, row.stale_q, places)
        scores = torch.zeros((*early.shape[:2], num_far), dtype=early.dtype, device=early.device)
        scores.scatter_(2, places[:, None].expand(early.shape), early)
        return _join(selected, scores.flatten(0, 1), row.num_keys)


class _Steered(_BeforeScores):
    """Either, as feedback says. Partial keys are kept in both modes: it may change at any step."""

    @property
    def scores_all(self) -> bool:
        return not self._steering.is_pre

    @property
    def num_selected(self) -> int:
        return self._steering.num_selected or self._num_selected

    def __init__(
        self,
        percent: int,
        request: PolicyRequest,
        *,
        num_kv_heads: int,
        num_selected: int,
        num_near: int,
        steering: _Steering,
    ) -> None:
        super().__init__(percent, request, num_kv_heads=num_kv_heads, num_selected=num_selected, num_near=num_near)
        self._steering = steering

    def select(self, row: DecodeRow) -> Selection:
        num_far = max(0, row.num_keys - 1 - self._num_near)
        if num_far == 0:
            return AllKeys().select(row)
        if self._steering.is_pre:
            return self._select_before(row, num_far, self.num_selected)
        return _select_after(row, num_far, self._num_kv_heads, self.num_selected)


def _choose_after(scores: Tensor, num_selected: int) -> tuple[Tensor, Tensor]:
    """The best far keys of each KV head, by the largest of its query heads' scores [Hkv, G, far], with their scores."""
    best = scores.amax(1)  # [Hkv, far]
    places = best.topk(min(num_selected, best.shape[1]), dim=1, sorted=False).indices
    return places, scores.gather(2, places[:, None].expand(-1, scores.shape[1], -1))


def _select_after(row: DecodeRow, num_far: int, num_kv_heads: int, num_selected: int) -> Selection:
    """Score all far keys with the early query, and select the best of each KV head."""
    assert row.stale_q is not None, "a layer before this one has been attended"
    scores = group_scores(row.stale_q[None], row.read_keys(num_far), row.scale)[:, 0]  # [Hq, far]
    selected = top_mask(max_groups(scores, num_kv_heads), num_selected)  # [Hkv, far]
    return _join(selected, scores, row.num_keys)


def _join(selected: Tensor, scores: Tensor, num_keys: int) -> Selection:
    """Selected far keys [Hkv, far] with their early scores [Hq, far], and all nearer keys with their true ones."""
    num_far = selected.shape[1]
    mask = pad_keys(selected, num_keys)
    mask[:, num_far:] = True  # pad_keys made them new
    is_far = torch.arange(num_keys, device=mask.device)[None] < num_far
    return Selection(mask=mask, scores=pad_keys(scores, num_keys), is_scored=is_far)

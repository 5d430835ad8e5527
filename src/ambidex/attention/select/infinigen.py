"""`infinigen`: keys speculated one layer early, attended exactly. Source: arXiv:2406.19707 (OSDI 2024);
github.com/snu-comparch/InfiniGen.

A query made from the input of the layer before, and some columns of K (`partial_keys.py`), predict the scores of a
layer. Keys predicted within `alpha` of a head's best are counted; the mean of these counts over the heads, at most the
budget, is how many keys each head fetches, its best by prediction. They and the step's own key are attended with the
true query. The first `exact_layers` layers attend all keys. Nothing is dropped for good: the pool is not limited, so
the paper's eviction from it is not needed. No key but the query's own is near: all older ones are far.

Differences from the authors' code: counts are averaged over the heads of one request, not of the batch; with shared KV
heads, a KV head's prediction is the largest of its query heads'; the cap is a share of the prompt instead of 400 keys
of 2048; and those of `partial_keys.py`.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ambidex.attention.select.partial_keys import PartialKeys
from ambidex.attention.select.policy import (
    AheadPolicy,
    AllKeys,
    DecodeRow,
    Need,
    PolicyRequest,
    PromptRows,
    Selection,
    Selector,
    max_groups,
    pad_keys,
    top_mask,
)
from ambidex.core.errors import InternalError
from ambidex.core.kv_spec import PREDICTOR_QUERIES
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import PolicySettings


class InfiniGen(AheadPolicy):
    """Keys that a partial, early query finds likely."""

    weighs_early: ClassVar[bool] = False
    needs = frozenset({Need.ROWS, Need.PROMPT, Need.LOOK_AHEAD})

    def __init__(self, settings: PolicySettings, spec: ModelSpec) -> None:
        super().__init__(settings, spec)
        assert settings.budget is not None, "infinigen has a cap"
        assert settings.alpha is not None, "infinigen has a threshold"
        self._budget = settings.budget
        self.alpha: float = settings.alpha

    def open(self, request: PolicyRequest, layer_idx: int) -> Selector:
        if layer_idx < self.first_layer:
            return AllKeys()
        cap = self._budget.of(request.num_prompt_tokens)
        return _Speculated(
            self._percent,
            request,
            num_kv_heads=self.spec.num_kv_heads,
            alpha=self.alpha,
            cap=cap,
        )


class Predicting(Selector):
    """Makes partial keys of a prompt when it sees the last of it; until then it gathers queries, every so many-th, so
    that of no prompt there are more than `PREDICTOR_QUERIES`. Which these are does not depend on how it is cut."""

    keeps_rows: ClassVar[bool] = True

    def __init__(self, percent: int, request: PolicyRequest, *, num_kv_heads: int) -> None:
        self._percent = percent
        self._request = request
        self._num_kv_heads = num_kv_heads
        self._every = -(-request.num_prompt_tokens // PREDICTOR_QUERIES)
        self._num_seen = 0
        self._queries: list[Tensor] = []
        self._partial: PartialKeys | None = None

    def add_rows(self, k: Tensor, v: Tensor) -> None:
        del v
        if self._partial is not None:  # else they are the prompt's, which it is shown with the queries
            self._partial = self._partial.append(k)

    def first_missing(self, num_keys: int) -> int:
        del num_keys
        assert self._partial is not None, "the prompt comes before the answer"
        return self._partial.num_keys

    def extend_partial(self) -> PartialKeys:
        """See `partial_keys.PartialSelector`."""
        assert self._partial is not None, "the prompt comes before the answer"
        self._partial = self._partial.extend()
        return self._partial

    def see_prompt(self, rows: PromptRows) -> None:
        first = -self._num_seen % self._every
        self._num_seen += len(rows.q)
        self._queries = [*self._queries, rows.q[first :: self._every].clone()]  # a view would keep all of them
        if rows.k.shape[1] == self._request.num_prompt_tokens:
            self._partial = PartialKeys.of(
                torch.cat(self._queries), rows.k, percent=self._percent, capacity=self._request.max_tokens
            )
            self._queries = []

    def predict(self, row: DecodeRow) -> Tensor:
        """Predicted scores of a query head's keys, the query's own left out: [Hq, S − 1]."""
        assert row.stale_q is not None, "a layer before this one has been attended"
        assert self._partial is not None, "the prompt comes before the answer"
        row.note_bytes(self._partial.num_bytes)
        return self._partial.scores(row.stale_q, row.scale)[:, :-1]

    def predict_groups(self, row: DecodeRow) -> Tensor:
        """The largest of the query heads that share a KV head: [Hkv, S − 1]."""
        return max_groups(self.predict(row), self._num_kv_heads)

    def weigh(self, row: DecodeRow, q: Tensor, places: Tensor) -> Tensor:
        """Scores of some keys with a query [Hq, D], which are read: places [Hkv, M] → [Hkv, G, M]."""
        grouped = q.view(self._num_kv_heads, -1, q.shape[1])
        scores: Tensor = grouped @ row.take_keys(places).transpose(1, 2) * row.scale
        return scores


class _Speculated(Predicting):
    """Fetches what is predicted likely, to be attended with the true query."""

    scores_all: ClassVar[bool] = False

    def __init__(self, percent: int, request: PolicyRequest, *, num_kv_heads: int, alpha: float, cap: int) -> None:
        super().__init__(percent, request, num_kv_heads=num_kv_heads)
        self._alpha = alpha
        self.num_selected = cap

    def select(self, row: DecodeRow) -> Selection:
        scores = self.predict_groups(row)
        return Selection(mask=pad_keys(top_mask(scores, self._count(scores)), row.num_keys))

    def num_far(self, num_keys: int) -> int:
        return num_keys - 1

    def choose_scored(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        del scores
        raise InternalError("infinigen chooses by partial keys, not by scores of all far keys")

    def choose_far(self, row: DecodeRow, num_far: int) -> tuple[Tensor, Tensor]:
        """See `FarSelector`.

        Cost: waits for the device.
        """
        scores = self.predict_groups(row)[:, :num_far]
        places = scores.topk(min(self._count(scores), num_far), dim=1, sorted=False).indices
        return places, self.weigh(row, row.q, places)

    def _count(self, scores: Tensor) -> int:
        """How many keys each head fetches, by predicted scores [Hkv, n]."""
        num_likely = int((scores > scores.amax(1, keepdim=True) - self._alpha).sum())
        return min(num_likely // self._num_kv_heads, self.num_selected)

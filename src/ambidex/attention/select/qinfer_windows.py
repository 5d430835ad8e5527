"""`qinfer_windows`: Q-Infer's key window and recent window. Source: github.com/PDS-Lab/Q-Infer, `kv-cache`, the only
form in which the method is published; its engine has none of it.

Half of the budget is a window of recent keys. The key window has the other half and half of that again (the authors
mean to keep the lower part of it in 8 bits, and left that switched off: all of it is kept in full). At each decode step
the key window is its `h − 1` best keys by accumulated probability and the step's own; recent ones are attended besides.
So up to 1.25 times the nominal budget is attended, as in the authors' test. A key that leaves the key window loses its
score; behind the recent window it is dropped for good.

Differences from the authors' code, a mask over a whole text for language-model evaluation: prompts attend all keys, and
scores are what all queries of the prompt gave; scores grow by probabilities over the attended keys (theirs see all);
the budget is that of the prompt, not of the whole text; one score a KV head, the sum over the query heads that share
it.
"""

import torch
from torch import Tensor

from ambidex.attention.select.accumulated import Accumulated, BudgetPolicy, PlacedSums, SumPlan
from ambidex.attention.select.policy import (
    DecodeRow,
    PolicyRequest,
    Selection,
    Selector,
    pad_keys,
    top_mask,
)


class QInferWindows(BudgetPolicy):
    """A window of the best keys and one of the newest."""

    def open(self, request: PolicyRequest, layer_idx: int) -> Selector:
        del layer_idx
        budget, num_recent = self._divide(request)
        num_best = budget - num_recent
        num_best = max(1, num_best + num_best // 2)  # there is no place for others if all keys are recent
        return _TwoWindows(self.spec.num_kv_heads, num_best=num_best, num_recent=num_recent)


class _TwoWindows(Accumulated):
    """`num_best` counts the step's own key."""

    def __init__(self, num_kv_heads: int, *, num_best: int, num_recent: int) -> None:
        super().__init__(num_kv_heads)
        self._num_best = num_best
        self._num_recent = num_recent
        self._best: Tensor | None = None  # [Hkv, S] bool

    def plan_sums(self, num_keys: int) -> SumPlan:
        """The key that the next step would find to be one too many is dropped at the end of this one."""
        return SumPlan(self._first_recent(num_keys), num_keys if num_keys >= self._num_best else 0)

    def prune(self) -> None:
        """Choose the best of those that are in the key window, for the next step; chosen again they are the same."""
        assert self._sums is not None, "the prompt comes before the answer"
        if self._best is None:
            self._best = torch.ones_like(self._sums, dtype=torch.bool)
        self._best = top_mask(self._sums.masked_fill(~self._best, -torch.inf), self._num_best - 1)

    @property
    def held(self) -> Tensor:
        assert self._best is not None, "they were chosen"
        return self._best

    def _hold(self, held: Tensor) -> None:
        self._best, self._kept = held, self._with_recent(held)

    def place(self, placed: PlacedSums, layer_idx: int) -> None:
        super().place(placed, layer_idx)
        self._best = None

    def select(self, row: DecodeRow) -> Selection:
        self.take()
        self.prune()
        best = pad_keys(self.held, row.num_keys)
        best[:, -1] = True  # pad_keys made it new
        self._best, self._kept = best, self._with_recent(best)
        return Selection(mask=self._kept)

    def _with_recent(self, best: Tensor) -> Tensor:
        kept = best.clone()
        kept[:, self._first_recent(best.shape[1]) :] = True
        return kept

    def _first_recent(self, num_keys: int) -> int:
        return max(0, num_keys - 1 - self._num_recent)

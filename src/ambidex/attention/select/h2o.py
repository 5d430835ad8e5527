"""`h2o`: the keys with the largest sum of attention probabilities so far, and the newest. Source: arXiv:2306.14048;
github.com/FMInference/H2O.

A key's score is the sum of the probabilities that queries gave it, those of the prompt first (causal, all of them),
then those of the decode steps in which it is attended. What is not kept is dropped for good, and its score with it.
Two of the authors' programs are followed:

flexgen (`h2o_flexgen`, which their speeds come from), k = half the budget. After the prompt the k best of all but the
    last k − 1 are kept, and those last k − 1. At each decode step they and the step's own key are attended and the
    scores grow; then the key with the least score of the k best makes way for the oldest of the recent ones, and the
    step's own key joins these.
drop (`utils_real_drop`). After the prompt, and after each decode step, what is kept are the newest `recent` keys and
    the best `budget − recent` of the rest, all scores being compared anew.

Differences from the authors' code: one score a KV head, the sum over the query heads that share it (their models have
none that do); a budget in the prompt's tokens instead of a ratio on the command line, with at least 2 tokens; equal
scores: the earlier key wins. Positions are the original ones, as in both programs.
"""

from typing import ClassVar

import torch
from torch import Tensor

from ambidex.attention.select.accumulated import Accumulated, BudgetPolicy, NewestAndBest, SumPlan
from ambidex.attention.select.policy import (
    DecodeRow,
    PolicyRequest,
    Selection,
    Selector,
    top_mask,
)
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import H2OForm, PolicySettings


class H2O(BudgetPolicy):
    """Largest accumulated probabilities and the newest keys."""

    def __init__(self, settings: PolicySettings, spec: ModelSpec) -> None:
        super().__init__(settings, spec)
        self._form = settings.h2o_form

    def open(self, request: PolicyRequest, layer_idx: int) -> Selector:
        del layer_idx
        budget, num_recent = self._divide(request)
        if self._form is H2OForm.DROP:
            return NewestAndBest(self.spec.num_kv_heads, budget, num_recent=num_recent)
        return _FlexGenPort(self.spec.num_kv_heads, half=budget // 2)


class _FlexGenPort(Accumulated):
    """`half` best keys and `half − 1` recent ones, all of which are held: whether a key is recent follows from its
    place."""

    drops_first: ClassVar[bool] = True

    def __init__(self, num_kv_heads: int, *, half: int) -> None:
        super().__init__(num_kv_heads)
        self._half = half

    def plan_sums(self, num_keys: int) -> SumPlan:
        """The oldest of the recent keys is admitted to the best when the step is over, and cannot be dropped by it."""
        return SumPlan(num_keys - 1, num_keys - self._half if num_keys >= 2 * self._half else 0)

    @property
    def held(self) -> Tensor:
        assert self._kept is not None, "they were chosen"
        return self._kept

    def _hold(self, held: Tensor) -> None:
        self._kept = held

    def select(self, row: DecodeRow) -> Selection:
        self.take()
        self.prune()
        _, kept = self._present(row.num_keys)
        return Selection(mask=kept)

    def attended(self, probs: Tensor) -> None:
        super().attended(probs)
        num_keys = probs.shape[1]
        sums, kept = self._present(num_keys)
        kept[:, -1] = True  # pad_keys made them new
        num_best = self.plan_sums(num_keys).drop_end
        if num_best:
            best = kept[:, :num_best]
            victim = sums[:, :num_best].masked_fill(~best, torch.inf).argmin(1, keepdim=True)  # [Hkv, 1]
            kept.scatter_(1, victim, False)
        self._kept = kept

    def prune(self) -> None:
        """Choose the best of all but the last `half − 1`."""
        if self._kept is not None:
            return
        assert self._sums is not None, "the prompt comes before the answer"
        num_keys = self._sums.shape[1]
        num_old = max(0, num_keys - (self._half - 1))
        kept = torch.ones_like(self._sums, dtype=torch.bool)
        kept[:, :num_old] = top_mask(self._sums[:, :num_old], self._half)
        self._kept = kept

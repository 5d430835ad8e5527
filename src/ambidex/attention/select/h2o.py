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

import torch
from torch import Tensor

from ambidex.attention.select.accumulated import Accumulated, BudgetPolicy, NewestAndBest
from ambidex.attention.select.policy import (
    DecodeRow,
    PolicyRequest,
    Selection,
    Selector,
    pad_keys,
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
    """`half` best keys and `half − 1` recent ones."""

    def __init__(self, num_kv_heads: int, *, half: int) -> None:
        super().__init__(num_kv_heads)
        self._half = half
        self._best: Tensor | None = None  # [Hkv, S] bool
        self._num_kept = 0  # of each head

    def select(self, row: DecodeRow) -> Selection:
        if self._kept is None:
            self._prune_prompt()
        _, kept = self._present(row.num_keys)
        return Selection(mask=kept)

    def attended(self, probs: Tensor) -> None:
        super().attended(probs)
        num_keys = probs.shape[1]
        assert self._best is not None, "select comes first"
        sums, kept = self._present(num_keys)
        kept[:, -1] = True  # pad_keys made them new
        if self._num_kept < 2 * self._half - 1:
            self._num_kept += 1
        else:
            best = pad_keys(self._best, num_keys)
            victim = sums.masked_fill(~best, torch.inf).argmin(1, keepdim=True)  # [Hkv, 1]
            kept.scatter_(1, victim, False)
        self._best, self._kept = self._all_but_recent(kept), kept

    def _prune_prompt(self) -> None:
        """Choose the best of all but the last `half − 1`."""
        assert self._sums is not None, "the prompt comes before the answer"
        num_keys = self._sums.shape[1]
        num_old = max(0, num_keys - (self._half - 1))
        best = torch.zeros_like(self._sums, dtype=torch.bool)
        best[:, :num_old] = top_mask(self._sums[:, :num_old], self._half)
        kept = best.clone()
        kept[:, num_old:] = True
        self._best, self._kept = best, kept
        self._num_kept = min(num_old, self._half) + num_keys - num_old

    def _all_but_recent(self, kept: Tensor) -> Tensor:
        """The oldest of the recent keys is admitted to the best when a newer one comes."""
        best = kept.clone()
        best[:, max(0, kept.shape[1] - (self._half - 1)) :] = False
        return best

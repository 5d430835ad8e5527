"""State of policies that add up what queries gave each key, and drop for good what has least."""

import torch
from torch import Tensor

from ambidex.attention.select.policy import (
    DecodeRow,
    Need,
    Policy,
    PolicyRequest,
    PromptRows,
    Selection,
    Selector,
    pad_keys,
    sum_groups,
    top_mask,
)
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import PolicySettings


class BudgetPolicy(Policy):
    """A policy that keeps so many keys, a percentage of which are the newest."""

    needs = frozenset({Need.PROMPT, Need.PROBS})

    def __init__(self, settings: PolicySettings, spec: ModelSpec) -> None:
        super().__init__(settings, spec)
        assert settings.budget is not None, f"{settings.name} has a budget"
        assert settings.recent_percent is not None, f"{settings.name} has recent keys"
        self._budget = settings.budget
        self._recent_percent = settings.recent_percent

    def _divide(self, request: PolicyRequest) -> tuple[int, int]:
        """Keys that a request keeps in all, and how many of them are the newest."""
        budget = self._budget.of(request.num_prompt_tokens)
        return budget, budget * self._recent_percent // 100


class Accumulated(Selector):
    """Keeps the sum of probabilities of each key, [Hkv, S], and which keys are kept."""

    def __init__(self, num_kv_heads: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._sums: Tensor | None = None  # [Hkv, S]
        self._kept: Tensor | None = None  # [Hkv, S] bool; None: the prompt is not at its end

    @property
    def kept(self) -> Tensor | None:
        return self._kept

    def weigh(self, probs: Tensor) -> Tensor:
        """What a query adds to the sums: its probabilities, unless a policy has it otherwise.

        Args:
            probs: [Hq, n, S] of n consecutive queries, the last of which sees all S keys.
        """
        return probs

    def see_prompt(self, rows: PromptRows) -> None:
        self._add(rows.scores().softmax(-1))

    def attended(self, probs: Tensor) -> None:
        self._add(probs[:, None])

    def _add(self, probs: Tensor) -> None:
        """Add to the sums; keys that came since have none yet."""
        sums = sum_groups(self.weigh(probs).sum(1), self._num_kv_heads)
        self._sums = sums if self._sums is None else pad_keys(self._sums, sums.shape[1]) + sums

    def _present(self, num_keys: int) -> tuple[Tensor, Tensor]:
        """Sums and kept keys, over `num_keys` keys."""
        assert self._sums is not None, "the prompt comes before the answer"
        assert self._kept is not None, "select comes first"
        return pad_keys(self._sums, num_keys), pad_keys(self._kept, num_keys)


class NewestAndBest(Accumulated):
    """Keeps the `num_recent` newest keys and the best `budget − num_recent` others, chosen anew after each step."""

    def __init__(self, num_kv_heads: int, budget: int, *, num_recent: int) -> None:
        super().__init__(num_kv_heads)
        self._budget = budget
        self._num_recent = num_recent

    def select(self, row: DecodeRow) -> Selection:
        if self._kept is None and self._sums is not None:
            self._kept = self._choose(self._sums, torch.ones_like(self._sums, dtype=torch.bool))
        _, kept = self._present(row.num_keys)
        return Selection(mask=kept)

    def attended(self, probs: Tensor) -> None:
        super().attended(probs)
        sums, kept = self._present(probs.shape[1])
        kept[:, -1] = True  # pad_keys made them new
        self._kept = self._choose(sums, kept)

    def _choose(self, sums: Tensor, candidates: Tensor) -> Tensor:
        """Which of the candidates are kept, [Hkv, S] bool."""
        num_rest = max(0, sums.shape[1] - self._num_recent)
        rest = sums[:, :num_rest].masked_fill(~candidates[:, :num_rest], -torch.inf)
        kept = candidates.clone()
        kept[:, :num_rest] = top_mask(rest, self._budget - self._num_recent)
        return kept

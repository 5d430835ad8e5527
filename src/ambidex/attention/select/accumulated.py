"""State of policies that add up what queries gave each key, and drop for good what has least.

A step of fixed form computes the same on the accelerator (`attention/held_fixed.py`): at most one key goes a step, and
which keys may is known from their number alone (`SumPlan`). What it leaves lies in memory that the step after the next
writes again (`PlacedSums`).
"""

import copy
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

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
from ambidex.kernels import api
from ambidex.kernels.early_rows import SumRule
from ambidex.kernels.noise import Noise, gumbel_noise


@dataclass(frozen=True, slots=True, eq=False)
class PlacedSums:
    """What the first `num_keys` keys of a request have got, `sums` [L, Hkv, n] fp32, and which are held, `held` uint8
    likewise."""

    sums: Tensor
    held: Tensor
    num_keys: int

    @property
    def num_bytes(self) -> int:
        """Of both."""
        return self.sums.nbytes + self.held.nbytes


class SumPlan(NamedTuple):
    """What a step of fixed form is told of a request; see `kernels.early_rows.SumRows`."""

    recent_first: int
    drop_end: int
    tau: float = 1.0


class BudgetPolicy(Policy):
    """A policy that keeps so many keys, a percentage of which are the newest."""

    needs = frozenset({Need.PROMPT, Need.PROBS})
    prompt_dtype = None

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
    """Keeps the sum of probabilities of each key, [Hkv, S], and which keys are kept.

    `drops_first`: of keys with equal sums the earliest is dropped; else the last.
    """

    drops_first: ClassVar[bool] = False

    def __init__(self, num_kv_heads: int) -> None:
        self._num_kv_heads = num_kv_heads
        self._placed: tuple[PlacedSums, int] | None = None  # and the layer; then there are no tensors of its own
        self._sums: Tensor | None = None  # [Hkv, S]
        self._kept: Tensor | None = None  # [Hkv, S] bool; None: the prompt is not at its end

    @property
    def kept(self) -> Tensor | None:
        return self._kept if self._placed is None else self.detach()._kept

    @property
    def placed(self) -> PlacedSums | None:
        """Where a step of fixed form has left what it keeps; None: nowhere, or it has changed since."""
        return None if self._placed is None else self._placed[0]

    @property
    def rule(self) -> SumRule:
        """What a step of fixed form adds in this layer, and which of equal sums is the least."""
        return SumRule(drops_first=self.drops_first, noise_seed=None)

    @abstractmethod
    def plan_sums(self, num_keys: int) -> SumPlan:
        """What a step of fixed form does whose query sees `num_keys`, its own included."""

    @abstractmethod
    def prune(self) -> None:
        """Choose which keys of the prompt are held, if that has not been done."""

    @property
    @abstractmethod
    def held(self) -> Tensor:
        """[Hkv, S] bool: the keys whose sums count, once they were chosen."""

    @abstractmethod
    def _hold(self, held: Tensor) -> None:
        """Take in which keys are held, in a tensor of its own."""

    def place(self, placed: PlacedSums, layer_idx: int) -> None:
        """What it keeps lies there from now on."""
        self._placed = (placed, layer_idx)
        self._sums = self._kept = None

    def copy_to(self, sums: Tensor, held: Tensor) -> None:
        """Copy what it keeps to where a step of fixed form finds it: [Hkv, n], n being at least its keys.

        Cost: two launches, behind a prompt those that choose besides.
        """
        self.take()
        self.prune()
        assert self._sums is not None, "the prompt comes before the answer"
        sums[:, : self._sums.shape[1]] = self._sums
        held[:, : self._sums.shape[1]] = self.held

    def take(self) -> None:
        """Take what a step of fixed form has left, before a step of another form."""
        if self._placed is not None:
            (placed, layer_idx), self._placed = self._placed, None
            self._sums = placed.sums[layer_idx, :, : placed.num_keys]
            self._hold(placed.held[layer_idx, :, : placed.num_keys].bool())

    def detach(self) -> Self:
        if self._placed is None:
            return self
        own = copy.copy(self)
        own.take()
        assert own._sums is not None, "it was taken"
        own._sums = own._sums.clone()
        return own

    def noise_of(self, num_keys: int) -> Noise | None:
        """What the scores of a query that sees so many keys are turned to for the sums; None: nothing is done."""
        del num_keys
        return None

    def see_prompt(self, rows: PromptRows) -> None:
        self._add(api.sum_prompt_weights(rows.q, rows.k, scale=rows.scale, noise=self.noise_of(rows.k.shape[1])))

    def attended(self, probs: Tensor) -> None:
        num_heads, num_keys = probs.shape
        noise = self.noise_of(num_keys)
        if noise is not None:
            position = torch.tensor([num_keys - 1], device=probs.device)
            gumbel = gumbel_noise(noise.seed, position, num_heads, num_keys)[:, 0]
            # log p differs from the score by the same number for all keys, which a softmax does not see.
            probs = ((probs.log() + gumbel) / noise.tau).softmax(-1)
        self._add(sum_groups(probs, self._num_kv_heads))

    def _add(self, sums: Tensor) -> None:
        """Add [Hkv, S] to the sums; keys that came since have none yet."""
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

    def plan_sums(self, num_keys: int) -> SumPlan:
        return SumPlan(num_keys - 1, num_keys - self._num_recent if num_keys > self._budget else 0)

    def prune(self) -> None:
        if self._kept is None and self._sums is not None:
            self._kept = self._choose(self._sums, torch.ones_like(self._sums, dtype=torch.bool))

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

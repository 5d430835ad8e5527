"""`SumsWay`: keys chosen by sums of what queries gave them (H2O, Keyformer, Q-Infer); its attention: `held_fixed.py`,
and where sums lie: `key_sums.py`."""

from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate
from typing import ClassVar, cast

import torch

from ambidex.attention.held_fixed import HeldAttention
from ambidex.attention.key_sums import KeySums
from ambidex.attention.select.accumulated import Accumulated, BudgetPolicy
from ambidex.attention.ways.way import DecodeWork, FixedForm, StepParts, StepRequests, Way, WayNumbers, far_but_own
from ambidex.core.ids import RequestId
from ambidex.kernels.early_rows import SumRows, SumRule


class SumsWay(Way):
    """By sums.

    Args:
        policy: whose selectors are `Accumulated`, in all layers.
        device: the accelerator.
    """

    names: ClassVar[Sequence[str]] = tuple(item.name for item in fields(SumRows))
    counts_by_head: ClassVar[bool] = True

    def __init__(self, policy: BudgetPolicy, device: torch.device) -> None:
        self._num_q_heads = policy.spec.num_q_heads
        self._scale = policy.spec.head_dim**-0.5
        self._sums = KeySums(policy.spec, device)
        self._rules: Sequence[SumRule] = ()
        """Of each layer: the same for all requests, so the first one's."""

    def find_form(self, works: Sequence[DecodeWork]) -> FixedForm:
        num_far = far_but_own(works)
        return FixedForm(num_far=num_far, num_selected=num_far, counts_rows=True, counts_keys=True)

    def plan(self, requests: StepRequests, form: FixedForm) -> WayNumbers:
        """See `Way`.

        Cost: that of `KeySums.plan`.
        """
        if not self._rules:
            self._rules = [cast("Accumulated", selector).rule for selector in requests.works[0].selectors]
        num_scores = [self._num_q_heads * (num + 1) for num in form.num_far]  # the query's own key has one, too
        score_first = list(accumulate(num_scores, initial=0))[:-1]
        return WayNumbers(of_requests={"score_first": score_first, **self._sums.plan(requests.works)})

    def attention(self, parts: StepParts) -> HeldAttention:
        return HeldAttention(
            parts.near,
            parts.rows,
            SumRows(**parts.own),
            self._rules,
            num_attended=parts.num_chosen,
            max_far=parts.max_far,
            scale=self._scale,
        )

    def keep_new(self, works: Sequence[DecodeWork]) -> None:
        self._sums.keep_new(works)

    def forget(self, request_id: RequestId) -> None:
        self._sums.forget(request_id)

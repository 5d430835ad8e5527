"""`AheadWay`: keys chosen by queries made a layer early (HybridGen, InfiniGen); its attention: `early_fixed.py`.

    scored      the CPU scores all far keys, a layer ahead of the accelerator (`fixed_scores.py`)
    predicted   partial keys on the accelerator choose (`select/partial_keys.py`)

Which of both holds is the affair of selectors, which feedback may steer from step to step.
"""

from collections.abc import Sequence
from typing import ClassVar, cast

from ambidex.attention.early_fixed import EarlyAttention, FarSide, PredictedFar, ScoredFar
from ambidex.attention.select.partial_keys import PartialSelector
from ambidex.attention.select.policy import AheadPolicy, FarSelector
from ambidex.attention.ways.way import DecodeWork, FixedForm, LookAhead, StepParts, StepRequests, Way, WayNumbers
from ambidex.kernels.early_rows import AlphaCount, PartialRows


class AheadWay(Way):
    """By early queries.

    Args:
        policy: whose selectors are `FarSelector`s from its `first_layer` on.
        look_ahead: makes the queries.
    """

    layer_names: ClassVar[Sequence[str]] = ("rows_address", "turn_address", "capacity")

    def __init__(self, policy: AheadPolicy, look_ahead: LookAhead) -> None:
        self._policy = policy
        self._spec = policy.spec
        self._scale = policy.spec.head_dim**-0.5
        self.first_layer = policy.first_layer
        self.look_ahead = look_ahead

    def find_form(self, works: Sequence[DecodeWork]) -> FixedForm:
        far = [cast("FarSelector", work.selectors[self.first_layer]) for work in works]
        num_far = [selector.num_far(work.start + 1) for selector, work in zip(far, works, strict=True)]
        is_scored, is_counted = far[0].scores_all, self._policy.alpha is not None
        assert all(selector.scores_all is is_scored for selector in far), "all requests are in one mode"
        return FixedForm(
            num_far=num_far,
            num_selected=[min(selector.num_selected, num) for selector, num in zip(far, num_far, strict=True)],
            is_scored=is_scored,
            counts_rows=is_counted,
            counts_keys=is_counted,
        )

    def plan(self, requests: StepRequests, form: FixedForm) -> WayNumbers:
        """See `Way`.

        Cost: the first step that predicts behind others which do not brings what partial keys lack.
        """
        layers = range(self.first_layer, self._spec.num_layers) if not form.is_scored else range(0)
        return WayNumbers(of_layers={layer: self._extend_partial(requests, layer, form.num_far) for layer in layers})

    def _extend_partial(self, requests: StepRequests, layer_idx: int, num_far: Sequence[int]) -> list[Sequence[int]]:
        """Where the partial keys of each request lie in a layer, those of all older keys, with room for that of its new
        one."""
        found: list[Sequence[int]] = []
        for row, work in enumerate(requests.works):
            selector = cast("PartialSelector", work.selectors[layer_idx])
            requests.tell_missing(layer_idx, row, selector)
            partial = selector.extend_partial()
            if num_far[row]:  # else nobody reads them
                requests.note_bytes(partial.num_bytes)
            rows, turn = partial.buffers
            found.append((rows.data_ptr(), turn.data_ptr(), rows.shape[1]))
        return found

    def attention(self, parts: StepParts) -> EarlyAttention:
        assert self.look_ahead is not None, "it was given"
        return EarlyAttention(
            self._spec,
            parts.exact,
            parts.near,
            parts.rows,
            self.look_ahead,
            self._far_side(parts),
            first_layer=self.first_layer,
        )

    def _far_side(self, parts: StepParts) -> FarSide:
        if parts.is_scored:
            return ScoredFar(parts.scores, parts.rows, scale=self._scale, clock=parts.clock)
        num_columns, alpha = self._policy.num_columns, self._policy.alpha
        return PredictedFar(
            lambda layer_idx: PartialRows(**parts.of_layer(layer_idx), num_columns=num_columns),
            parts.rows,
            max_far=parts.max_far,
            scale=self._scale,
            weighs_early=self._policy.weighs_early,
            count=None
            if alpha is None
            else lambda layer_idx: AlphaCount(alpha=alpha, num_chosen=parts.num_chosen(layer_idx)[:, 0]),
            clock=parts.clock,
        )

"""`PagesWay`: pages of keys, chosen by the boxes of their keys (Quest); its attention: `boxes_fixed.py`, and where
boxes lie: `page_boxes.py`."""

from collections.abc import Sequence
from typing import ClassVar, cast

import torch

from ambidex.attention.boxes_fixed import BoxAttention
from ambidex.attention.page_boxes import PageBoxes
from ambidex.attention.select.quest import Pages, Quest
from ambidex.attention.ways.way import DecodeWork, FixedForm, StepParts, StepRequests, Way, WayNumbers, far_but_own
from ambidex.core.dtypes import DType
from ambidex.core.ids import RequestId
from ambidex.kernels.early_rows import BoxRows


class PagesWay(Way):
    """By bounds.

    Args:
        policy: whose selectors are `Pages` from its `first_layer` on.
        device: the accelerator.
    """

    names: ClassVar[Sequence[str]] = ("boxes_address", "box_capacity", "num_pages", "num_taken", "bound_first")
    counts_by_head: ClassVar[bool] = True

    def __init__(self, policy: Quest, device: torch.device) -> None:
        spec = policy.spec
        self.first_layer = policy.first_layer
        self._page_tokens = policy.page_tokens
        self._scale = spec.head_dim**-0.5
        self._boxes = PageBoxes(spec, device, first_layer=policy.first_layer)
        num_layers = spec.num_layers - policy.first_layer
        self._page_bytes = num_layers * spec.num_kv_heads * 2 * spec.head_dim * DType.FP32.num_bytes

    def find_form(self, works: Sequence[DecodeWork]) -> FixedForm:
        plans = [cast("Pages", work.selectors[-1]).plan_pages(work.start + 1) for work in works]
        return FixedForm(
            num_far=far_but_own(works),
            num_selected=[plan.num_attended - 1 for plan in plans],
            counts_rows=True,  # which query heads of a KV head take the same pages is not known
        )

    def plan(self, requests: StepRequests, form: FixedForm) -> WayNumbers:
        """See `Way`.

        Cost: that of `PageBoxes.plan`.
        """
        del form
        numbers = self._boxes.plan(requests.works)
        requests.note_bytes(sum(numbers["num_pages"]) * self._page_bytes)
        return WayNumbers(of_requests=numbers)

    def attention(self, parts: StepParts) -> BoxAttention:
        return BoxAttention(
            parts.near,
            parts.rows,
            BoxRows(**parts.own, page_tokens=self._page_tokens, first_layer=self.first_layer),
            parts.exact,
            num_read=parts.num_chosen,
            max_far=parts.max_far,
            scale=self._scale,
        )

    def keep_new(self, works: Sequence[DecodeWork]) -> None:
        self._boxes.keep_new(works)

    def forget(self, request_id: RequestId) -> None:
        self._boxes.forget(request_id)

"""`PageBoxes`: boxes of the full pages of the requests' keys, where steps of fixed form keep them on the accelerator.

A step makes the box of the page that its own key fills, of all keys of that page: one that breaks off is computed again
and makes the same. Selectors are told where the boxes lie (`PlacedBoxes`); steps of other forms take copies, which the
next step of fixed form first copies back.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import torch
from torch import Tensor

from ambidex.attention.select.quest import Pages, PlacedBoxes
from ambidex.attention.ways.way import DecodeWork
from ambidex.core.ids import RequestId
from ambidex.core.model_spec import ModelSpec


@dataclass(slots=True)
class _Kept:
    """Those of one request. `placed`: as the last step of fixed form has left them; None: there has been none."""

    boxes: Tensor
    placed: PlacedBoxes | None = None


class PageBoxes:
    """Boxes of each request, with room for all its pages from its first step of fixed form until it ends.

    Args:
        spec: heads and head_dim.
        device: where they lie.
        first_layer: that chooses, as all behind it do.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, *, first_layer: int) -> None:
        self._spec = spec
        self._device = device
        self._first_layer = first_layer
        self._kept: dict[RequestId, _Kept] = {}

    @property
    def num_bytes(self) -> int:
        """Of all requests now."""
        return sum(kept.boxes.nbytes for kept in self._kept.values())

    def forget(self, request_id: RequestId) -> None:
        """Drop those of a request that ended."""
        self._kept.pop(request_id, None)

    def plan(self, works: Sequence[DecodeWork]) -> Mapping[str, Sequence[int]]:
        """Prepare for a step with one new token of each request: what `BoxRows` says of each.

        Cost: a request's first step, and one behind steps of another form, copies boxes layer by layer.
        """
        boxes = [self._prepare(work) for work in works]
        plans = [self._pages_of(work)[0].plan_pages(work.start + 1) for work in works]
        num_bounds = [self._spec.num_q_heads * plan.num_pages for plan in plans]
        return {
            "boxes_address": [part.data_ptr() for part in boxes],
            "box_capacity": [part.shape[2] for part in boxes],
            "num_pages": [plan.num_pages for plan in plans],
            "num_taken": [plan.num_taken for plan in plans],
            "bound_first": list(accumulate(num_bounds, initial=0))[:-1],
        }

    def keep_new(self, works: Sequence[DecodeWork]) -> None:
        """The step that was planned is at its end: selectors are told where their boxes lie."""
        for work in works:
            kept = self._kept[work.request_id]
            kept.placed = PlacedBoxes(kept.boxes, work.start + 1)
            for place, selector in enumerate(self._pages_of(work)):
                selector.place(kept.placed, place)

    def _prepare(self, work: DecodeWork) -> Tensor:
        """Those of a request, with what its selectors keep now."""
        selectors = self._pages_of(work)
        kept = self._kept.get(work.request_id)
        if kept is None:
            num_pages = work.max_tokens // selectors[0].page_tokens
            shape = (len(selectors), self._spec.num_kv_heads, num_pages, 2, self._spec.head_dim)
            kept = self._kept[work.request_id] = _Kept(torch.empty(shape, dtype=torch.float32, device=self._device))
        for place, selector in enumerate(selectors):
            if selector.placed is None or selector.placed is not kept.placed:
                selector.copy_to(kept.boxes[place])
        return kept.boxes

    def _pages_of(self, work: DecodeWork) -> list[Pages]:
        """The selectors of the layers that choose."""
        return cast("list[Pages]", work.selectors[self._first_layer :])

"""`quest`: pages of keys, chosen by a bound on their scores. Source: arXiv:2406.10774; github.com/mit-han-lab/Quest.

Keys lie in pages of `page_tokens`, in order. Of each page and KV head the least and the largest number of each channel
are kept; Σ_d max(q_d · low_d, q_d · high_d) is a bound on q·k for all keys of the page. Each query head attends the
max(3, budget / page_tokens) pages with the largest bounds, and all their keys; the first `exact_layers` layers attend
all keys. Nothing is dropped for good.

A step of fixed form chooses on the accelerator (`attention/boxes_fixed.py`), where the boxes of full pages lie
(`PlacedBoxes`). Of the page that is still being filled nothing is kept there: its rows are told again.

Differences from the authors' code: the newest page, in which the step's own key lies, is always one of the pages, as in
their kernels (their evaluation script lets it compete). With shared KV heads each query head chooses for itself, as in
that script.
"""

import copy
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ambidex.attention.select.policy import (
    AllKeys,
    DecodeRow,
    Need,
    Policy,
    PolicyRequest,
    Rows,
    Selection,
    Selector,
    top_mask,
)
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import MIN_PAGES, Budget, PolicySettings


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBoxes:
    """Boxes of the full pages of a request of `num_keys` keys: least and largest numbers [L, Hkv, pages, 2, D] fp32 in
    the layers that choose."""

    boxes: Tensor
    num_keys: int


class PagePlan(NamedTuple):
    """What a step of fixed form is told of a request; see `kernels.early_rows.BoxRows`. Each query head attends
    `num_attended` keys, the query's own included."""

    num_pages: int
    num_taken: int
    num_attended: int


class Quest(Policy):
    """Pages with the largest bounds.

    Attributes:
        page_tokens: keys of a full page.
    """

    needs = frozenset({Need.ROWS})

    def __init__(self, settings: PolicySettings, spec: ModelSpec) -> None:
        super().__init__(settings, spec)
        assert settings.budget is not None, "quest has a budget"
        assert settings.page_tokens is not None, "quest has pages"
        assert settings.exact_layers is not None, "quest has exact layers"
        self._budget: Budget = settings.budget
        self.page_tokens = settings.page_tokens
        self.first_layer = settings.exact_layers

    def open(self, request: PolicyRequest, layer_idx: int) -> Selector:
        if layer_idx < self.first_layer:
            return AllKeys()
        num_pages = max(MIN_PAGES, self._budget.of(request.num_prompt_tokens) // self.page_tokens)
        return Pages(num_pages, self.page_tokens)


class Pages(Selector):
    """Boxes of complete pages, and the rows of the page that is still being filled."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self._num_pages = num_pages
        self._page_tokens = page_tokens
        self._placed: tuple[PlacedBoxes, int] | None = None  # and the layer there; then there are no tensors of its own
        self._low: Rows | None = None  # [Hkv, pages, D]
        self._high: Rows | None = None
        self._tail: Tensor | None = None  # [Hkv, fewer than page_tokens, D]

    @property
    def page_tokens(self) -> int:
        """Keys of a full page."""
        return self._page_tokens

    @property
    def placed(self) -> PlacedBoxes | None:
        """Where a step of fixed form has left the boxes; None: nowhere, or there have been steps of others since."""
        return None if self._placed is None else self._placed[0]

    def plan_pages(self, num_keys: int) -> PagePlan:
        """What a step of fixed form does whose query sees `num_keys`, its own included."""
        num_pages = -(-num_keys // self._page_tokens)
        num_taken = min(self._num_pages, num_pages)
        num_newest = num_keys - (num_pages - 1) * self._page_tokens
        return PagePlan(num_pages, num_taken, (num_taken - 1) * self._page_tokens + num_newest)

    def place(self, placed: PlacedBoxes, layer_idx: int) -> None:
        """The boxes lie there from now on, those of its layer at `layer_idx`."""
        self._placed = (placed, layer_idx)
        self._low = self._high = self._tail = None

    def copy_to(self, boxes: Tensor) -> None:
        """Copy the boxes of full pages to where a step of fixed form finds them: [Hkv, n, 2, D], n being at least
        these pages.

        Cost: two launches.
        """
        self._take()
        for part, own in enumerate((self._low, self._high)):
            if own is not None:
                boxes[:, : own.values.shape[1], part] = own.values

    def _take(self) -> None:
        """Take what a step of fixed form has left, before a step of another form."""
        if self._placed is None:
            return
        (placed, layer_idx), self._placed = self._placed, None
        num_pages = placed.num_keys // self._page_tokens
        if num_pages:
            low, high = placed.boxes[layer_idx, :, :num_pages].clone().unbind(2)
            self._low, self._high = Rows.of(low), Rows.of(high)

    def detach(self) -> Self:
        if self._placed is None:
            return self
        own = copy.copy(self)
        own._take()
        return own

    def first_missing(self, num_keys: int) -> int:
        del num_keys
        if self._placed is not None:
            return self._placed[0].num_keys // self._page_tokens * self._page_tokens
        num_full = 0 if self._low is None else self._low.values.shape[1]
        return num_full * self._page_tokens + (0 if self._tail is None else self._tail.shape[1])

    def add_rows(self, k: Tensor, v: Tensor) -> None:
        del v
        self._take()
        rows = k if self._tail is None else torch.cat((self._tail, k), dim=1)
        num_pages = rows.shape[1] // self._page_tokens
        border = num_pages * self._page_tokens
        if num_pages:
            pages = rows[:, :border].reshape(len(rows), num_pages, self._page_tokens, -1)
            low, high = pages.amin(2), pages.amax(2)
            self._low = Rows.of(low) if self._low is None else self._low.append(low)
            self._high = Rows.of(high) if self._high is None else self._high.append(high)
        self._tail = rows[:, border:].clone()

    def select(self, row: DecodeRow) -> Selection:
        low, high = self._boxes()
        row.note_bytes(2 * low.numel() * low.element_size())
        q = row.q.view(len(low), -1, 1, row.q.shape[1])  # [Hkv, G, 1, D]
        bounds = torch.maximum(q * low[:, None], q * high[:, None]).sum(-1).flatten(0, 1)  # [Hq, pages]
        bounds[:, -1] = torch.inf
        chosen = top_mask(bounds, self._num_pages)
        return Selection(mask=chosen.repeat_interleave(self._page_tokens, 1)[:, : row.num_keys])

    def _boxes(self) -> tuple[Tensor, Tensor]:
        """Least and largest numbers of all pages, [Hkv, pages, D] each."""
        low = [self._low.values] if self._low is not None else []
        high = [self._high.values] if self._high is not None else []
        if self._tail is not None and self._tail.shape[1]:
            low.append(self._tail.amin(1, keepdim=True))
            high.append(self._tail.amax(1, keepdim=True))
        return torch.cat(low, 1), torch.cat(high, 1)

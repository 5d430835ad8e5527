"""`quest`: pages of keys, chosen by a bound on their scores. Source: arXiv:2406.10774; github.com/mit-han-lab/Quest.

Keys lie in pages of `page_tokens`, in order. Of each page and KV head the least and the largest number of each channel
are kept; Σ_d max(q_d · low_d, q_d · high_d) is a bound on q·k for all keys of the page. Each query head attends the
max(3, budget / page_tokens) pages with the largest bounds, and all their keys; the first `exact_layers` layers attend
all keys. Nothing is dropped for good.

Differences from the authors' code: the newest page, in which the step's own key lies, is always one of the pages, as in
their kernels (their evaluation script lets it compete). With shared KV heads each query head chooses for itself, as in
that script.
"""

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


class Quest(Policy):
    """Pages with the largest bounds."""

    needs = frozenset({Need.ROWS})

    def __init__(self, settings: PolicySettings, spec: ModelSpec) -> None:
        super().__init__(settings, spec)
        assert settings.budget is not None, "quest has a budget"
        assert settings.page_tokens is not None, "quest has pages"
        assert settings.exact_layers is not None, "quest has exact layers"
        self._budget: Budget = settings.budget
        self._page_tokens = settings.page_tokens
        self._exact_layers = settings.exact_layers

    def open(self, request: PolicyRequest, layer_idx: int) -> Selector:
        if layer_idx < self._exact_layers:
            return AllKeys()
        num_pages = max(MIN_PAGES, self._budget.of(request.num_prompt_tokens) // self._page_tokens)
        return _Pages(num_pages, self._page_tokens)


class _Pages(Selector):
    """Boxes of complete pages, and the rows of the page that is still being filled."""

    def __init__(self, num_pages: int, page_tokens: int) -> None:
        self._num_pages = num_pages
        self._page_tokens = page_tokens
        self._low: Rows | None = None  # [Hkv, pages, D]
        self._high: Rows | None = None
        self._tail: Tensor | None = None  # [Hkv, fewer than page_tokens, D]

    def add_rows(self, k: Tensor, v: Tensor) -> None:
        del v
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

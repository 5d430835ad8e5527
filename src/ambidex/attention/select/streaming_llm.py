"""`streaming_llm`: attention sinks and a window. Source: arXiv:2309.17453; github.com/mit-han-lab/streaming-llm.

At each decode step the first `sink_tokens` keys and the last `budget − sink_tokens` from before the step are attended,
and the step's own; what lies between is dropped for good. Keys stand side by side, as they lie in the cache: the query
is at position `number of attended keys − 1`.

Differences from the authors' code: the budget does not count the step's own token (their perplexity script counts as
here, their chat one less); keys are kept rotated and turned on by the difference of their positions instead of being
kept as they were before rotation; models whose positions are no rotary ones (OPT) keep the original positions, which
their code does not run at all.
"""

from typing import NamedTuple

import torch

from ambidex.attention.select.policy import DecodeRow, Policy, PolicyRequest, Positions, Selection, Selector
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import PolicySettings


class StreamingLLM(Policy):
    """First and last keys."""

    positions = Positions.IN_CACHE

    def __init__(self, settings: PolicySettings, spec: ModelSpec) -> None:
        super().__init__(settings, spec)
        assert settings.budget is not None, "streaming_llm has a budget"
        assert settings.sink_tokens is not None, "streaming_llm has sinks"
        self._budget = settings.budget
        self._num_sinks = settings.sink_tokens

    def open(self, request: PolicyRequest, layer_idx: int) -> Selector:
        del layer_idx
        budget = self._budget.of(request.num_prompt_tokens)
        return FirstAndLast(min(self._num_sinks, budget - 1), budget)


class WindowPlan(NamedTuple):
    """What a step of fixed form is told of a request; see `kernels.early_rows.WindowRows`."""

    sink_end: int
    window_first: int

    @property
    def gap(self) -> int:
        """Keys between the first and the newest."""
        return self.window_first - self.sink_end


class FirstAndLast(Selector):
    """The first keys and the newest."""

    def __init__(self, num_sinks: int, budget: int) -> None:
        self._num_sinks = num_sinks
        self._num_recent = budget - num_sinks
        self._seen: tuple[int, torch.device] | None = None

    def plan_windows(self, num_keys: int) -> WindowPlan:
        """The keys between which a query attends none, that sees `num_keys`, its own included."""
        sink_end = min(self._num_sinks, num_keys - 1)
        return WindowPlan(sink_end, max(sink_end, num_keys - 1 - self._num_recent))

    def place(self, num_keys: int, device: torch.device) -> None:
        """A step of fixed form on that device has answered a query that saw so many keys."""
        self._seen = (num_keys, device)

    def select(self, row: DecodeRow) -> Selection:
        self._seen = (row.num_keys, row.q.device)
        return Selection(mask=self._make_mask(*self._seen))

    def _make_mask(self, num_keys: int, device: torch.device) -> torch.Tensor:
        sink_end, window_first = self.plan_windows(num_keys)
        mask = torch.ones(1, num_keys, dtype=torch.bool, device=device)
        mask[:, sink_end:window_first] = False
        return mask

    @property
    def kept(self) -> torch.Tensor | None:
        return None if self._seen is None else self._make_mask(*self._seen)

"""`streaming_llm`: attention sinks and a window. Source: arXiv:2309.17453; github.com/mit-han-lab/streaming-llm.

At each decode step the first `sink_tokens` keys and the last `budget − sink_tokens` from before the step are attended,
and the step's own; what lies between is dropped for good. Keys stand side by side, as they lie in the cache: the query
is at position `number of attended keys − 1`.

Differences from the authors' code: the budget does not count the step's own token (their perplexity script counts as
here, their chat one less); keys are kept rotated and turned on by the difference of their positions instead of being
kept as they were before rotation; models whose positions are no rotary ones (OPT) keep the original positions, which
their code does not run at all.
"""

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
        return _FirstAndLast(min(self._num_sinks, budget - 1), budget)


class _FirstAndLast(Selector):
    def __init__(self, num_sinks: int, budget: int) -> None:
        self._num_sinks = num_sinks
        self._num_recent = budget - num_sinks
        self._mask: torch.Tensor | None = None

    def select(self, row: DecodeRow) -> Selection:
        mask = torch.ones(1, row.num_keys, dtype=torch.bool, device=row.q.device)
        mask[:, self._num_sinks : max(self._num_sinks, row.num_keys - 1 - self._num_recent)] = False
        self._mask = mask
        return Selection(mask=mask)

    @property
    def kept(self) -> torch.Tensor | None:
        return self._mask

"""Plain attention without blocks or tiers: what the models are tested with, and what tiered attention must equal."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ambidex.core.model_spec import ModelSpec
from ambidex.kernels import api


class DenseAttention:
    """Causal attention in fp32 over a ragged batch; keys and values of earlier steps are kept whole.

    `begin(lengths)` says before each step how many tokens of T belong to each request, in order; a request keeps its
    place from step to step and may have no tokens in one. Implements `AttentionOp`.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._lengths: Sequence[int] = ()
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def begin(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        if angles is not None:
            q, k = api.rotate(q, *angles), api.rotate(k, *angles)
        lengths = list(self._lengths)
        assert sum(lengths) == len(q), f"begin() was told {lengths} tokens, the model hands over {len(q)}"
        parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
        return torch.cat([self._attend_one(layer_idx, idx, *part) for idx, part in enumerate(parts)])

    def _attend_one(self, layer_idx: int, request_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (layer_idx, request_idx) in self._kept:
            old_k, old_v = self._kept[layer_idx, request_idx]
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self._kept[layer_idx, request_idx] = (k, v)  # [S, Hkv, D]
        group = q.shape[1] // k.shape[1]
        scores = torch.einsum("thd,shd->hts", q.float(), k.float().repeat_interleave(group, dim=1))
        scores = scores * self._spec.head_dim**-0.5
        if self._spec.alibi_slopes is not None:
            distance = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k))[:, None]  # [T, S]
            scores = scores + torch.tensor(self._spec.alibi_slopes)[:, None, None] * distance
        visible = visible_keys(len(q), len(k), self._spec.windows[layer_idx])
        probs = scores.masked_fill(~visible, -torch.inf).softmax(-1)  # [Hq, T, S]
        return torch.einsum("hts,shd->thd", probs, v.float().repeat_interleave(group, dim=1)).to(q.dtype)


def visible_keys(num_queries: int, num_keys: int, window: int | None) -> Tensor:
    """Which keys the last `num_queries` tokens of a context of `num_keys` see: [T, S] bool."""
    query = torch.arange(num_keys - num_queries, num_keys)[:, None]
    key = torch.arange(num_keys)[None, :]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)

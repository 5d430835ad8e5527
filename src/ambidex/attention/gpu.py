"""The GPU lane: the accelerator attends over what lies in its own memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ambidex.attention.blocks import attend_old_keys
from ambidex.attention.metadata import OldKeys, OwnChunk
from ambidex.attention.state import AttentionState
from ambidex.kernels import api
from ambidex.storage.kv_pool import KVPool


class GPULane:
    """Attention over the accelerator's pool and over the step's own keys."""

    def __init__(self, pool: KVPool, *, scale: float) -> None:
        self._pool = pool
        self._scale = scale

    def attend_own(self, q: Tensor, k: Tensor, v: Tensor, chunks: Sequence[OwnChunk]) -> AttentionState:
        """The state over the step's own keys; a token outside the chunks sees itself alone.

        Args:
            q: [T, Hq, D]; k, v: [T, Hkv, D].
        Returns:
            `out` in the dtype of q if the step is one chunk, else fp32.
        """
        if len(chunks) == 1 and chunks[0].rows == slice(0, q.shape[0]):
            return AttentionState(*self._attend_chunk(q, k, v, chunks[0]))
        state = _attend_self(q, k, v, self._scale)
        for chunk in chunks:
            state.out[chunk.rows], state.lse[chunk.rows] = self._attend_chunk(q, k, v, chunk)
        return state

    def attend_old(self, layer_idx: int, q: Tensor, parts: Sequence[OldKeys]) -> AttentionState:
        """The state over old keys in the accelerator's pool; `out` is fp32."""
        return attend_old_keys(self._pool, layer_idx, q, parts, scale=self._scale)

    def _attend_chunk(self, q: Tensor, k: Tensor, v: Tensor, chunk: OwnChunk) -> tuple[Tensor, Tensor]:
        rows, mask = chunk.rows, chunk.mask
        keys, values = k[rows].transpose(0, 1), v[rows].transpose(0, 1)  # [Hkv, chunk, D]
        return api.attend(q[rows], keys, values, scale=self._scale, causal=mask is None, mask=mask)


def _attend_self(q: Tensor, k: Tensor, v: Tensor, scale: float) -> AttentionState:
    """Each token over its own key alone: the answer is v, its lse the score; fp32."""
    num_tokens, num_kv_heads, head_dim = k.shape
    q_grouped = q.view(num_tokens, num_kv_heads, q.shape[1] // num_kv_heads, head_dim).float()  # [T, Hkv, G, D]
    scores = torch.linalg.vecdot(q_grouped, k.unsqueeze(2).float()).mul_(scale)
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    out.view(q_grouped.shape).copy_(v.unsqueeze(2))  # a copy even if G = 1: chunks are written over it
    return AttentionState(out, scores.view(q.shape[:2]))

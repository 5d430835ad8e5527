"""The part of the GPU lane that no pool holds: the step's own keys, attended as the model made them."""

import torch
from torch import Tensor

from ambidex.attention.metadata import OwnKeys
from ambidex.attention.parts import PartAttention
from ambidex.attention.state import AttentionState, empty


def attend_own(q: Tensor, k: Tensor, v: Tensor, own: OwnKeys, attention: PartAttention) -> AttentionState:
    """The state over the step's own keys: chunks causally, each token of `own.single_rows` over its own key alone.

    Args:
        q: [T, Hq, D]; k, v: [T, Hkv, D].
    Returns:
        `out` fp32; tokens that `own` does not name have seen no key.
    """
    if len(own.chunks) == 1 and own.chunks[0].rows == slice(0, q.shape[0]):
        out, lse = _attend_chunk(q, k, v, own, 0, attention)
        return AttentionState(out.float(), lse)
    if own.all_are_single:
        return _attend_self(q, k, v, attention.scale)
    state = empty(*q.shape, device=q.device)
    if own.single_rows is not None:
        rows = own.single_rows
        alone = _attend_self(q[rows], k[rows], v[rows], attention.scale)
        state.out[rows], state.lse[rows] = alone.out, alone.lse
    for index, chunk in enumerate(own.chunks):
        out, state.lse[chunk.rows] = _attend_chunk(q, k, v, own, index, attention)
        state.out[chunk.rows] = out.float()
    return state


def _attend_chunk(
    q: Tensor, k: Tensor, v: Tensor, own: OwnKeys, index: int, attention: PartAttention
) -> tuple[Tensor, Tensor]:
    rows, mask = own.chunks[index].rows, own.chunks[index].mask
    keys, values = k[rows].transpose(0, 1), v[rows].transpose(0, 1)  # [Hkv, chunk, D]
    return attention.attend_chunk(q[rows], keys, values, mask)


def _attend_self(q: Tensor, k: Tensor, v: Tensor, scale: float) -> AttentionState:
    """Each token over its own key alone: the answer is v, its lse the score; fp32."""
    num_tokens, num_kv_heads, head_dim = k.shape
    q_grouped = q.view(num_tokens, num_kv_heads, q.shape[1] // num_kv_heads, head_dim).float()  # [T, Hkv, G, D]
    scores = torch.linalg.vecdot(q_grouped, k.unsqueeze(2).float()).mul_(scale)
    out = torch.empty(q_grouped.shape, device=q.device).copy_(v.unsqueeze(2))  # never v itself: states may be changed
    return AttentionState(out.view(q.shape), scores.view(q.shape[:2]))

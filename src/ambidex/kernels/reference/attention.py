"""Attention in plain torch, accumulated in fp32: the truth that every other implementation is tested against."""

import torch
from torch import Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `kernels.api.attend`."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = k.shape
    q_grouped = q.float().view(num_tokens, num_kv_heads, num_q_heads // num_kv_heads, head_dim)  # [T, Hkv, G, D]
    scores = torch.einsum("tngd,nsd->tngs", q_grouped, k.float()) * scale
    if causal:
        mask = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)  # [T, Hkv, G]; −inf for a row that sees no key
    probs = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None])
    out = torch.einsum("tngs,nsd->tngd", probs, v.float())
    return out.reshape(q.shape).to(q.dtype), lse.reshape(num_tokens, num_q_heads)

"""torch's fused attention kernels in the form that also returns the lse.

device, dtype                         no mask             mask
CPU, all                              flash for CPU       flash for CPU
CUDA, bf16 and fp16                   flash               memory-efficient
CUDA, fp32                            memory-efficient    memory-efficient
CUDA, head_dim no multiple of 8       reference           reference      (rows would not start on 16 bytes)
CUDA, head_dim over 256               reference           reference      (flash has no such kernel)
"""

from typing import Final

import torch
from torch import Tensor

from ambidex.kernels.reference import attention as reference

_MAX_CUDA_HEAD_DIM: Final = 256
_BIAS_ALIGNMENT: Final = 16  # numbers; the memory-efficient kernel reads rows of the bias in 16-byte pieces


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `kernels.api.attend`; T and S are at least 1."""
    num_tokens, num_q_heads, head_dim = q.shape
    if q.is_cuda and (head_dim % 8 or head_dim > _MAX_CUDA_HEAD_DIM):
        return reference.attend(q, k, v, scale=scale, causal=causal, mask=mask)
    num_kv_heads = k.shape[0]
    group_size = num_q_heads // num_kv_heads
    if num_tokens == 1 and mask is None:  # decode: the group of a KV head stands where the kernel expects rows
        q_hgd = q.view(1, num_kv_heads, group_size, head_dim)
        out, lse = _fused(q_hgd, k.unsqueeze(0), v.unsqueeze(0), scale, False, None)
        return out.reshape(q.shape), lse.reshape(1, num_q_heads)
    q_hgtd = q.view(num_tokens, num_kv_heads, group_size, head_dim).permute(1, 2, 0, 3)
    if mask is None and not causal:  # every row sees the same keys: one read of K and V serves the whole group
        q_hgtd = q_hgtd.reshape(1, num_kv_heads, group_size * num_tokens, head_dim)
        k, v = k.unsqueeze(0), v.unsqueeze(0)
    else:
        k, v = (rows.unsqueeze(1).expand(-1, group_size, -1, -1) for rows in (k, v))
    out, lse = _fused(q_hgtd, k, v, scale, causal, mask)
    out = out.reshape(num_kv_heads, group_size, num_tokens, head_dim).permute(2, 0, 1, 3).reshape(q.shape)
    lse = lse.reshape(num_kv_heads, group_size, num_tokens).permute(2, 0, 1).reshape(num_tokens, num_q_heads)
    if mask is not None:  # the kernels give a row that sees no key an lse of 0 or +inf
        blind = ~mask.any(dim=1)[:, None]
        out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -torch.inf)
    return out, lse


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention over [batch, heads, rows, D]; which axes play batch and heads is the caller's choice."""
    aten = torch.ops.aten
    if not q.is_cuda:
        bias = None if mask is None else _bias(mask, q.dtype)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out, lse
    if mask is None and q.dtype != torch.float32:
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
        return out, lse
    bias = None if mask is None else _bias(mask, q.dtype).expand(*q.shape[:3], -1)
    out, lse = aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, compute_log_sumexp=True, is_causal=causal, scale=scale
    )[:2]
    return out, lse[..., : q.shape[2]]  # its rows are padded to a multiple of 32


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where the mask is True, −inf elsewhere; [1, 1, T, S] with aligned rows."""
    num_tokens, num_keys = mask.shape
    row_len = -(-num_keys // _BIAS_ALIGNMENT) * _BIAS_ALIGNMENT
    bias = torch.zeros(num_tokens, row_len, dtype=dtype, device=mask.device)[:, :num_keys]
    return bias.masked_fill_(~mask, -torch.inf)[None, None]

"""Turn q and k of new tokens by their positions' angles, and put k and v into their slots: one launch a layer.

    turned[i]        = x[i] · cos[i] − x[i + half] · sin[i]          i < half
    turned[i + half] = x[i + half] · cos[i] + x[i] · sin[i]          in fp32; arXiv:2104.09864
    turned[i]        = x[i]                                          i ≥ 2 · half

One program handles one head of one token: query heads first, then heads of k, then heads of v. A token whose slot is
negative stores nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate_store_kernel(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, slots_ptr, out_ptr, k_pool_ptr, v_pool_ptr,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride, angle_stride,
    pool_head_stride,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    k_head, v_head = head - NUM_Q_HEADS, head - NUM_Q_HEADS - NUM_KV_HEADS
    if k_head < 0:
        source = q_ptr + token * q_token_stride + head * q_head_stride
        target = out_ptr + (token * NUM_Q_HEADS + head) * HEAD_DIM
    elif v_head < 0:
        source = k_ptr + token * k_token_stride + k_head * k_head_stride
        target = k_pool_ptr + k_head * pool_head_stride + slot * HEAD_DIM
    else:
        source = v_ptr + token * v_token_stride + v_head * v_head_stride
        target = v_pool_ptr + v_head * pool_head_stride + slot * HEAD_DIM
    is_written = (k_head < 0) | (slot >= 0)
    is_value = v_head >= 0
    dims = tl.arange(0, BLOCK)
    first_kept = tl.where(is_value, 0, 2 * HALF)
    is_kept = (dims >= first_kept) & (dims < HEAD_DIM)
    kept = tl.load(source + dims, mask=is_kept, other=0.0)
    tl.store(target + dims, kept, mask=is_kept & is_written)
    if HALF > 0:
        pairs = tl.arange(0, HALF_BLOCK)
        is_pair = (pairs < HALF) & (v_head < 0)
        cos = tl.load(cos_ptr + token * angle_stride + pairs, mask=is_pair, other=0.0)
        sin = tl.load(sin_ptr + token * angle_stride + pairs, mask=is_pair, other=0.0)
        first = tl.load(source + pairs, mask=is_pair, other=0.0).to(tl.float32)
        second = tl.load(source + HALF + pairs, mask=is_pair, other=0.0).to(tl.float32)
        dtype = out_ptr.dtype.element_ty
        tl.store(target + pairs, (first * cos - second * sin).to(dtype), mask=is_pair & is_written)
        tl.store(target + HALF + pairs, (second * cos + first * sin).to(dtype), mask=is_pair & is_written)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    *,
    angles: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """See `kernels.api.rotate_and_store`."""
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    out = torch.empty((num_tokens, num_q_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    cos, sin = (slots, slots) if angles is None else (x.contiguous() for x in angles)  # slots: never read
    half = 0 if angles is None else cos.shape[1]
    _rotate_store_kernel[(num_tokens, num_q_heads + 2 * num_kv_heads)](
        q, k, v, cos, sin, slots, out, k_pool, v_pool,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), half, k_pool.stride(0),
        NUM_Q_HEADS=num_q_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HALF=half,
        HALF_BLOCK=triton.next_power_of_2(max(1, half)), BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
    )  # fmt: skip
    return out

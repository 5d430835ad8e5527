"""Bounded attention in plain torch, in fp64 and with a sort: what `kernels/cpu/bounded.py` must keep to."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.kernels.reference.quantize import quantize_rows


@dataclass(frozen=True, slots=True)
class BoundedAnswer:
    """`out` [T, Hq, D], `lse` [T, Hq] over what was kept and what was near; `is_kept` [T, Hkv, S]; `mass` [T, Hq], the
    share of the softmax that was left out, at most; `bound` [T, Hq], what the norm of the error of `out` cannot exceed.
    """

    out: Tensor
    lse: Tensor
    is_kept: Tensor
    mass: Tensor
    bound: Tensor


def attend_bounded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    max_mass: float,
    near: tuple[Tensor, Tensor] | None = None,
    is_stored_int8: bool = False,
) -> BoundedAnswer:
    """Attention of T queries over S keys, without those that hold at most `max_mass` of each head's softmax.

    Args:
        q: [T, Hq, D]; k, v: [Hkv, S, D].
        near: `out` [T, Hq, D] and `lse` [T, Hq] over other keys.
        is_stored_int8: K is 8-bit integers times a scale a row: scores have no error.
    Formula: rows leave in ascending order of their upper score u = z̃ + δ as long as Σ exp u stays below max_mass of the
    sum of exp(z̃ − δ) over all keys and of what is near; a row that one head of a group keeps is kept. z̃ is the score
    over the row in 8 bits, δ = ‖q‖₁ · row scale / 2. The mass left out is at most N / (Z + N), N the sum of exp u over
    rows left out, Z that of exp z over rows kept and of what is near.
    """
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = len(k)
    group = num_q_heads // num_kv_heads
    queries = q.double().view(num_tokens, num_kv_heads, group, head_dim)
    keys, values = k.double(), v.double()
    scores = torch.einsum("thgd,hsd->thgs", queries, keys) * scale
    upper = lower = scores
    if not is_stored_int8:
        numbers, scales = quantize_rows(k.float())
        rounded = numbers.double() * scales.double()[..., None]
        rough = torch.einsum("thgd,hsd->thgs", queries, rounded) * scale
        error = queries.abs().sum(-1)[..., None] * scales.double()[None, :, None] / 2 * scale
        upper, lower = rough + error, rough - error
    near_lse = torch.full((num_tokens, num_kv_heads, group), -torch.inf, dtype=torch.float64)
    near_out = torch.zeros_like(queries)
    if near is not None:
        near_out, near_lse = near[0].double().view_as(queries), near[1].double().view_as(near_lse)
    norm = torch.logaddexp(lower.logsumexp(-1), near_lse)[..., None]
    ordered, order = upper.sort(dim=-1)
    is_dropped = (ordered - norm).exp().cumsum(-1) <= max_mass
    by_head = torch.ones_like(upper, dtype=torch.bool).scatter(-1, order, ~is_dropped)
    is_kept = by_head.any(2)  # [T, Hkv, S]
    mask = is_kept[:, :, None]
    left = upper.masked_fill(mask, -torch.inf).logsumexp(-1)
    kept = scores.masked_fill(~mask, -torch.inf)
    lse = torch.logaddexp(kept.logsumexp(-1), near_lse)
    out = torch.einsum("thgs,hsd->thgd", (kept - lse[..., None]).exp(), values)
    out = out + (near_lse - lse).exp()[..., None] * near_out
    mass = torch.where(left == -torch.inf, 0.0, torch.sigmoid(left - lse))
    longest = values.norm(dim=-1).amax(-1)[None, :, None]
    bound = mass * (longest + out.norm(dim=-1))
    flat = (num_tokens, num_q_heads)
    return BoundedAnswer(
        out=out.view(*flat, head_dim), lse=lse.view(flat), is_kept=is_kept, mass=mass.view(flat), bound=bound.view(flat)
    )

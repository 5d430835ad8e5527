"""The scan lane's attention in plain torch, in fp64 and with a sort: the truth for the fused kernels."""

from typing import Final

import torch
from torch import Tensor

from ambidex.kernels.reference.kv_tiles import unpack_k

NUM_LANE_FIGURES: Final = 3
"""Of each query head: the share of the softmax left out, the longest value, keys kept of its group."""


def attend_scanned(
    q: Tensor,
    scan_pool: Tensor,
    scan_scales: Tensor,
    rows: Tensor,
    norms: Tensor,
    block_table: Tensor,
    num_keys: Tensor,
    near_lse: Tensor,
    near_part: Tensor,
    *,
    scale: float,
    max_mass: float,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.api.attend_scanned`.

    Formula: keys leave in ascending order of u = z̃ + δ as long as Σ exp u stays below max_mass of Σ exp(z̃ − δ) over all
    keys plus the part of what is near; z̃ is the score over the key in 8 bits, δ = ‖q‖₁ · its scale / 2. The share left
    out is at most N / (Z + N), N the sum of exp u over keys left out, Z that of exp z over keys kept and of that part.
    """
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    figures = torch.zeros((*q.shape[:2], NUM_LANE_FIGURES), device=q.device)
    (num_kv_heads, _, block_size, dim), (_, num_q_heads, head_dim) = scan_pool.shape, q.shape
    near = (near_lse.double() + near_part.double()[:, None]).view(len(q), num_kv_heads, -1)
    for row, num in enumerate(num_keys.tolist()):
        if num == 0:
            continue
        ids = block_table[row, : -(-num // block_size)].long()
        coarse = unpack_k(scan_pool[:, ids], head_dim).flatten(1, 2)[:, :num].double()
        steps = scan_scales[:, ids].flatten(1, 2)[:, :num].double()
        pairs = rows[:, ids].flatten(1, 2)[:, :num].double()
        keys, values = pairs[..., :head_dim], pairs[..., dim : dim + head_dim]
        query = q[row].double().view(num_kv_heads, -1, head_dim)
        errors = query.abs().sum(-1)[..., None] * steps[:, None] / 2 * scale
        uppers = query @ coarse.mT * steps[:, None] * scale + errors  # [Hkv, G, S]
        whole = torch.logaddexp((uppers - 2 * errors).logsumexp(-1), near[row])[..., None]
        ordered, order = uppers.sort(dim=-1)
        is_dropped = (ordered - whole).exp().cumsum(-1) <= max_mass
        is_kept = (~torch.zeros_like(is_dropped).scatter(-1, order, is_dropped)).any(1, keepdim=True)  # [Hkv, 1, S]
        scores = (query @ keys.mT * scale).masked_fill(~is_kept, -torch.inf)
        row_lse = scores.logsumexp(-1)
        weights = (scores - torch.where(row_lse == -torch.inf, 0.0, row_lse)[..., None]).exp()
        left = uppers.masked_fill(is_kept, -torch.inf).logsumexp(-1)
        total = torch.logaddexp(row_lse, near[row])
        out[row] = (weights @ values).view(num_q_heads, head_dim)
        lse[row] = row_lse.view(-1)
        figures[row, :, 0] = torch.where(left == -torch.inf, 0.0, torch.sigmoid(left - total)).view(-1)
        figures[row, :, 1] = norms[:, ids, 1].amax(1).repeat_interleave(num_q_heads // num_kv_heads)
        if kept is not None:
            of_keys = is_kept.sum((0, 1), dtype=torch.int32)
            kept.index_add_(0, ids.repeat_interleave(block_size)[:num], of_keys)
        figures[row, :, 2] = is_kept.sum(-1).expand(-1, num_q_heads // num_kv_heads).flatten()
    return out, lse, figures

"""Attention over chosen keys whose scores are given and near ones that are scored, in plain torch: the truth."""

import torch
from torch import Tensor


def chosen_probs(q: Tensor, near_k: Tensor, given: Tensor, *, scale: float) -> Tensor:
    """See `kernels.api.chosen_probs`."""
    num_heads, group_size, _ = given.shape
    grouped = q.float().view(num_heads, group_size, q.shape[1])
    true = torch.bmm(grouped, near_k.float().transpose(1, 2)) * scale
    return torch.cat((given.float(), true), dim=2).softmax(2)


def attend_chosen(
    q: Tensor, near_k: Tensor, near_v: Tensor, places: Tensor, given: Tensor, v: Tensor, *, scale: float
) -> Tensor:
    """See `kernels.api.attend_chosen`."""
    num_heads, num_rows, head_dim = v.shape
    base = torch.arange(num_heads, device=v.device)[:, None] * num_rows
    taken = v.reshape(-1, head_dim).index_select(0, (places + base).flatten()).view(num_heads, -1, head_dim)
    values = torch.cat((taken, near_v), dim=1).float()  # [Hkv, M + n, D]
    return torch.bmm(chosen_probs(q, near_k, given, scale=scale), values).flatten(0, 1).to(q.dtype)

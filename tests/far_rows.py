"""Rows in host memory as kernels find them: each layer whole, another request's rows between two layers."""

import torch
from torch import Tensor


def make_far(
    num_layers: int, num_kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype, device: str
) -> Tensor:
    """K and V [2, L, Hkv, capacity, D] of NaN; pinned for a GPU."""
    memory = torch.full((2, num_layers, num_kv_heads + 1, capacity, head_dim), torch.nan).to(dtype)
    return (memory.pin_memory() if device == "cuda" else memory)[:, :, :num_kv_heads]


def layer_rows(far: Tensor) -> int:
    """Rows of one head from where a layer begins to where the next one does."""
    return far.stride(-4) // far.shape[-1]

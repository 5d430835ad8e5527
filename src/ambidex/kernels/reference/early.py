"""Attention over near keys and the far ones that early scores put first, one by one in plain torch: the truth."""

import ctypes

import torch
from torch import Tensor

from ambidex.kernels.early_rows import EarlyRows
from ambidex.kernels.reference.chosen import attend_chosen


def attend_early(
    q: Tensor, near_k: Tensor, near_v: Tensor, scores: Tensor, rows: EarlyRows, *, layer_idx: int, scale: float
) -> Tensor:
    """See `kernels.api.attend_early`."""
    num_kv_heads, head_dim = near_k.shape[0], q.shape[2]
    group = q.shape[1] // num_kv_heads
    out = torch.zeros_like(q)
    numbers = (rows.near_first, rows.near_num, rows.far_num, rows.num_selected, rows.score_first, rows.v_address,
               rows.capacity)  # fmt: skip
    for row, (near_first, near_num, far_num, num_selected, first, address, capacity) in enumerate(
        zip(*(part.tolist() for part in numbers), strict=True)
    ):
        if near_num == 0:
            continue
        given = scores[first : first + q.shape[1] * far_num].view(num_kv_heads, group, far_num)
        order = given.amax(1).sort(dim=1, descending=True, stable=True).indices
        places = order[:, :num_selected].to(q.device)  # [Hkv, M]
        near = slice(near_first, near_first + near_num)
        v = near_v[:, :0, 0]
        if far_num:
            layer_bytes = num_kv_heads * capacity * head_dim * near_v.itemsize
            v = _read_at(address + layer_idx * layer_bytes, (num_kv_heads, capacity, head_dim), near_v.dtype)
        out[row] = attend_chosen(
            q[row],
            near_k.flatten(1, 2)[:, near],
            near_v.flatten(1, 2)[:, near],
            places,
            given.to(q.device).gather(2, places[:, None].expand(-1, group, -1)),
            v.to(q.device),
            scale=scale,
        )
    return out


def _read_at(address: int, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """Host memory at an address; valid as long as its owner keeps it."""
    count = torch.Size(shape).numel()
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)

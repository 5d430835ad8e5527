"""Attention over near keys and the far ones that early scores, or partial keys, put first, one by one in plain torch:
the truth."""

import ctypes

import torch
from torch import Tensor

from ambidex.core.errors import InternalError
from ambidex.kernels.early_rows import AlphaCount, EarlyRows, FarCut, PartialRows
from ambidex.kernels.reference.chosen import attend_chosen


def attend_early(
    q: Tensor, near_k: Tensor, near_v: Tensor, scores: Tensor, rows: EarlyRows, *, layer_idx: int, scale: float
) -> Tensor:
    """See `kernels.api.attend_early`."""
    num_kv_heads, head_dim = near_k.shape[0], q.shape[2]
    group = q.shape[1] // num_kv_heads
    out = torch.zeros_like(q)
    numbers = (rows.near_first, rows.near_num, rows.far_num, rows.num_selected, rows.score_first, rows.v_address,
               rows.capacity, rows.layer_rows)  # fmt: skip
    for row, (near_first, near_num, far_num, num_selected, first, address, capacity, layer_rows) in enumerate(
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
            shape = (num_kv_heads, capacity, head_dim)
            v = read_layer(address, layer_idx, shape, near_v.dtype, layer_rows=layer_rows)
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


def predict_far(
    early: Tensor,
    near_k: Tensor,
    rows: EarlyRows,
    partial: PartialRows,
    *,
    max_far: int,
    scale: float,
    count: AlphaCount | None,
) -> FarCut:
    """See `kernels.api.predict_far`."""
    if early.device.type != "cpu":
        raise InternalError(f"the reference of predict_far reads host memory alone: its queries lie on {early.device}")
    num_kv_heads, head_dim = near_k.shape[0], early.shape[2]
    group = early.shape[1] // num_kv_heads
    order = torch.empty(num_kv_heads * max_far, dtype=torch.int32)
    bounds = torch.zeros(len(early), num_kv_heads, 2, dtype=torch.int32)
    if count is not None:
        count.num_chosen.zero_()
    numbers = (rows.near_slots, rows.near_num, rows.far_num, rows.num_selected, rows.score_first, partial.rows_address,
               partial.turn_address, partial.capacity)  # fmt: skip
    for row, (slot, near_num, far_num, num_selected, first, address, turn_address, capacity) in enumerate(
        zip(*(part.tolist() for part in numbers), strict=True)
    ):
        if slot < 0:
            continue
        turn = _read_at(turn_address, (num_kv_heads, head_dim, partial.num_columns), torch.float32)
        kept = _read_at(address, (num_kv_heads, capacity, partial.num_columns), torch.float32)
        kept[:, far_num + near_num - 1] = torch.bmm(near_k.flatten(1, 2)[:, slot, None].float(), turn)[:, 0]
        if far_num == 0:
            continue
        turned = early[row].float().view(num_kv_heads, group, head_dim) @ turn
        best = (turned @ kept[:, :far_num].transpose(1, 2) * scale).amax(1)  # [Hkv, far]
        bits = best.view(torch.int32)
        own = order[first // group :][: num_kv_heads * far_num].view(num_kv_heads, far_num)
        own.copy_(bits ^ ((bits >> 31) & 0x7FFFFFFF))
        num = min(num_selected, far_num)
        if count is not None:
            num_near_best = int((best > best.amax(1, keepdim=True) - count.alpha).sum())
            num = count.num_chosen[row] = min(num, num_near_best // num_kv_heads)
        if num == 0:
            bounds[row, :, 0] = torch.iinfo(torch.int32).max  # nothing lies above
            continue
        chosen = own.sort(dim=1, descending=True, stable=True)
        bounds[row, :, 0], bounds[row, :, 1] = chosen.values[:, num - 1], chosen.indices[:, num - 1] + 1
    return FarCut(order=order, bounds=bounds)


def attend_predicted(
    q: Tensor, early: Tensor, near_k: Tensor, near_v: Tensor, cut: FarCut, rows: EarlyRows, *, layer_idx: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """See `kernels.api.attend_predicted`."""
    num_kv_heads, head_dim = near_k.shape[0], q.shape[2]
    group = q.shape[1] // num_kv_heads
    out = torch.zeros_like(q)
    numbers = (rows.near_first, rows.near_num, rows.far_num, rows.score_first, rows.k_address, rows.v_address,
               rows.capacity, rows.layer_rows)  # fmt: skip
    for row, (near_first, near_num, far_num, first, k_address, v_address, capacity, layer_rows) in enumerate(
        zip(*(part.tolist() for part in numbers), strict=True)
    ):
        near = slice(near_first, near_first + near_num)
        near_keys, near_values = near_k.flatten(1, 2)[:, near], near_v.flatten(1, 2)[:, near]
        for head in range(num_kv_heads if near_num else 0):
            places = torch.empty(0, dtype=torch.int64)
            k = v = near_k[head, 0, :0]
            if far_num:
                order = cut.order[first // group + head * far_num :][:far_num].cpu()
                low, end = cut.bounds[row, head].tolist()
                places = ((order > low) | ((order == low) & (torch.arange(far_num) < end))).nonzero()[:, 0]
                shape = (num_kv_heads, capacity, head_dim)
                k, v = (
                    read_layer(at, layer_idx, shape, near_v.dtype, layer_rows=layer_rows)[head]
                    for at in (k_address, v_address)
                )
            heads = slice(head * group, (head + 1) * group)
            given = early[row, heads].float() @ k[places].to(q.device).float().T * scale
            out[row, heads] = attend_chosen(
                q[row, heads],
                near_keys[head, None],
                near_values[head, None],
                torch.arange(len(places), device=q.device)[None],
                given[None],
                v[places].to(q.device)[None],
                scale=scale,
            )
    return out


def read_layer(
    address: int, layer_idx: int, shape: tuple[int, ...], dtype: torch.dtype, *, layer_rows: int | None = None
) -> Tensor:
    """Rows of one layer of those that lie at an address; layers begin `layer_rows` rows apart, or (None) lie right
    behind each other."""
    apart = torch.Size(shape).numel() if layer_rows is None else layer_rows * shape[-1]
    return _read_at(address + layer_idx * apart * dtype.itemsize, shape, dtype)


def _read_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Host memory at an address; valid as long as its owner keeps it."""
    count = torch.Size(shape).numel()
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)

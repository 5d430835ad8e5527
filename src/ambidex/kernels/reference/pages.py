"""Attention over the pages of keys that each query head takes by bounds on their scores, in plain torch: the truth."""

from dataclasses import fields

import torch
from torch import Tensor

from ambidex.core.errors import InternalError
from ambidex.kernels.early_rows import BoxRows, EarlyRows, PageCut
from ambidex.kernels.reference.early import read_layer

_NEWEST = torch.iinfo(torch.int32).max
"""The order of the newest page, which is above all bounds."""


def choose_pages(
    q: Tensor, near_k: Tensor, rows: EarlyRows, boxes: BoxRows, *, max_pages: int, layer_idx: int
) -> PageCut:
    """See `kernels.api.choose_pages`."""
    _check_reach(q)
    num_kv_heads, head_dim = near_k.shape[0], q.shape[2]
    num_q_heads, page = q.shape[1], boxes.page_tokens
    order = torch.empty(num_q_heads * max_pages, dtype=torch.int32)
    bounds = torch.zeros(len(q), num_q_heads, 2, dtype=torch.int32)
    for row, numbers in enumerate(_each(rows, boxes)):
        if numbers["near_slots"] < 0:
            continue
        far_num, num_pages, num_taken = numbers["far_num"], numbers["num_pages"], numbers["num_taken"]
        kept_shape = (num_kv_heads, numbers["box_capacity"], 2, head_dim)
        if numbers["box_capacity"]:
            kept = read_layer(numbers["boxes_address"], layer_idx - boxes.first_layer, kept_shape, torch.float32)
        else:
            kept = torch.empty(kept_shape)
        if (far_num + 1) % page == 0:
            own = near_k.flatten(1, 2)[:, numbers["near_slots"], None]  # [Hkv, 1, D]
            shape = (num_kv_heads, numbers["capacity"], head_dim)
            older = read_layer(numbers["k_address"], layer_idx, shape, q.dtype, layer_rows=numbers["layer_rows"])
            older = older[:, far_num + 1 - page : far_num]
            keys = torch.cat((older, own), 1).float()
            kept[:, num_pages - 1, 0], kept[:, num_pages - 1, 1] = keys.amin(1), keys.amax(1)
        low, high = kept[:, : num_pages - 1].unbind(2)
        grouped = q[row].float().view(num_kv_heads, -1, 1, head_dim)
        found = torch.maximum(grouped * low[:, None], grouped * high[:, None]).sum(-1).flatten(0, 1) + 0.0  # no −0
        own_order = order[numbers["bound_first"] :][: num_q_heads * num_pages].view(num_q_heads, num_pages)
        bits = found.view(torch.int32)
        own_order[:, :-1] = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        own_order[:, -1] = _NEWEST
        chosen = own_order.sort(dim=1, descending=True, stable=True)
        bounds[row, :, 0] = chosen.values[:, num_taken - 1]
        bounds[row, :, 1] = chosen.indices[:, num_taken - 1] + 1
    return PageCut(order=order, bounds=bounds, boxes=boxes)


def attend_pages(
    q: Tensor, near_k: Tensor, near_v: Tensor, cut: PageCut, rows: EarlyRows, *, num_read: Tensor, layer_idx: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """See `kernels.api.attend_pages`."""
    _check_reach(q)
    num_kv_heads, (_, num_q_heads, head_dim) = near_k.shape[0], q.shape
    group = num_q_heads // num_kv_heads
    out = torch.zeros_like(q)
    num_read.zero_()
    for row, numbers in enumerate(_each(rows, cut.boxes)):
        if numbers["near_num"] == 0:
            continue
        far_num, num_pages = numbers["far_num"], numbers["num_pages"]
        near = slice(numbers["near_first"], numbers["near_first"] + numbers["near_num"])
        shape = (num_kv_heads, numbers["capacity"], head_dim)
        k, v = (
            read_layer(numbers[name], layer_idx, shape, q.dtype, layer_rows=numbers["layer_rows"])[:, :far_num]
            for name in ("k_address", "v_address")
        )
        order = cut.order[numbers["bound_first"] :][: num_q_heads * num_pages].view(num_q_heads, num_pages)
        low, end = cut.bounds[row, :, :1], cut.bounds[row, :, 1:]
        pages = (order > low) | ((order == low) & (torch.arange(num_pages) < end))
        taken = pages.repeat_interleave(cut.boxes.page_tokens, 1)[:, :far_num]  # [Hq, far]
        num_read[row] = taken.view(num_kv_heads, group, far_num).any(1).sum(1)
        for head in range(num_q_heads):
            kv_head, places = head // group, taken[head]
            keys = torch.cat((k[kv_head, places], near_k[kv_head].flatten(0, 1)[near])).float()
            values = torch.cat((v[kv_head, places], near_v[kv_head].flatten(0, 1)[near])).float()
            out[row, head] = ((keys @ q[row, head].float() * scale).softmax(0) @ values).to(q.dtype)
    return out


def _each(rows: EarlyRows, boxes: BoxRows) -> list[dict[str, int]]:
    """The numbers of each request, by name."""
    parts = {field.name: getattr(part, field.name) for part in (rows, boxes) for field in fields(part)}
    lists = {name: part.tolist() for name, part in parts.items() if isinstance(part, Tensor)}
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _check_reach(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise InternalError(f"the reference of pages reads host memory alone: its tensors lie on {tensor.device}")

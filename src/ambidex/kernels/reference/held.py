"""Attention over the far keys that are held or recent, and what they get of it, and over the first and the newest, in
plain torch: the truth."""

import torch
from torch import Tensor

from ambidex.core.errors import InternalError
from ambidex.kernels.early_rows import EarlyRows, SumRows, SumRule, WindowRows
from ambidex.kernels.noise import gumbel_noise
from ambidex.kernels.reference.early import read_layer


def attend_held(
    q: Tensor, near_k: Tensor, near_v: Tensor, rows: EarlyRows, held: SumRows, *, max_far: int, layer_idx: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See `kernels.api.attend_held`."""
    _check_reach(q)
    num_rows, num_q_heads, head_dim = q.shape
    num_kv_heads = near_k.shape[0]
    group = num_q_heads // num_kv_heads
    out, lse = torch.zeros_like(q), torch.full((num_rows, num_q_heads), -torch.inf)
    scores = torch.full((num_q_heads * (max_far + num_rows),), torch.nan)
    numbers = (rows.near_first, rows.near_num, rows.far_num, rows.score_first, rows.k_address, rows.v_address,
               rows.capacity, rows.layer_rows, held.held_from, held.recent_first)  # fmt: skip
    for row, values in enumerate(zip(*(part.tolist() for part in numbers), strict=True)):
        near_first, near_num, far_num, first, k_address, v_address, capacity, layer_rows, held_address, recent = values
        if near_num == 0:
            continue
        near, num_keys = slice(near_first, near_first + near_num), far_num + near_num
        own_scores = scores[first : first + num_q_heads * num_keys].view(num_q_heads, num_keys)
        is_held = read_layer(held_address, layer_idx, (num_kv_heads, capacity), torch.uint8)[:, :far_num] != 0
        is_held[:, recent:] = True
        shape = (num_kv_heads, capacity, head_dim)
        k, v = (
            read_layer(address, layer_idx, shape, q.dtype, layer_rows=layer_rows)[:, :far_num]
            for address in (k_address, v_address)
        )
        for head in range(num_q_heads):
            kv_head = head // group
            taken = is_held[kv_head]
            keys = torch.cat((k[kv_head, taken], near_k[kv_head].flatten(0, 1)[near])).float()
            kept = torch.cat((v[kv_head, taken], near_v[kv_head].flatten(0, 1)[near])).float()
            own = keys @ q[row, head].float() * scale
            out[row, head] = (own.softmax(0) @ kept).to(q.dtype)
            lse[row, head] = own.logsumexp(0)
            own_scores[head, torch.cat((taken, torch.ones(near_num, dtype=torch.bool)))] = own
    return out, lse, scores


def attend_windows(
    q: Tensor, sink_q: Tensor, near_k: Tensor, near_v: Tensor, rows: EarlyRows, windows: WindowRows, *,
    layer_idx: int, scale: float,
) -> Tensor:  # fmt: skip
    """See `kernels.api.attend_windows`."""
    _check_reach(q)
    num_kv_heads, head_dim = near_k.shape[0], q.shape[2]
    group = q.shape[1] // num_kv_heads
    out = torch.zeros_like(q)
    numbers = (rows.near_first, rows.near_num, rows.far_num, rows.k_address, rows.v_address, rows.capacity,
               rows.layer_rows, windows.sink_end, windows.window_first)  # fmt: skip
    for row, values in enumerate(zip(*(part.tolist() for part in numbers), strict=True)):
        near_first, near_num, far_num, k_address, v_address, capacity, layer_rows, sink_end, first = values
        if near_num == 0:
            continue
        near, shape = slice(near_first, near_first + near_num), (num_kv_heads, capacity, head_dim)
        k, v = (
            read_layer(address, layer_idx, shape, q.dtype, layer_rows=layer_rows)[:, :far_num]
            for address in (k_address, v_address)
        )
        for head in range(q.shape[1]):
            kv_head = head // group
            sinks = k[kv_head, :sink_end].float() @ sink_q[row, head].float()
            newest = torch.cat((k[kv_head, first:], near_k[kv_head].flatten(0, 1)[near])).float()
            scores = torch.cat((sinks, newest @ q[row, head].float())) * scale
            kept = torch.cat((v[kv_head, :sink_end], v[kv_head, first:], near_v[kv_head].flatten(0, 1)[near]))
            out[row, head] = (scores.softmax(0) @ kept.float()).to(q.dtype)
    return out


def add_sums(
    scores: Tensor, lse: Tensor, rows: EarlyRows, held: SumRows, rule: SumRule, *, num_attended: Tensor, layer_idx: int
) -> None:
    """See `kernels.api.add_sums`."""
    _check_reach(scores)
    num_q_heads, num_kv_heads = lse.shape[1], num_attended.shape[1]
    num_attended.zero_()
    numbers = (rows.near_num, rows.far_num, rows.score_first, rows.capacity, held.sums_from, held.sums_to,
               held.held_from, held.held_to, held.recent_first, held.drop_end, held.tau)  # fmt: skip
    for row, (near_num, far_num, first, capacity, old, new, held_from, held_to, recent, end, tau) in enumerate(
        zip(*(part.tolist() for part in numbers), strict=True)
    ):
        if near_num == 0:
            continue
        num_keys, shape = far_num + 1, (num_kv_heads, capacity)
        is_held = read_layer(held_from, layer_idx, shape, torch.uint8)[:, :num_keys] != 0
        is_held[:, far_num] = True
        is_attended = is_held.clone()
        is_attended[:, recent:] = True
        num_attended[row] = is_attended.sum(1) - 1
        x = scores[first : first + num_q_heads * num_keys].view(num_kv_heads, -1, num_keys)
        if rule.noise_seed is not None:
            noise = gumbel_noise(rule.noise_seed, torch.tensor([far_num]), num_q_heads, num_keys)
            x = (x + noise.view(x.shape)) / torch.tensor(tau, dtype=torch.int32).view(torch.float32)
        weights = x.masked_fill(~is_attended[:, None], -torch.inf).softmax(2)
        sums = read_layer(old, layer_idx, shape, torch.float32)[:, :num_keys].clone()
        sums[:, far_num] = 0
        sums += weights.sum(1)
        for head in range(num_kv_heads if end else 0):
            places = is_held[head, :end].nonzero()[:, 0].tolist()
            order = 1 if rule.drops_first else -1
            dropped = min(places, key=lambda place: (float(sums[head, place]), order * place))
            is_held[head, dropped] = False
        read_layer(new, layer_idx, shape, torch.float32)[:, :num_keys] = sums
        read_layer(held_to, layer_idx, shape, torch.uint8)[:, :num_keys] = is_held.to(torch.uint8)


def _check_reach(tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise InternalError(f"the reference of held keys reads host memory alone: its tensors lie on {tensor.device}")

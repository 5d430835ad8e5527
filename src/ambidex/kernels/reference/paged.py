"""Decode attention over a paged pool, and storing new rows, in plain torch: the truth for the fused kernels."""

import torch
from torch import Tensor

from ambidex.kernels.reference.attention import attend
from ambidex.kernels.reference.rope import rotate


def attend_paged(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    first_key: Tensor,
    num_keys: Tensor,
    *,
    scale: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See `kernels.api.attend_paged`.

    NOTE: rows that are not visible are cut off, not masked: they may hold NaN (0 · NaN is NaN).
    """
    block_size = k_pool.shape[2]
    out = torch.zeros(q.shape, dtype=out_dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    for row, (first, num) in enumerate(zip(first_key.tolist(), num_keys.tolist(), strict=True)):
        if num == 0:
            continue
        places = torch.arange(first, first + num, device=q.device)
        slots = block_table[row, places // block_size].long() * block_size + places % block_size
        keys, values = (pool.flatten(1, 2)[:, slots] for pool in (k_pool, v_pool))  # [Hkv, num, D]
        row_out, row_lse = attend(q[row : row + 1].float(), keys.float(), values.float(), scale=scale)
        out[row], lse[row] = row_out[0].to(out_dtype), row_lse[0]
    return out, lse


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
    if angles is not None:
        q, k = rotate(q, *angles), rotate(k, *angles)
    is_stored = slots >= 0
    for pool, rows in ((k_pool, k), (v_pool, v)):
        pool.view(pool.shape[0], -1, pool.shape[3]).index_copy_(1, slots[is_stored], rows[is_stored].transpose(0, 1))
    return q

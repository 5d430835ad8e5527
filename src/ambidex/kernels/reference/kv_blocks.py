"""Whole blocks between rows and tile order, in plain torch; on two devices as well, then with a wait."""

import torch
from torch import Tensor

from ambidex.kernels.reference import int4, kv_tiles
from ambidex.kernels.reference.quantize import quantize_rows


def fetch_blocks(pool: Tensor, block_ids: Tensor, out: Tensor) -> None:
    """See `kernels.tiles.fetch_blocks`."""
    out.copy_(pool[:, block_ids.to(pool.device)])


def unpack_blocks(
    k: Tensor, v: Tensor, k_out: Tensor, v_out: Tensor, *, k_scales: Tensor | None, v_scales: Tensor | None
) -> None:
    """See `kernels.tiles.unpack_blocks`."""
    for out, blocks, scales in (
        (k_out, kv_tiles.unpack_k(k, k.shape[3]), k_scales),
        (v_out, kv_tiles.unpack_v(v, v.shape[3]), v_scales),
    ):
        out.copy_(kv_tiles.visible_rows(blocks, scales, slice(None), slice(None), out.shape[2]))


def pack_blocks(
    k: Tensor,
    v: Tensor,
    jobs: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:
    """See `kernels.tiles.pack_blocks`."""
    for row, block, first, end in jobs.tolist():
        for rows, pool, scales, pack, unpack in (
            (k, k_pool, k_scales, kv_tiles.pack_k, kv_tiles.unpack_k),
            (v, v_pool, v_scales, kv_tiles.pack_v, kv_tiles.unpack_v),
        ):
            numbers = rows[:, :, row + first : row + end]  # [L, Hkv, tokens, D]
            if scales is not None and pool.dtype == torch.uint8:
                numbers, words = int4.pack_rows(numbers)
                scales[:, :, block, :, first:end] = words.transpose(2, 3).to(scales.device)
            elif scales is not None:
                numbers, row_scales = quantize_rows(numbers)
                scales[:, :, block, first:end] = row_scales.to(scales.device)
            whole = unpack(pool[:, :, block], pool.shape[4])  # [L, Hkv, P, R]
            whole[:, :, first:end] = torch.nn.functional.pad(
                numbers.to(pool.device, pool.dtype), (0, pool.shape[4] - numbers.shape[3])
            )
            pool[:, :, block] = pack(whole)

"""The door to the ops that carry blocks in tile order between host memory and an accelerator.

Beside those of `api.py`, because their tensors lie on two devices: a pool in host memory, and rows where they are
computed. With Triton the host's side must be pinned: the GPU follows its address. Letters as in `api.py`, R elements of
a padded row (numbers, of int4 bytes with two of them), J jobs. K and V may be of two formats.

Scales are fp32, [..., N, P] of int8, [..., N, W, P] of int4 (`reference/int4.py`); floating formats have none.
"""

import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels.dispatch import choose
from ambidex.kernels.reference import int4, kv_blocks
from ambidex.kernels.reference.kv_tiles import padded_dim
from ambidex.kernels.shapes import check_shapes


def fetch_blocks(pool: Tensor, block_ids: Tensor, out: Tensor) -> None:
    """Copy blocks of a pool in host memory to another device, as they are.

    Args:
        pool: [Hkv, N, P, R] in any order, contiguous but for the first axis; a record [P, R] is whole 4-byte words.
        block_ids: [n] int64 on the device of out.
        out: [Hkv, n, P, R] in the pool's dtype, contiguous but for the first axis.
    Raises:
        ShapeError: shapes or dtypes do not fit.
    Cost: reads the blocks over the link.
    """
    check_shapes(pool=(pool, "Hkv N P R"), block_ids=(block_ids, "n"), out=(out, "Hkv n P R"))
    if pool.dtype != out.dtype or not out[0].is_contiguous() or block_ids.device != out.device:
        raise ShapeError(f"out: expected contiguous {pool.dtype} where block_ids lie, got {out.dtype} on {out.device}")
    if choose("fetch_blocks", out.device.type).name == "triton":
        from ambidex.kernels.triton import fetch as triton_fetch

        return triton_fetch.fetch_blocks(pool, block_ids, out)
    return kv_blocks.fetch_blocks(pool, block_ids, out)


def unpack_blocks(
    k: Tensor,
    v: Tensor,
    k_out: Tensor,
    v_out: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """K and V of blocks in tile order → their rows side by side.

    Args:
        k, v: [Hkv, n, P, R] contiguous.
        k_out, v_out: [Hkv, n · P, D] contiguous, in a floating format, on the device of k.
        k_scales, v_scales: [Hkv, n, …] contiguous, with integers only.
    Raises:
        ShapeError: shapes, dtypes or devices do not fit.
    Cost: reads the tiles and writes the rows once.
    """
    check_shapes(k=(k, "Hkv n P R"), v=(v, "Hkv n P Rv"), k_out=(k_out, "Hkv S D"), v_out=(v_out, "Hkv S D"))
    for name, tiles, out, scales in (("k", k, k_out, k_scales), ("v", v, v_out, v_scales)):
        num_blocks, block_size = tiles.shape[1:3]
        if out.shape[1] != num_blocks * block_size or padded_dim(out.shape[2]) != _row_numbers(tiles):
            raise ShapeError(f"{name}_out: {tuple(out.shape)} are not the rows of blocks of shape {tuple(tiles.shape)}")
        _check_scales(name, tiles, scales)
    if not all(x.is_contiguous() and x.device == k.device for x in (k, v, k_out, v_out)):
        raise ShapeError("k, v, k_out, v_out: expected contiguous tensors on one device")
    if choose("unpack_blocks", k.device.type).name == "triton":
        from ambidex.kernels.triton import kv_tiles as triton_tiles

        return triton_tiles.unpack_blocks(k, v, k_out, v_out, k_scales=k_scales, v_scales=v_scales)
    return kv_blocks.unpack_blocks(k, v, k_out, v_out, k_scales=k_scales, v_scales=v_scales)


def pack_blocks(
    k: Tensor,
    v: Tensor,
    jobs: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Write rows into blocks of a pool in tile order, whole blocks or a part of their tokens.

    Args:
        k, v: rows [L, Hkv, T, D] in a floating format, any strides with D contiguous.
        jobs: [J, 4] int64 on the device of k, no block twice: the row of the block's token 0 (negative if its first
            tokens are not among the rows), the block, its first and its last written token + 1.
        k_pool, v_pool: [L, Hkv, N, P, R] contiguous; padded with zeros where they are written.
        k_scales, v_scales: [L, Hkv, N, …] contiguous, with integers only.
    Raises:
        ShapeError: shapes or dtypes do not fit.
    Cost: writes the rows over the link once; does not wait.
    """
    check_shapes(
        k=(k, "L Hkv T D"), v=(v, "L Hkv T D"), k_pool=(k_pool, "L Hkv N P R"), v_pool=(v_pool, "L Hkv N P Rv"),
    )  # fmt: skip
    if jobs.dim() != 2 or jobs.shape[1] != 4 or jobs.dtype != torch.int64 or jobs.device != k.device:
        raise ShapeError(f"jobs: expected int64 [J, 4] on {k.device}, got {jobs.dtype} of shape {tuple(jobs.shape)}")
    for name, rows, pool, scales in (("k", k, k_pool, k_scales), ("v", v, v_pool, v_scales)):
        if rows.stride(3) != 1 or padded_dim(rows.shape[3]) != _row_numbers(pool):
            raise ShapeError(f"{name}: rows {tuple(rows.shape)} do not fit tiles of shape {tuple(pool.shape)}")
        _check_scales(name, pool, scales)
    if choose("pack_blocks", k.device.type).name == "triton":
        from ambidex.kernels.triton import kv_tiles as triton_tiles

        return triton_tiles.pack_blocks(k, v, jobs.contiguous(), k_pool, v_pool, k_scales=k_scales, v_scales=v_scales)
    return kv_blocks.pack_blocks(k, v, jobs, k_pool, v_pool, k_scales=k_scales, v_scales=v_scales)


def _row_numbers(tiles: Tensor) -> int:
    """Numbers of a padded row of tiles [..., R]."""
    return tiles.shape[-1] * (2 if tiles.dtype == torch.uint8 else 1)


def _check_scales(name: str, tiles: Tensor, scales: Tensor | None) -> None:
    """See that tiles [..., N, P, R] of integers come with their scales, and others with none."""
    if (scales is None) == (tiles.dtype in (torch.int8, torch.uint8)):
        raise ShapeError(f"{name}_scales: expected with int8 and int4 only, the tiles are {tiles.dtype}")
    if scales is None:
        return
    words = (int4.num_words(_row_numbers(tiles)),) if tiles.dtype == torch.uint8 else ()
    shape = (*tiles.shape[:-2], *words, tiles.shape[-2])
    if scales.shape != shape or scales.dtype != torch.float32:
        raise ShapeError(f"{name}_scales: expected fp32 {shape}, got {scales.dtype} of shape {tuple(scales.shape)}")

"""Blocks at scattered places of pinned host memory, brought to the GPU by its own threads.

    out[h, j] = pool[h, ids[j]]

The copy engine is the better way for long runs of blocks: it takes no multiprocessor. A record of one block and head is
too short for it, but long enough for threads: a few programs, each with 16 KiB on its way, fill the link.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUM_PROGRAMS: Final = 16
"""16 programs of 16 KiB keep 256 KiB on their way, five times what 55 GB/s deliver in a microsecond, and leave the
other multiprocessors to whoever computes."""
_TILE_WORDS: Final = 4096
"""16 KiB: 4 loads of 16 bytes for each of 256 threads."""


@triton.jit(do_not_specialize=["num_ids", "num_tiles"])  # they differ from piece to piece
def _fetch_kernel(
    pool_ptr, ids_ptr, out_ptr, num_ids, num_tiles, pool_head_stride, out_head_stride,
    WORDS: tl.constexpr, TILE: tl.constexpr, NUM_PROGRAMS: tl.constexpr,
):  # fmt: skip
    tiles_per_record: tl.constexpr = (WORDS + TILE - 1) // TILE
    for tile in range(tl.program_id(0), num_tiles, NUM_PROGRAMS):
        record = tile // tiles_per_record
        words = tile % tiles_per_record * TILE + tl.arange(0, TILE)
        block = tl.load(ids_ptr + record % num_ids).to(tl.int64)
        source = pool_ptr + record // num_ids * pool_head_stride.to(tl.int64) + block * WORDS
        target = out_ptr + record // num_ids * out_head_stride.to(tl.int64) + record % num_ids * WORDS
        numbers = tl.load(source + words, mask=words < WORDS, other=0)
        tl.store(target + words, numbers, mask=words < WORDS)


def fetch_blocks(pool: Tensor, block_ids: Tensor, out: Tensor) -> None:
    """See `kernels.tiles.fetch_blocks`."""
    if out.numel() == 0:
        return
    words, targets = pool.view(torch.int32), out.view(torch.int32)
    num_words = words[0, 0].numel()
    num_tiles = pool.shape[0] * len(block_ids) * triton.cdiv(num_words, _TILE_WORDS)
    _fetch_kernel[(min(_NUM_PROGRAMS, num_tiles),)](
        words, block_ids, targets, len(block_ids), num_tiles, words.stride(0), targets.stride(0),
        WORDS=num_words, TILE=_TILE_WORDS, NUM_PROGRAMS=_NUM_PROGRAMS, num_warps=8,
    )  # fmt: skip

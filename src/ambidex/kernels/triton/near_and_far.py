"""What kernels share that attend one query over near keys and chosen far ones, split over the keys.

    keys of a head      | far 0 … num_far − 1 | near num_far … num_keys − 1 |  far ones that are not chosen are not read
    tiles, splits       |  split 0  |  split 1  |  …  |                        each a running softmax: top, total, acc
    s_j in powers of 2  far_scores_j, j being chosen;  q · k_j · scale_log2 for near j

How far keys get their scores and where their rows of V lie is the affair of `attend_chosen` and `attend_early`.
A split of which no key is chosen has lse −inf, as one without keys; the splits are joined as in `attend_paged`.
"""

import triton
import triton.language as tl


@triton.jit
def split_tiles(num_keys, split, BLOCK_KEYS: tl.constexpr, NUM_SPLITS: tl.constexpr):
    """The first tile of a split and the one behind its last."""
    num_tiles = tl.cdiv(num_keys, BLOCK_KEYS)
    tiles_per_split = tl.cdiv(num_tiles, NUM_SPLITS)
    tile_begin = split * tiles_per_split
    return tile_begin, tl.minimum(tile_begin + tiles_per_split, num_tiles)


@triton.jit
def add_tile(
    top, total, acc, q, keys, is_chosen, is_near, far_scores, far_v, near_k_ptr, near_v_ptr, num_far, dims, is_dim,
    scale_log2,
    HEAD_DIM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys to a running softmax, and return it and the tile's scores, in powers of 2; of the rows from
    near_k_ptr on only near ones are read.

    Args:
        top, total, acc: largest score, Σ 2^(s − top) and Σ 2^(s − top) v of each query head, over the tiles before.
        is_chosen, is_near: of the tile's keys; never both. is_chosen goes with far_scores and far_v.
        near_k_ptr, near_v_ptr: rows of the head's near keys, from the first, which is key num_far.
    """
    near_rows = (keys - num_far)[:, None] * HEAD_DIM + dims[None, :]
    is_near_row = is_near[:, None] & is_dim[None, :]
    k = tl.load(near_k_ptr + near_rows, mask=is_near_row, other=0.0)
    near_v = tl.load(near_v_ptr + near_rows, mask=is_near_row, other=0.0)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale_log2
    scores = tl.where(is_chosen[None, :], far_scores, scores)
    scores = tl.where((is_chosen | is_near)[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == float("-inf"), 0.0, new_top)  # no key of the split has been chosen yet
    fade = tl.exp2(top - base)
    weights = tl.exp2(scores - base[:, None])
    total = total * fade + tl.sum(weights, axis=1)
    v = tl.where(is_chosen[:, None], far_v, near_v)
    acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return new_top, total, acc, scores


@triton.jit
def store_part(part_ptr, part_lse_ptr, part_rows, top, total, acc, dims, is_head, is_q, HEAD_DIM: tl.constexpr):
    """Store what a split's softmax comes to: out, and lse by natural logarithms."""
    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    lse = tl.where(is_empty, float("-inf"), (top + tl.log2(divisor)) * 0.6931471805599453)  # ln 2
    tl.store(part_ptr + part_rows[:, None] * HEAD_DIM + dims[None, :], acc / divisor[:, None], mask=is_q)
    tl.store(part_lse_ptr + part_rows, lse, mask=is_head)

"""The only door to the ops: each function checks its tensors, chooses an implementation and calls it.

Letters: T tokens of the step, S keys, Hq and Hkv heads, D head_dim, N blocks of a pool, P tokens of a block. All ops
are pure functions of their tensors except `store_rows`, `rotate_and_store`, `predict_far`, `choose_pages`,
`attend_pages` and `add_sums`; none synchronises with a device, except the references of `attend_paged`,
`attend_scanned`, `attend_early` and `attend_predicted`. Kernels in Triton are imported when one is chosen: a machine
without it runs the rest.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Final

import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu import memory, native
from ambidex.kernels.cpu import rows as native_rows
from ambidex.kernels.dispatch import choose
from ambidex.kernels.early_rows import (
    AlphaCount,
    BoxRows,
    EarlyRows,
    FarCut,
    PageCut,
    PartialRows,
    SumRows,
    SumRule,
    WindowRows,
)
from ambidex.kernels.noise import Noise
from ambidex.kernels.reference import activation, chosen, early, kv_store, kv_tiles, paged, quantize, rope, scanned
from ambidex.kernels.reference import attention as reference_attention
from ambidex.kernels.reference import held as reference_held
from ambidex.kernels.reference import merge as reference_merge
from ambidex.kernels.reference import norm as reference_norm
from ambidex.kernels.reference import pages as reference_pages
from ambidex.kernels.reference import prompt_sums as reference_prompt_sums
from ambidex.kernels.reference import sampling as reference_sampling
from ambidex.kernels.shapes import check_alike, check_shapes
from ambidex.kernels.torch_ops import attention as torch_attention
from ambidex.kernels.torch_ops import norm as torch_norm

_ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "silu": activation.silu,
    "gelu": activation.gelu,
    "relu": activation.relu,
}

_LEAST_NATIVE_MERGE: Final = 32
"""Tokens from which on the native merge is the faster one: it hands six tensors over, the reference is five calls of
torch. Measured with 9 heads of 64 on 2 cores of an AVX2 EPYC: 1, 4, 16, 64 tokens 76, 47, 50, 61 µs, the reference 43,
46, 41, 102."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attend over a set of keys and say how much softmax mass they hold.

    Query head h reads KV head h // (Hq / Hkv). A row that sees no key gets out 0 and lse −inf.

    Args:
        q: [T, Hq, D]; k, v: [Hkv, S, D], S may be 0; one dtype (fp32, bf16, fp16), any strides with D contiguous.
        scale: factor of q·k.
        causal: query i sees keys 0 … i; needs S = T and no mask.
        mask: [T, S] bool, True where a query sees a key.
    Returns:
        out [T, Hq, D] in the dtype of q; lse [T, Hq] fp32: natural log of the sum of exp of the scores.
    Raises:
        ShapeError: shapes, dtypes or devices do not fit.
    """
    check_shapes(q=(q, "T Hq D"), k=(k, "Hkv S D"), v=(v, "Hkv S D"))
    check_alike(q=q, k=k, v=v)
    num_tokens, num_q_heads, _ = q.shape
    num_kv_heads, num_keys, _ = k.shape
    if num_q_heads % num_kv_heads:
        raise ShapeError(f"q has {num_q_heads} heads: not a multiple of the {num_kv_heads} heads of k")
    if causal and (mask is not None or num_tokens != num_keys):
        raise ShapeError(f"causal attention of {num_tokens} queries over {num_keys} keys: needs S = T and no mask")
    if mask is not None and (mask.shape != (num_tokens, num_keys) or mask.dtype != torch.bool):
        raise ShapeError(
            f"mask: expected bool [T={num_tokens}, S={num_keys}], got {mask.dtype} of shape {tuple(mask.shape)}"
        )
    if num_tokens == 0 or num_keys == 0:
        return torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device)
    if choose("attend", q.device.type).name == "torch":
        return torch_attention.attend(q, k, v, scale=scale, causal=causal, mask=mask)
    return reference_attention.attend(q, k, v, scale=scale, causal=causal, mask=mask)


def attend_paged(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    first_key: Tensor,
    num_keys: Tensor,
    *,
    scale: float,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with one query of each of B requests over its own keys in a pool (decode).

    The blocks that a row of `block_table` names, side by side, are the request's rows; it sees the rows `first_key` …
    `first_key + num_keys - 1` of them. No key at all is legal: out 0, lse −inf. Other rows may hold anything, NaN
    included; so may the rest of the table.

    Args:
        q: [B, Hq, D]; query head h reads KV head h // (Hq / Hkv).
        k_pool, v_pool: [Hkv, N, P, D], one layer of a pool, contiguous but for the first axis, in the dtype of q.
        block_table: [B, M] int32; first_key, num_keys: [B] int32; all on the device of q.
        scale: factor of q·k.
        out_dtype: of the answer; None: the dtype of q.
    Returns:
        out [B, Hq, D]; lse [B, Hq] fp32, natural log.
    Raises:
        ShapeError: shapes, dtypes or devices do not fit.
    Cost: reads K and V of the visible rows once. The launches depend on shapes alone, so a CUDA graph may hold them
        (not those of the reference, which waits for the device).
    """
    check_shapes(
        q=(q, "B Hq D"), k_pool=(k_pool, "Hkv N P D"), v_pool=(v_pool, "Hkv N P D"), block_table=(block_table, "B M"),
        first_key=(first_key, "B"), num_keys=(num_keys, "B"),
    )  # fmt: skip
    check_alike(q=q, k_pool=k_pool, v_pool=v_pool)
    check_alike(block_table=block_table, first_key=first_key, num_keys=num_keys)
    _check_pools(k_pool, v_pool)
    if block_table.dtype != torch.int32 or block_table.device != q.device or block_table.stride(1) != 1:
        raise ShapeError(
            f"block_table: expected rows of int32 on {q.device}, got {block_table.dtype} on {block_table.device}"
        )
    if q.shape[1] % k_pool.shape[0]:
        raise ShapeError(f"q has {q.shape[1]} heads: not a multiple of the {k_pool.shape[0]} heads of the pool")
    arguments = (q, k_pool, v_pool, block_table, first_key, num_keys)
    if choose("attend_paged", q.device.type).name == "triton":
        from ambidex.kernels.triton import attend_paged as triton_paged

        return triton_paged.attend_paged(*arguments, scale=scale, out_dtype=out_dtype or q.dtype)
    return paged.attend_paged(*arguments, scale=scale, out_dtype=out_dtype or q.dtype)


def attend_tiles(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, block_table: Tensor, num_keys: Tensor, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend with one query of each of B requests over its first keys in a pool in tile order (decode).

    Args:
        q: [B, Hq, D]; query head h reads KV head h // (Hq / Hkv).
        k_pool, v_pool: [Hkv, N, P, padded D], one layer of a pool in tile order, contiguous but for the first axis, of
            16-bit numbers in the dtype of q; with CUDA usually pinned host memory (`kernels.cuda.pinned_view`).
        block_table: [B, M] int32, the blocks of each request; num_keys: [B] int32, how many rows of them it sees, side
            by side from the first; 0 is legal: out 0, lse −inf. All on the device of q.
        scale: factor of q·k.
    Returns:
        out [B, Hq, D] fp32; lse [B, Hq] fp32, natural log.
    Raises:
        ShapeError: shapes, dtypes or devices do not fit.
    Cost: reads K and V of the blocks once. The launches depend on shapes alone, as those of `attend_paged` do.
    """
    check_shapes(
        q=(q, "B Hq D"), k_pool=(k_pool, "Hkv N P Dp"), v_pool=(v_pool, "Hkv N P Dp"),
        block_table=(block_table, "B M"), num_keys=(num_keys, "B"),
    )  # fmt: skip
    check_alike(q=q, k_pool=k_pool, v_pool=v_pool)
    check_alike(block_table=block_table, num_keys=num_keys)
    _check_pools(k_pool, v_pool)
    num_kv_heads, _, block_size, row_size = k_pool.shape
    padded = kv_tiles.padded_dim(q.shape[2])
    if q.element_size() != 2 or row_size != padded or block_size % 16 or q.shape[1] % num_kv_heads:
        raise ShapeError(
            f"attend_tiles: expected 16-bit numbers, rows padded to {padded}, blocks of n · 16 tokens and whole "
            f"groups, got {q.dtype}, {row_size}, {block_size} and {q.shape[1]} heads on {num_kv_heads}"
        )
    if choose("attend_tiles", q.device.type).name == "triton":
        from ambidex.kernels.triton import attend_tiles as triton_tiles

        return triton_tiles.attend_tiles(q, k_pool, v_pool, block_table, num_keys, scale=scale)
    k_rows, v_rows = kv_tiles.unpack_k(k_pool, q.shape[2]), kv_tiles.unpack_v(v_pool, q.shape[2])
    first_key = torch.zeros_like(num_keys)
    return paged.attend_paged(q, k_rows, v_rows, block_table, first_key, num_keys, scale=scale, out_dtype=torch.float32)


def attend_scanned(
    q: Tensor,
    scan_pool: Tensor,
    scan_scales: Tensor,
    rows: Tensor,
    norms: Tensor,
    block_table: Tensor,
    num_keys: Tensor,
    near_lse: Tensor,
    near_part: Tensor,
    *,
    scale: float,
    max_mass: float,
    max_keys: int,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend with one query of each of B requests over its first keys without those that hardly count (decode).

    Each query head leaves out at most `max_mass` of its softmax over these keys and a part of what is near. Keys that
    one head of a group keeps, its others attend, too.

    Args:
        q: [B, Hq, D]; query head h reads KV head h // (Hq / Hkv).
        scan_pool: [Hkv, N, P, padded D] int8 in tile order, K in 8 bits; scan_scales: [Hkv, N, P] fp32, of its rows.
        rows: [Hkv, N, P, 2 padded D], K and V of a key side by side in the dtype of q; norms: [Hkv, N, 2] fp32: no row
            of K as it is scanned, and none of V, is longer in the block. All contiguous; with CUDA usually pinned host
            memory (`kernels.cuda.pinned_view`).
        block_table: [B, M] int32, the blocks of each request; num_keys: [B] int32, how many rows of them it sees, side
            by side from the first; 0 is legal: out 0, lse −inf.
        near_lse: [B, Hq] fp32 over other keys, which are not joined with the answer.
        near_part: [B] fp32, log of the part of them that counts in what may be left out; −inf: nothing of them does.
        scale: factor of q·k, positive.
        max_mass: at least 0 and below 1.
        max_keys: that all requests together see at most.
        kept: [N] int32, to which the keys of each block that are kept are added, of all KV heads; None: nobody counts.
    Returns:
        out [B, Hq, D] fp32; lse [B, Hq] fp32, natural log; figures [B, Hq, 3] fp32: the share that was left out of the
        softmax over these keys and that part, at most; the longest value; keys kept of the head's group.
    Raises:
        ShapeError: shapes, dtypes or devices do not fit, or the padded D is no power of 2.
    Cost: reads the scanned keys once, and K and V of those kept. The launches depend on shapes alone, as those of
        `attend_paged` do.
    """
    check_shapes(
        q=(q, "B Hq D"), scan_pool=(scan_pool, "Hkv N P Dp"), scan_scales=(scan_scales, "Hkv N P"),
        rows=(rows, "Hkv N P Drow"), norms=(norms, "Hkv N two"), block_table=(block_table, "B M"),
        num_keys=(num_keys, "B"), near_lse=(near_lse, "B Hq"), near_part=(near_part, "B"),
    )  # fmt: skip
    check_alike(q=q, rows=rows)
    check_alike(block_table=block_table, num_keys=num_keys)
    check_alike(scan_scales=scan_scales, norms=norms, near_lse=near_lse, near_part=near_part)
    dim, parts = scan_pool.shape[3], (scan_pool, scan_scales, rows, norms, near_lse)
    if scan_pool.dtype != torch.int8 or scan_scales.dtype != torch.float32 or block_table.dtype != torch.int32:
        raise ShapeError(
            f"attend_scanned: expected an int8 pool, fp32 scales and an int32 table, got {scan_pool.dtype}, "
            f"{scan_scales.dtype} and {block_table.dtype}"
        )
    if dim & (dim - 1) or scan_pool.shape[2] % 16 or q.shape[1] % len(scan_pool) or rows.shape[3] != 2 * dim:
        raise ShapeError(
            f"attend_scanned: expected rows padded to a power of 2, twice that of K and V side by side, blocks of n · "
            f"16 tokens and whole groups, got {dim}, {rows.shape[3]}, {scan_pool.shape[2]} and {q.shape[1]} heads on "
            f"{len(scan_pool)}"
        )
    if not all(part.is_contiguous() for part in parts):
        raise ShapeError("attend_scanned: expected contiguous pools and lse")
    if not 0 <= max_mass < 1:
        raise ShapeError(f"attend_scanned: max_mass: expected at least 0 and below 1, got {max_mass}")
    if kept is not None:
        check_shapes(scan_pool=(scan_pool, "Hkv N P Dp"), kept=(kept, "N"))
        if kept.dtype != torch.int32 or kept.device != q.device:
            raise ShapeError(f"kept: expected int32 on {q.device}, got {kept.dtype} on {kept.device}")
    arguments = (q, scan_pool, scan_scales, rows, norms, block_table, num_keys, near_lse, near_part)
    if choose("attend_scanned", q.device.type).name == "triton":
        from ambidex.kernels.triton import attend_scanned as triton_scanned

        return triton_scanned.attend_scanned(*arguments, scale=scale, max_mass=max_mass, max_keys=max_keys, kept=kept)
    return scanned.attend_scanned(*arguments, scale=scale, max_mass=max_mass, kept=kept)


def attend_chosen(
    q: Tensor, near_k: Tensor, near_v: Tensor, places: Tensor, given: Tensor, v: Tensor, *, scale: float
) -> Tensor:
    """Attend with one query over chosen keys of each KV head, whose scores are given, and over all near keys.

    Args:
        q: [Hq, D], in any floating format; query head h reads KV head h // (Hq / Hkv).
        near_k, near_v: [Hkv, n, D], n ≥ 1; the rows of a head side by side, both with one stride.
        places: [Hkv, M] int64: rows of v; M may be 0.
        given: [Hkv, Hq / Hkv, M], in any floating format: the scores that the chosen keys get, scaled.
        v: [Hkv, N, D] in the dtype of near rows, contiguous; on a GPU it may lie in pinned host
            memory.
        scale: factor of q·k of near keys.
    Returns:
        [Hq, D] in the dtype of q.
    Raises:
        ShapeError: shapes or dtypes do not fit.
    Cost: reads the near rows and the chosen rows of V once. Places are not looked at: those beyond v are not found out.
    """
    check_shapes(
        q=(q, "Hq D"), near_k=(near_k, "Hkv n D"), near_v=(near_v, "Hkv n D"), places=(places, "Hkv M"),
        given=(given, "Hkv G M"), v=(v, "Hkv N D"),
    )  # fmt: skip
    check_alike(near_k=near_k, near_v=near_v, v=v)
    if given.shape[0] * given.shape[1] != q.shape[0]:
        raise ShapeError(f"given: expected {q.shape[0]} query heads, got {given.shape[0]} groups of {given.shape[1]}")
    if choose("attend_chosen", q.device.type).name == "triton":
        from ambidex.kernels.triton import attend_chosen as triton_chosen

        return triton_chosen.attend_chosen(q, near_k, near_v, places, given, v, scale=scale)
    return chosen.attend_chosen(q, near_k, near_v, places, given, v, scale=scale)


def chosen_probs(q: Tensor, near_k: Tensor, given: Tensor, *, scale: float) -> Tensor:
    """What each key weighs in `attend_chosen`: [Hkv, Hq / Hkv, M + n] fp32, near keys last."""
    return chosen.chosen_probs(q, near_k, given, scale=scale)


def attend_early(
    q: Tensor, near_k: Tensor, near_v: Tensor, scores: Tensor, rows: EarlyRows, *, layer_idx: int, scale: float
) -> Tensor:
    """Attend with one query of each request over all its near keys and the far ones that early scores put first, which
    get these scores: of each KV head so many with the largest score of its query heads, of equal ones the earlier.

    Args:
        q: [B, Hq, D], in the dtype of near rows; query head h reads KV head h // (Hq / Hkv).
        near_k, near_v: [Hkv, S, R, D], one layer of near rows of S requests, contiguous but for the first axis.
        scores: [n] in any floating format; of each request [Hkv, Hq / Hkv, far], scaled, one behind the other; on a GPU
            it may lie in pinned host memory.
        rows: of each request, on the device. NOTE: numbers that point beyond scores, near rows or rows of V are not
            found out.
        layer_idx: of the rows of V that are read.
        scale: factor of q·k of near keys.
    Returns:
        [B, Hq, D] in the dtype of q; 0 for a request without keys.
    Raises:
        ShapeError: shapes or dtypes do not fit.
    Cost: reads the scores once, the near rows, and of V the chosen rows. The launches depend on shapes alone, so a CUDA
        graph may hold them; beside the answer it takes as much memory as the scores, and 4 bytes a key and KV head.
    """
    check_shapes(
        q=(q, "B Hq D"), near_k=(near_k, "Hkv S R D"), near_v=(near_v, "Hkv S R D"), scores=(scores, "n"),
        near_first=(rows.near_first, "B"), near_num=(rows.near_num, "B"), far_num=(rows.far_num, "B"),
        num_selected=(rows.num_selected, "B"), score_first=(rows.score_first, "B"), v_address=(rows.v_address, "B"),
        capacity=(rows.capacity, "B"), layer_rows=(rows.layer_rows, "B"),
    )  # fmt: skip
    check_alike(q=q, near_k=near_k, near_v=near_v)
    _check_pools(near_k, near_v)
    _check_groups("q", q, near_k)
    if choose("attend_early", q.device.type).name == "triton":
        from ambidex.kernels.triton import attend_early as triton_early

        return triton_early.attend_early(q, near_k, near_v, scores, rows, layer_idx=layer_idx, scale=scale)
    return early.attend_early(q, near_k, near_v, scores, rows, layer_idx=layer_idx, scale=scale)


def predict_far(
    early_q: Tensor,
    near_k: Tensor,
    rows: EarlyRows,
    partial: PartialRows,
    *,
    max_far: int,
    scale: float,
    count: AlphaCount | None = None,
) -> FarCut:
    """Choose far keys of each request by partial keys: of each KV head so many with the largest predicted score of its
    query heads, of equal ones the earlier. The step's own key, which lies among the near rows, becomes the partial key
    behind all others.

    Args:
        early_q: [B, Hq, D], in the dtype of near rows; query head h reads KV head h // (Hq / Hkv).
        near_k: [Hkv, S, R, D], one layer of near rows of S requests, contiguous but for the first axis.
        rows: of each request, on the device; `partial` those of one layer, with room for one more. NOTE: numbers that
            point elsewhere are not found out.
        max_far: far keys of all requests, at most.
        scale: factor of q·k.
        count: how many are chosen, which is then told there; None: `num_selected`, or all if there are no more.
    Raises:
        ShapeError: shapes or dtypes do not fit.
        InternalError: there is nothing but the reference, and it cannot read the device's memory.
    Cost: reads the partial keys once. Launches as those of `attend_early`, and one more that counts; takes 4 bytes a
        key and KV head.
    """
    check_shapes(
        early_q=(early_q, "B Hq D"), near_k=(near_k, "Hkv S R D"), near_slots=(rows.near_slots, "B"),
        near_num=(rows.near_num, "B"), far_num=(rows.far_num, "B"), num_selected=(rows.num_selected, "B"),
        score_first=(rows.score_first, "B"), rows_address=(partial.rows_address, "B"),
        turn_address=(partial.turn_address, "B"), capacity=(partial.capacity, "B"),
        **({} if count is None else {"num_chosen": (count.num_chosen, "B")}),
    )  # fmt: skip
    check_alike(early_q=early_q, near_k=near_k)
    _check_pools(near_k, near_k)
    _check_groups("early_q", early_q, near_k)
    if choose("predict_far", early_q.device.type).name == "triton":
        from ambidex.kernels.triton import attend_predicted as triton_predicted

        return triton_predicted.predict_far(early_q, near_k, rows, partial, max_far=max_far, scale=scale, count=count)
    return early.predict_far(early_q, near_k, rows, partial, max_far=max_far, scale=scale, count=count)


def attend_predicted(
    q: Tensor, early_q: Tensor, near_k: Tensor, near_v: Tensor, cut: FarCut, rows: EarlyRows, *, layer_idx: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attend with one query of each request over all its near keys, and over the far ones that `predict_far` chose,
    with the scores that an early query gives these.

    Args:
        q, early_q: [B, Hq, D], in the dtype of near rows, may be one: then far keys have true scores, too; query head h
            reads KV head h // (Hq / Hkv).
        near_k, near_v: [Hkv, S, R, D], one layer of near rows of S requests, contiguous but for the first axis.
        cut: which far keys are chosen.
        rows: of each request, on the device. NOTE: as in `attend_early`.
        layer_idx: of the rows of K and V that are read.
        scale: factor of q·k.
    Returns:
        [B, Hq, D] in the dtype of q; 0 for a request without keys.
    Raises:
        ShapeError: shapes or dtypes do not fit.
    Cost: reads the near rows, and of K and V the chosen rows, once. Launches as those of `attend_early`.
    """
    check_shapes(
        q=(q, "B Hq D"), early_q=(early_q, "B Hq D"), near_k=(near_k, "Hkv S R D"), near_v=(near_v, "Hkv S R D"),
        order=(cut.order, "n"), bounds=(cut.bounds, "B Hkv two"), near_first=(rows.near_first, "B"),
        near_num=(rows.near_num, "B"), far_num=(rows.far_num, "B"), score_first=(rows.score_first, "B"),
        k_address=(rows.k_address, "B"), v_address=(rows.v_address, "B"), capacity=(rows.capacity, "B"),
        layer_rows=(rows.layer_rows, "B"),
    )  # fmt: skip
    check_alike(q=q, early_q=early_q, near_k=near_k, near_v=near_v)
    _check_pools(near_k, near_v)
    _check_groups("q", q, near_k)
    if choose("attend_predicted", q.device.type).name == "triton":
        from ambidex.kernels.triton import attend_predicted as triton_predicted

        return triton_predicted.attend_predicted(
            q, early_q, near_k, near_v, cut, rows, layer_idx=layer_idx, scale=scale
        )
    return early.attend_predicted(q, early_q, near_k, near_v, cut, rows, layer_idx=layer_idx, scale=scale)


def attend_held(
    q: Tensor, near_k: Tensor, near_v: Tensor, rows: EarlyRows, held_rows: SumRows, *, max_far: int, layer_idx: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Attend with one query of each request over its near keys, and over the far ones that are held or recent.

    Args:
        q: [B, Hq, D], in the dtype of near rows; query head h reads KV head h // (Hq / Hkv).
        near_k, near_v: [Hkv, S, R, D], one layer of near rows of S requests, contiguous but for the first axis.
        rows: of each request, on the device, with room for Hq · (far + near) scores from `score_first` on. NOTE: as in
            `attend_early`.
        held_rows: which far keys are attended, of the same requests.
        max_far: far keys of all requests, at most.
        layer_idx: of the rows of K and V that are read, and of the flags.
        scale: factor of q·k.
    Returns:
        [B, Hq, D] in the dtype of q, 0 for a request without keys; lse [B, Hq] fp32; and scaled scores [n] fp32, of
        each request [Hkv, Hq / Hkv, far + near], anything where a key is not attended.
    Raises:
        ShapeError: shapes or dtypes do not fit.
        InternalError: there is nothing but the reference, and it cannot read the device's memory.
    Cost: reads the near rows, and of K and V the attended rows, once. Launches as those of `attend_early`; beside the
        answer it takes 4 bytes a key and query head.
    """
    check_shapes(
        q=(q, "B Hq D"), near_k=(near_k, "Hkv S R D"), near_v=(near_v, "Hkv S R D"), near_first=(rows.near_first, "B"),
        near_num=(rows.near_num, "B"), far_num=(rows.far_num, "B"), score_first=(rows.score_first, "B"),
        k_address=(rows.k_address, "B"), v_address=(rows.v_address, "B"), capacity=(rows.capacity, "B"),
        layer_rows=(rows.layer_rows, "B"),
        held_from=(held_rows.held_from, "B"), recent_first=(held_rows.recent_first, "B"),
    )  # fmt: skip
    check_alike(q=q, near_k=near_k, near_v=near_v)
    _check_pools(near_k, near_v)
    _check_groups("q", q, near_k)
    if choose("attend_held", q.device.type).name == "triton":
        from ambidex.kernels.triton import attend_held as triton_held

        return triton_held.attend_held(
            q, near_k, near_v, rows, held_rows, max_far=max_far, layer_idx=layer_idx, scale=scale
        )
    return reference_held.attend_held(
        q, near_k, near_v, rows, held_rows, max_far=max_far, layer_idx=layer_idx, scale=scale
    )


def attend_windows(
    q: Tensor, sink_q: Tensor, near_k: Tensor, near_v: Tensor, rows: EarlyRows, windows: WindowRows, *,
    layer_idx: int, scale: float,
) -> Tensor:  # fmt: skip
    """Attend with one query of each request over its near keys, and over the first and the newest of the far ones.

    Args:
        q: [B, Hq, D], in the dtype of near rows; query head h reads KV head h // (Hq / Hkv). sink_q: likewise, the
            query that the first keys are scored with.
        near_k, near_v: [Hkv, S, R, D], one layer of near rows of S requests, contiguous but for the first axis.
        rows: of each request, on the device. NOTE: as in `attend_early`.
        windows: which far keys are the first, and the newest, of the same requests.
        layer_idx: of the rows of K and V that are read.
        scale: factor of q·k.
    Returns:
        [B, Hq, D] in the dtype of q, 0 for a request without keys.
    Raises:
        ShapeError: shapes or dtypes do not fit.
        InternalError: there is nothing but the reference, and it cannot read the device's memory.
    Cost: reads the near rows, and of K and V the attended rows, once. Launches as those of `attend_early`.
    """
    check_shapes(
        q=(q, "B Hq D"), sink_q=(sink_q, "B Hq D"), near_k=(near_k, "Hkv S R D"), near_v=(near_v, "Hkv S R D"),
        near_first=(rows.near_first, "B"), near_num=(rows.near_num, "B"), far_num=(rows.far_num, "B"),
        k_address=(rows.k_address, "B"), v_address=(rows.v_address, "B"), capacity=(rows.capacity, "B"),
        layer_rows=(rows.layer_rows, "B"),
        sink_end=(windows.sink_end, "B"), window_first=(windows.window_first, "B"),
    )  # fmt: skip
    check_alike(q=q, sink_q=sink_q, near_k=near_k, near_v=near_v)
    _check_pools(near_k, near_v)
    _check_groups("q", q, near_k)
    if choose("attend_windows", q.device.type).name == "triton":
        from ambidex.kernels.triton import attend_held as triton_held

        return triton_held.attend_windows(q, sink_q, near_k, near_v, rows, windows, layer_idx=layer_idx, scale=scale)
    return reference_held.attend_windows(q, sink_q, near_k, near_v, rows, windows, layer_idx=layer_idx, scale=scale)


def choose_pages(
    q: Tensor, near_k: Tensor, rows: EarlyRows, boxes: BoxRows, *, max_pages: int, layer_idx: int
) -> PageCut:
    """Choose pages for each query head of each request: the newest, and of the others those with the largest bound on
    q·k of their keys, of equal ones the earlier. If the step's own key, the one near key, fills its page, the page's
    box is made of its keys.

    Args:
        q: [B, Hq, D], in the dtype of near rows; query head h reads KV head h // (Hq / Hkv).
        near_k: [Hkv, S, R, D], one layer of near rows of S requests, contiguous but for the first axis.
        rows: of each request, with one near key, on the device; `boxes` of the same. NOTE: numbers that point elsewhere
            are not found out.
        max_pages: of all requests, at most.
        layer_idx: of the rows of K that are read, and of the boxes.
    Raises:
        ShapeError: shapes or dtypes do not fit.
        InternalError: there is nothing but the reference, and it cannot read the device's memory.
    Cost: reads the boxes once, and of a page that is filled K; two launches; takes 4 bytes a page and query head.
    """
    check_shapes(
        q=(q, "B Hq D"), near_k=(near_k, "Hkv S R D"), near_slots=(rows.near_slots, "B"), far_num=(rows.far_num, "B"),
        k_address=(rows.k_address, "B"), capacity=(rows.capacity, "B"), layer_rows=(rows.layer_rows, "B"),
        **_box_shapes(boxes),
    )  # fmt: skip
    check_alike(q=q, near_k=near_k)
    _check_pools(near_k, near_k)
    _check_groups("q", q, near_k)
    if choose("choose_pages", q.device.type).name == "triton":
        from ambidex.kernels.triton import attend_pages as triton_pages

        return triton_pages.choose_pages(q, near_k, rows, boxes, max_pages=max_pages, layer_idx=layer_idx)
    return reference_pages.choose_pages(q, near_k, rows, boxes, max_pages=max_pages, layer_idx=layer_idx)


def attend_pages(
    q: Tensor, near_k: Tensor, near_v: Tensor, cut: PageCut, rows: EarlyRows, *, num_read: Tensor, layer_idx: int,
    scale: float,
) -> Tensor:  # fmt: skip
    """Attend with one query of each request over its near keys, and over the far ones in the pages that `choose_pages`
    chose for each query head.

    Args:
        q: [B, Hq, D], in the dtype of near rows; query head h reads KV head h // (Hq / Hkv).
        near_k, near_v: [Hkv, S, R, D], one layer of near rows of S requests, contiguous but for the first axis.
        cut: which pages are taken.
        rows: of each request, on the device. NOTE: as in `attend_early`.
        num_read: [B, Hkv] int32, is told how many far rows are read: those that any query head of a KV head attends; 0
            for padding.
        layer_idx: of the rows of K and V that are read.
        scale: factor of q·k.
    Returns:
        [B, Hq, D] in the dtype of q, 0 for a request without keys.
    Raises:
        ShapeError: shapes or dtypes do not fit.
        InternalError: there is nothing but the reference, and it cannot read the device's memory.
    Cost: reads the near rows, and of K and V the attended rows, once; three launches.
    """
    check_shapes(
        q=(q, "B Hq D"), near_k=(near_k, "Hkv S R D"), near_v=(near_v, "Hkv S R D"), order=(cut.order, "n"),
        bounds=(cut.bounds, "B Hq two"), num_read=(num_read, "B Hkv"), near_first=(rows.near_first, "B"),
        near_num=(rows.near_num, "B"), far_num=(rows.far_num, "B"), k_address=(rows.k_address, "B"),
        v_address=(rows.v_address, "B"), capacity=(rows.capacity, "B"), layer_rows=(rows.layer_rows, "B"),
        **_box_shapes(cut.boxes),
    )  # fmt: skip
    check_alike(q=q, near_k=near_k, near_v=near_v)
    _check_pools(near_k, near_v)
    _check_groups("q", q, near_k)
    if choose("attend_pages", q.device.type).name == "triton":
        from ambidex.kernels.triton import attend_pages as triton_pages

        return triton_pages.attend_pages(
            q, near_k, near_v, cut, rows, num_read=num_read, layer_idx=layer_idx, scale=scale
        )
    return reference_pages.attend_pages(
        q, near_k, near_v, cut, rows, num_read=num_read, layer_idx=layer_idx, scale=scale
    )


def add_sums(
    scores: Tensor,
    lse: Tensor,
    rows: EarlyRows,
    held_rows: SumRows,
    rule: SumRule,
    *,
    num_attended: Tensor,
    layer_idx: int,
) -> None:
    """Add what the queries of `attend_held` gave the keys that they attended to the sums of these, hold the step's own
    key, which is the one that is near, and drop the key with the least sum where one is to be dropped.

    Args:
        scores, lse: as `attend_held` left them.
        rows: of each request, with one near key.
        held_rows: of the same requests; sums and flags of its layer are read, and written to their other copies.
        num_attended: [B, Hkv] int32, is told how many far keys were attended; 0 for padding.
        layer_idx: of the sums and flags.
    Raises:
        ShapeError: shapes do not fit.
        InternalError: there is nothing but the reference, and it cannot read the device's memory.
    Cost: reads the scores of attended keys once, with noise twice, and moves sums and flags once; two launches, with
        noise three.
    """
    check_shapes(
        scores=(scores, "n"), lse=(lse, "B Hq"), num_attended=(num_attended, "B Hkv"), near_num=(rows.near_num, "B"),
        far_num=(rows.far_num, "B"), score_first=(rows.score_first, "B"), capacity=(rows.capacity, "B"),
        **{field.name: (getattr(held_rows, field.name), "B") for field in fields(held_rows)},
    )  # fmt: skip
    if lse.shape[1] % num_attended.shape[1]:
        raise ShapeError(f"lse: expected a multiple of {num_attended.shape[1]} heads, got {lse.shape[1]}")
    if choose("add_sums", scores.device.type).name == "triton":
        from ambidex.kernels.triton import attend_held as triton_held

        triton_held.add_sums(scores, lse, rows, held_rows, rule, num_attended=num_attended, layer_idx=layer_idx)
        return
    reference_held.add_sums(scores, lse, rows, held_rows, rule, num_attended=num_attended, layer_idx=layer_idx)


def sum_prompt_weights(q: Tensor, k: Tensor, *, scale: float, noise: Noise | None = None) -> Tensor:
    """What each key gets of consecutive queries of a prompt: the sum of softmax(q·k · scale) over the queries that see
    it, and over the query heads that share its KV head; with noise of softmax((q·k · scale + ζ) / tau).

    Args:
        q: [n, Hq, D], n ≥ 1, rotated; query head h reads KV head h // (Hq / Hkv).
        k: [Hkv, S, D] in the dtype of q, S ≥ n: the keys up to that of the last query; the last n are the queries' own.
            Products of 16-bit numbers are exact, and added up in fp32.
        scale: factor of q·k.
        noise: of queries at the positions S − n … S − 1; None: there is none.
    Returns:
        [Hkv, S] fp32.
    Raises:
        ShapeError: shapes, dtypes or devices do not fit, or there are more queries than keys.
    Cost: with Triton makes all visible scores twice, in two launches, and sums over heads in one more; holds none of
        them, but a number for each query and head, and for each key and head. See `triton/prompt_sums.py`.
    """
    check_shapes(q=(q, "n Hq D"), k=(k, "Hkv S D"))
    check_alike(q=q, k=k)
    _check_groups("q", q, k)
    if not 0 < len(q) <= k.shape[1]:
        raise ShapeError(f"q: expected 1 … {k.shape[1]} queries, as many as there are keys at most, got {len(q)}")
    if choose("sum_prompt_weights", q.device.type).name == "triton":
        from ambidex.kernels.triton import prompt_sums as triton_prompt_sums

        return triton_prompt_sums.sum_prompt_weights(q, k, scale=scale, noise=noise)
    return reference_prompt_sums.sum_prompt_weights(q, k, scale=scale, noise=noise)


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Join partial attentions over disjoint sets of keys; associative and commutative up to rounding.

    Args:
        out_a, out_b: [T, Hq, D]; lse_a, lse_b: [T, Hq] fp32, natural log, −inf where no key was seen (out 0 there).
        out_dtype: of the result; None: that of `out_a`.
    Returns:
        (out, lse) over the union of the keys, accumulated in fp32, out in `out_dtype`.
    Raises:
        ShapeError: shapes or devices do not fit, or an lse is not fp32.
    Cost: moves 3 · T · Hq · D numbers.
    """
    choice = choose("merge_states", out_a.device.type)
    if (
        choice.name == "native"
        and (choice.is_forced or out_a.shape[0] >= _LEAST_NATIVE_MERGE or memory.is_recording())
        and _is_plain_fp32(out_a, lse_a, out_b, lse_b)
        and out_dtype in (None, torch.float32)
    ):
        return native.merge_states(out_a, lse_a, out_b, lse_b)  # checks the shapes itself
    check_shapes(out_a=(out_a, "T Hq D"), lse_a=(lse_a, "T Hq"), out_b=(out_b, "T Hq D"), lse_b=(lse_b, "T Hq"))
    if lse_a.dtype != torch.float32 or lse_b.dtype != torch.float32:
        raise ShapeError(f"lse must be fp32, got {lse_a.dtype} and {lse_b.dtype}")
    if choose("merge_states", out_a.device.type).name == "triton":
        from ambidex.kernels.triton import merge as triton_merge

        return triton_merge.merge_states(out_a, lse_a, out_b, lse_b, out_dtype or out_a.dtype)
    return reference_merge.merge_states(out_a, lse_a, out_b, lse_b, out_dtype or out_a.dtype)


def gather_blocks(pool: Tensor, block_ids: Tensor) -> Tensor:
    """Copy blocks of one layer's K or V side by side.

    Args:
        pool: [Hkv, N, P, D]; block_ids: [n] int64 on the pool's device.
    Returns:
        [Hkv, n · P, D]; rows of a block that were never stored hold anything, NaN included.
    Raises:
        ShapeError: shapes do not fit.
    Cost: copies n blocks of one layer.
    """
    check_shapes(pool=(pool, "Hkv N P D"), block_ids=(block_ids, "n"))
    return kv_store.gather_blocks(pool, block_ids)


def store_rows(pool: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write K or V of new tokens into one layer of a pool, in place.

    Args:
        pool: [Hkv, N, P, D], contiguous; slots: [T] int64 on the pool's device, block_id · P + offset, no two alike;
        rows: [T, Hkv, D] in the pool's dtype, on its device.
    Raises:
        ShapeError: shapes, dtypes or devices do not fit.
    """
    check_shapes(pool=(pool, "Hkv N P D"), slots=(slots, "T"), rows=(rows, "T Hkv D"))
    check_alike(pool=pool, rows=rows)
    kv_store.store_rows(pool, slots, rows)


def quantize_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to 8-bit integers with one scale each: rows ≈ numbers · scales, off by at most half a scale.

    Args:
        rows: [..., D] in a floating format, finite.
    Returns:
        numbers [..., D] int8 in −127 … 127; scales [...] fp32, 0 for a row of zeros.
    """
    return quantize.quantize_rows(rows)


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
    """Rotate q and k as `rotate` does, and write k and v of new tokens into one layer of a pool, in place.

    Args:
        q: [T, Hq, D]; k, v: [T, Hkv, D], in the dtype of the pools.
        k_pool, v_pool: [Hkv, N, P, D], contiguous but for the first axis.
        slots: [T] int64, block_id · P + offset, no two alike; a token with a negative slot is stored nowhere.
        angles: cos and sin, [T, dim/2] fp32 each; None: nothing is rotated.
    Returns:
        The rotated queries [T, Hq, D].
    Raises:
        ShapeError: shapes, dtypes or devices do not fit.
    """
    check_shapes(
        q=(q, "T Hq D"), k=(k, "T Hkv D"), v=(v, "T Hkv D"),
        k_pool=(k_pool, "Hkv N P D"), v_pool=(v_pool, "Hkv N P D"), slots=(slots, "T"),
    )  # fmt: skip
    check_alike(q=q, k=k, v=v, k_pool=k_pool, v_pool=v_pool)
    _check_pools(k_pool, v_pool)
    if angles is not None:
        _check_angles(q, *angles)
    if choose("rotate_and_store", q.device.type).name == "triton":
        from ambidex.kernels.triton import rotate_store as triton_store

        return triton_store.rotate_and_store(q, k, v, k_pool, v_pool, slots, angles=angles)
    return paged.rotate_and_store(q, k, v, k_pool, v_pool, slots, angles=angles)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last axis, in fp32; same shape and dtype as x.

    Raises:
        ShapeError: the weight is not one vector as long as the last axis.
    """
    _check_last_axis(x, weight)
    match choose("rms_norm", x.device.type).name:
        case "native" if _is_small_fp32(x, weight):
            return native_rows.rms_norm(x, weight, eps)
        case "native" | "torch":
            return torch_norm.rms_norm(x, weight, eps)
        case "triton":
            from ambidex.kernels.triton import norm as triton_norm

            return triton_norm.rms_norm(x, weight, eps)
    return reference_norm.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`total = x + update`, rounded to their dtype, and `rms_norm(total, weight, eps)`.

    Returns:
        The sum and its norm, both in shape and dtype of x.
    Raises:
        ShapeError: x and update differ, or the weight is not one vector as long as the last axis.
    """
    _check_last_axis(x, weight)
    if x.shape != update.shape:
        raise ShapeError(f"update: expected shape {tuple(x.shape)} of x, got {tuple(update.shape)}")
    check_alike(x=x, update=update)
    match choose("add_rms_norm", x.device.type).name:
        case "native" if _is_small_fp32(x, weight):
            total = x + update
            return total, native_rows.rms_norm(total, weight, eps)
        case "native" | "torch":
            return torch_norm.add_rms_norm(x, update, weight, eps)
        case "triton":
            from ambidex.kernels.triton import norm as triton_norm

            return triton_norm.add_rms_norm(x, update, weight, eps)
    return reference_norm.add_rms_norm(x, update, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x − mean) / sqrt(variance + eps) · weight + bias over the last axis, in fp32; same shape and dtype as x.

    Raises:
        ShapeError: weight or bias is not one vector as long as the last axis.
    """
    _check_last_axis(x, weight)
    if bias is not None:
        _check_last_axis(x, bias)
    if choose("layer_norm", x.device.type).name == "torch":
        return torch_norm.layer_norm(x, weight, bias, eps)
    return reference_norm.layer_norm(x, weight, bias, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first `dim` numbers of each head by its position's angles, half-split order: (i, i + dim/2) is a pair.

    Args:
        x: [T, H, D]; cos, sin: [T, dim/2] fp32, dim ≤ D.
    Returns:
        [T, H, D] in the dtype of x; numbers behind `dim` as they were.
    Raises:
        ShapeError: shapes do not fit.
    """
    _check_angles(x, cos, sin)
    match choose("rotate", x.device.type).name:
        case "native" if _is_small_fp32(x, cos, sin):
            return native_rows.rotate(x, cos, sin)
        case "triton":
            from ambidex.kernels.triton import rope as triton_rope

            return triton_rope.rotate(x, cos, sin)
    return rope.rotate(x, cos, sin)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, computed in fp32; same shape and dtype as gate.

    Raises:
        ShapeError: shapes, dtypes or devices differ.
    """
    if gate.shape != up.shape:
        raise ShapeError(f"up: expected shape {tuple(gate.shape)} of gate, got {tuple(up.shape)}")
    check_alike(gate=gate, up=up)
    match choose("silu_mul", gate.device.type).name:
        case "native" if _is_small_fp32(gate, up):
            return native_rows.silu_mul(gate, up)
        case "triton":
            from ambidex.kernels.triton import activation as triton_activation

            return triton_activation.silu_mul(gate, up)
    return activation.silu_mul(gate, up)


def likeliest(logits: Tensor) -> Tensor:
    """The place of the largest number of each row, the first one's of several; −1 where any number is not finite.

    Args:
        logits: [n, V] fp32.
    Returns:
        [n] int64 on the device of the logits. Does not wait for a GPU.
    """
    check_shapes(logits=(logits, "n V"))
    if choose("likeliest", logits.device.type).name == "native" and _is_plain_fp32(logits):
        return native_rows.likeliest(logits)
    return reference_sampling.likeliest(logits)


def activate(x: Tensor, name: str) -> Tensor:
    """Apply the non-linearity `name` (a value of `core.model_spec.Activation`); same shape and dtype as x.

    Raises:
        ShapeError: there is no such non-linearity.
    """
    if name not in _ACTIVATIONS:
        raise ShapeError(f"no activation is called {name!r}: choose from {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name](x)


def _is_plain_fp32(*tensors: Tensor) -> bool:
    return all(tensor.dtype == torch.float32 and tensor.is_contiguous() for tensor in tensors)


def _check_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_shapes(x=(x, "T H D"), cos=(cos, "T dim/2"), sin=(sin, "T dim/2"))
    if 2 * cos.shape[1] > x.shape[2]:
        raise ShapeError(f"{cos.shape[1]} angles turn {2 * cos.shape[1]} numbers, but a head has {x.shape[2]}")


def _box_shapes(boxes: BoxRows) -> dict[str, tuple[Tensor, str]]:
    parts = {field.name: getattr(boxes, field.name) for field in fields(boxes)}
    return {name: (part, "B") for name, part in parts.items() if isinstance(part, Tensor)}


def _check_groups(name: str, q: Tensor, near_k: Tensor) -> None:
    if q.shape[1] % near_k.shape[0]:
        raise ShapeError(f"{name}: expected a multiple of {near_k.shape[0]} heads, got {q.shape[1]}")


def _check_pools(k_pool: Tensor, v_pool: Tensor) -> None:
    """Each head's rows lie side by side, and both pools alike."""
    for name, pool in (("k_pool", k_pool), ("v_pool", v_pool)):
        if not pool[0].is_contiguous() or pool.stride(0) != k_pool.stride(0):
            raise ShapeError(f"{name}: the rows of a head must be contiguous, got strides {pool.stride()}")


def _is_small_fp32(x: Tensor, *others: Tensor) -> bool:
    """Whether the native ops over rows take these tensors, and are the faster ones: x is small, or a program recorded
    of which no other op can be part."""
    is_small = x.numel() <= native_rows.MOST_NUMBERS or memory.is_recording()
    return is_small and _is_plain_fp32(x, *others)


def _check_last_axis(x: Tensor, vector: Tensor) -> None:
    if vector.shape != x.shape[-1:]:
        raise ShapeError(
            f"vector: expected shape ({x.shape[-1]},) for x of shape {tuple(x.shape)}, got {tuple(vector.shape)}"
        )

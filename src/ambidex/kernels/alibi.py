"""ALiBi: attention whose scores fall with the distance of a key, by a slope of each query head.

    score = scale · q·k − slope · (p_q − p_k)                            p: positions of query and key

A shift of all scores of a query changes its lse alone, so slope · p_k goes into the product as more numbers of q and k,
and slope · p_q is put back into the lse, which then fits the lse of other sets of keys:

    q' = [q, slope / scale · 256, slope / scale]        k' = [k, d // 256, d mod 256]        d = p_k − base

The new numbers of k are whole and below 256 up to a distance of 65,536: exact in 16-bit formats, as are slopes that are
powers of 2, those of models whose heads are. No bias [Hq, T, S] is ever made. Source: ALiBi, arXiv:2108.12409.
"""

from typing import Final

import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels import api

_MORE_DIMS: Final = 8
"""Two would do; fused kernels on a GPU want multiples of 8."""
_STEP: Final = 256


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    slopes: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    causal: bool = False,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend over a set of keys as `kernels.api.attend` does, with scores that fall with distance.

    Args:
        slopes: [Hq] fp32, not negative.
        query_positions: [T] int64; key_positions: [S] int64; on the device of q.
        scale, causal, mask: as there.
    Returns:
        out [T, Hq, D] in the dtype of q; lse [T, Hq] fp32.
    Raises:
        ShapeError: shapes, dtypes or devices do not fit.
    Cost: copies q, k and v once, with 8 more numbers a row.
    """
    if slopes.shape != q.shape[1:2] or query_positions.shape != q.shape[:1] or key_positions.shape != k.shape[1:2]:
        raise ShapeError(
            f"slopes, query_positions, key_positions: expected [{q.shape[1]}], [{q.shape[0]}], [{k.shape[1]}], got "
            f"{tuple(slopes.shape)}, {tuple(query_positions.shape)}, {tuple(key_positions.shape)}"
        )
    if 0 in (q.shape[0], k.shape[1]):
        return api.attend(q, k, v, scale=scale, mask=mask)
    base = query_positions[-1]  # near keys, whose scores matter, get small numbers
    distance = key_positions - base
    steps = torch.stack((slopes * (_STEP / scale), slopes / scale), dim=-1)  # [Hq, 2]
    places = torch.stack((distance.div(_STEP, rounding_mode="floor"), distance.remainder(_STEP)), dim=-1)  # [S, 2]
    out, lse = api.attend(_widen(q, steps), _widen(k, places), _widen(v, None), scale=scale, causal=causal, mask=mask)
    return out[..., : q.shape[-1]], lse + slopes * (base - query_positions)[:, None]


def _widen(rows: Tensor, more: Tensor | None) -> Tensor:
    """Rows [..., D] with 8 more numbers, the first of which are `more` and the others 0."""
    wide = rows.new_zeros(*rows.shape[:-1], rows.shape[-1] + _MORE_DIMS)
    wide[..., : rows.shape[-1]] = rows
    if more is not None:
        wide[..., rows.shape[-1] : rows.shape[-1] + more.shape[-1]] = more.to(rows.dtype)
    return wide

"""`AttentionState`: a partial answer over a set of keys, and its algebra (`docs/merge.md`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.kernels import api


@dataclass(frozen=True, slots=True)
class AttentionState:
    """What T queries get from some of their keys.

    `out` [T, Hq, D]: softmax over those keys alone, times V; 0 where there are none. `lse` [T, Hq] fp32: natural log of
    the sum of exp of the scores; −inf where there are none.
    """

    out: Tensor
    lse: Tensor


def empty(num_tokens: int, num_q_heads: int, head_dim: int, *, device: torch.device) -> AttentionState:
    """The state over no keys, the neutral element of `merge`; `out` is fp32."""
    return AttentionState(
        torch.zeros(num_tokens, num_q_heads, head_dim, device=device),
        torch.full((num_tokens, num_q_heads), -torch.inf, device=device),
    )


def merge(a: AttentionState, b: AttentionState, *, out_dtype: torch.dtype | None = None) -> AttentionState:
    """Join partial answers over disjoint sets of keys: associative and commutative up to rounding.

    Args:
        out_dtype: of `out`; None: that of `a.out`.
    Returns:
        The state over the union of keys, accumulated in fp32.
    Raises:
        ShapeError: shapes or devices do not fit.
    Source: online softmax, arXiv:1805.02867.
    """
    return AttentionState(*api.merge_states(a.out, a.lse, b.out, b.lse, out_dtype=out_dtype))


def merge_rows(state: AttentionState, part: AttentionState, rows: slice) -> AttentionState:
    """Join to some rows of a state, whose `out` is fp32, a part over other keys; may change the state in place.

    Args:
        part: of the queries `rows` alone.
    """
    if rows == slice(0, len(state.lse)):
        return merge(state, part)
    joined = merge(AttentionState(state.out[rows], state.lse[rows]), part)
    state.out[rows], state.lse[rows] = joined.out, joined.lse
    return state

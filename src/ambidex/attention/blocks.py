"""Attention over old keys where they lie: what the GPU lane and the CPU lane have in common."""

from collections.abc import Sequence

from torch import Tensor

from ambidex.attention.metadata import OldKeys
from ambidex.attention.state import AttentionState, empty
from ambidex.kernels import api
from ambidex.storage.kv_pool import KVPool


def attend_old_keys(
    pool: KVPool, layer_idx: int, q: Tensor, parts: Sequence[OldKeys], *, scale: float
) -> AttentionState:
    """The state of all T queries over the old keys in `parts`, one or more, all on the tier of `pool`.

    Args:
        q: [T, Hq, D] on the pool's device.
    Returns:
        `out` fp32; queries that no part names have seen no key.
    """
    k, v = pool.layer(layer_idx)
    if len(parts) == 1 and parts[0].rows == slice(0, q.shape[0]):
        out, lse = _attend_part(q, k, v, parts[0], scale)
        return AttentionState(out.float(), lse)
    state = empty(*q.shape, device=q.device)
    for part in parts:
        state.out[part.rows], state.lse[part.rows] = _attend_part(q[part.rows], k, v, part, scale)
    return state


def _attend_part(q: Tensor, k: Tensor, v: Tensor, part: OldKeys, scale: float) -> tuple[Tensor, Tensor]:
    return api.attend(q, _visible(k, part), _visible(v, part), scale=scale, mask=part.mask)


def _visible(pool: Tensor, part: OldKeys) -> Tensor:
    """The part's rows of K or V, [Hkv, S, D]: a view of the pool if its blocks lie side by side, else a copy.

    NOTE: rows outside `part.keys` may hold NaN, so they are cut off rather than masked (0 · NaN is NaN).
    """
    rows = api.gather_blocks(pool, part.block_ids) if part.run is None else pool[:, part.run].flatten(1, 2)
    return rows[:, part.keys]

"""`RowReader`: old keys in a pool in row order, one part after the other, on the pool's own device."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ambidex.attention.metadata import OldKeys
from ambidex.attention.parts import PartAttention
from ambidex.attention.state import AttentionState, empty
from ambidex.kernels import api
from ambidex.storage.kv_pool import RowKVPool


class RowReader:
    """Attention over old keys of a `RowKVPool`; see `attention.readers.Reader`."""

    reads_own = False

    def __init__(self, pool: RowKVPool, attention: PartAttention) -> None:
        self._pool = pool
        self._attention = attention

    def prepare(self, parts: Sequence[OldKeys], num_tokens: int) -> "PreparedRows":
        return PreparedRows(self._pool, self._attention, parts, num_tokens)


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """See `attention.readers.Prepared`."""

    pool: RowKVPool
    attention: PartAttention
    parts: Sequence[OldKeys]
    num_tokens: int

    def attend(self, layer_idx: int, q: Tensor) -> AttentionState:
        k, v = self.pool.layer(layer_idx)
        if len(self.parts) == 1 and self.parts[0].rows == slice(0, self.num_tokens):
            out, lse = self._attend_part(q, k, v, self.parts[0])
            return AttentionState(out.float(), lse)
        state = empty(*q.shape, device=q.device)
        for part in self.parts:
            state.out[part.rows], state.lse[part.rows] = self._attend_part(q[part.rows], k, v, part)
        return state

    def _attend_part(self, q: Tensor, k: Tensor, v: Tensor, part: OldKeys) -> tuple[Tensor, Tensor]:
        keys, values = _visible(k, part).to(q.dtype), _visible(v, part).to(q.dtype)
        return self.attention.attend_old(q, keys, values, part)


def _visible(pool: Tensor, part: OldKeys) -> Tensor:
    """The part's rows of K or V, [Hkv, S, D]: a view of the pool if its blocks lie side by side, else a copy.

    NOTE: rows outside `part.keys` may hold NaN, so they are cut off rather than masked (0 · NaN is NaN).
    """
    rows = api.gather_blocks(pool, part.block_ids) if part.run is None else pool[:, part.run].flatten(1, 2)
    return rows[:, part.keys]

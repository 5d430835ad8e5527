"""`PacedReader`: the CPU lane over a pool of which a part plays slower memory (`storage/slow_tier.py`)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ambidex.attention.metadata import OldKeys
from ambidex.attention.readers import Prepared, Reader
from ambidex.attention.state import AttentionState
from ambidex.core.ids import KVPart
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.slow_tier import SlowTier


class PacedReader:
    """Another reader; see `attention.readers.Reader`. K and V that it reads take as long as their memory would."""

    def __init__(self, reader: Reader, pool: KVPool, slow: SlowTier) -> None:
        self._reader = reader
        self._pool = pool
        self._slow = slow
        self.reads_own = reader.reads_own

    def prepare(self, parts: Sequence[OldKeys], num_tokens: int) -> "PacedKeys":
        """Prepare as the reader does, and count what is read of each block."""
        spec = self._pool.spec
        reads = [
            (part.block_ids.to("cpu"), spec.num_kv_heads * (part.keys.stop - part.keys.start) / len(part.block_ids))
            for part in parts
            if len(part.block_ids)
        ]
        num_rows = sum(len(ids) * rows for ids, rows in reads)
        num_bytes = num_rows * sum(spec.row_bytes(part) for part in KVPart)
        return PacedKeys(self._reader.prepare(parts, num_tokens), self._slow, reads, num_bytes)


class PacedKeys:
    """See `attention.readers.Prepared`."""

    def __init__(
        self, prepared: Prepared, slow: SlowTier, reads: Sequence[tuple[torch.Tensor, float]], num_bytes: float
    ) -> None:
        self._prepared = prepared
        self._slow = slow
        self._reads = reads
        self._num_bytes = num_bytes

    def attend(self, layer_idx: int, q: Tensor) -> AttentionState:
        """As the reader does, no sooner than the slow memory would have given its bytes."""
        slow_bytes = sum(
            self._slow.bytes_of_rows(part, layer_idx, ids, rows) for part in KVPart for ids, rows in self._reads
        )
        with self._slow.reading(slow_bytes, self._num_bytes):
            return self._prepared.attend(layer_idx, q)

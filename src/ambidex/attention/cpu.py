"""The CPU lane: old keys in DRAM are attended where they lie; only q, and then (out, lse), cross the link."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ambidex.attention.blocks import attend_old_keys
from ambidex.attention.metadata import OldKeys
from ambidex.attention.state import AttentionState
from ambidex.storage.kv_pool import KVPool


class PendingState:
    """An answer that the CPU lane owes; `wait` computes it and brings it to the accelerator."""

    def __init__(self, pool: KVPool, layer_idx: int, q: Tensor, parts: Sequence[OldKeys], *, scale: float) -> None:
        self._pool = pool
        self._layer_idx = layer_idx
        self._parts = parts
        self._scale = scale
        self._device = q.device
        self._q = q.to(pool.device, non_blocking=True)  # from CUDA: into pinned memory, behind the queries' kernels
        self._arrival = torch.cuda.current_stream(q.device).record_event() if q.is_cuda else None

    def wait(self) -> AttentionState:
        """The state of all T queries over the lane's keys, on the accelerator, `out` fp32.

        Cost: waits for q, reads K and V of the parts, and copies 4 · T · Hq · (D + 1) bytes to a GPU.
        """
        if self._arrival is not None:
            self._arrival.synchronize()
        state = attend_old_keys(self._pool, self._layer_idx, self._q, self._parts, scale=self._scale)
        return AttentionState(state.out.to(self._device), state.lse.to(self._device))


class CPULane:
    """Attention over the DRAM pool."""

    def __init__(self, pool: KVPool, *, scale: float) -> None:
        self._pool = pool
        self._scale = scale

    def begin(self, layer_idx: int, q: Tensor, parts: Sequence[OldKeys]) -> PendingState:
        """Send the queries off without waiting, so that the accelerator's own work can be launched next."""
        return PendingState(self._pool, layer_idx, q, parts, scale=self._scale)

"""The CPU lane: old keys in DRAM are attended where they lie; only q, and then (out, lse), cross the link."""

import torch
from torch import Tensor

from ambidex.attention.readers import Prepared
from ambidex.attention.state import AttentionState


class PendingState:
    """An answer that the CPU lane owes; `wait` computes it and brings it to the accelerator."""

    def __init__(self, prepared: Prepared, layer_idx: int, q: Tensor) -> None:
        self._prepared = prepared
        self._layer_idx = layer_idx
        self._device = q.device
        self._q = q.to("cpu", non_blocking=True)  # from CUDA: into pinned memory, behind the queries' kernels
        self._arrival = torch.cuda.current_stream(q.device).record_event() if q.is_cuda else None

    def wait(self) -> AttentionState:
        """The state of all T queries over the lane's keys, on the accelerator, `out` fp32.

        Cost: waits for q, reads K and V of the parts, and copies 4 · T · Hq · (D + 1) bytes to a GPU.
        """
        if self._arrival is not None:
            self._arrival.synchronize()
        state = self._prepared.attend(self._layer_idx, self._q)
        return AttentionState(state.out.to(self._device), state.lse.to(self._device))


class CPULane:
    """Attention over old keys in the DRAM pool."""

    def begin(self, layer_idx: int, q: Tensor, prepared: Prepared) -> PendingState:
        """Send the queries off without waiting, so that the accelerator's own work can be launched next."""
        return PendingState(prepared, layer_idx, q)

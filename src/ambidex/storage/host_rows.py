"""`HostRows`: K and V of one request, row after row in host memory, where single rows are read by whoever needs them.

Pools in tile order serve attention over all keys; a single row lies there in many lines of memory (docs/kv_layout.md).
A policy that reads some rows of a context, or has the CPU score its keys with torch, finds them here instead. On a GPU
the memory is pinned, and kernels gather rows over the link where they lie.
"""

import torch
from torch import Tensor

from ambidex.core.errors import TierFullError
from ambidex.core.ids import KVPart
from ambidex.kernels.cpu.score_rows import KeyRows
from ambidex.kernels.cuda.pinned_view import view_on_gpu
from ambidex.storage.row_home import IN_DRAM, RowHome


class HostRows:
    """Rows of all layers.

    Args:
        shape: L, Hkv, D.
        capacity: rows there is room for.
        dtype: of the numbers.
        device: who reads them besides the host.
        home: where they lie, and who is asked to pin them.

    Attributes:
        k, v: [L, Hkv, capacity, D] in host memory; `k_there`, `v_there` the same memory as the device sees it.
        keys: K of each layer as the CPU's scores take it.
        length: rows 0 … length − 1 are there, in all layers.
        base: [Hkv, 1] on the device, where each head begins among the rows of a layer side by side.
    Raises:
        TierFullError: there is no such memory, or it cannot be pinned.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        capacity: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        home: RowHome = IN_DRAM,
    ) -> None:
        num_layers, num_heads, head_dim = shape
        self.home = home
        self.k = home.allocate(KVPart.K, (num_layers, num_heads, capacity, head_dim), dtype)
        self.v = home.allocate(KVPart.V, (num_layers, num_heads, capacity, head_dim), dtype)
        self.keys = [KeyRows(layer) for layer in self.k]
        self.length = 0
        self.base = torch.arange(num_heads, device=device)[:, None] * capacity
        self.k_there, self.v_there = self.k, self.v
        if device.type == "cuda":
            for part in (self.k, self.v):
                reason = home.memory.pin(part, self)
                if reason is not None:
                    raise TierFullError(f"rows of a request cannot be pinned: {reason}")
            self.k_there, self.v_there = view_on_gpu(self.k), view_on_gpu(self.v)

    @property
    def capacity(self) -> int:
        """Rows there is room for."""
        return self.k.shape[2]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write the next row of all layers, [L, Hkv, D] each on the device; the host may read it once the step is over.

        Cost: two launches; waits for nothing.
        """
        assert self.length < self.capacity, "a request has no more tokens than were announced"
        self.k_there[:, :, self.length] = k
        self.v_there[:, :, self.length] = v
        self.length += 1

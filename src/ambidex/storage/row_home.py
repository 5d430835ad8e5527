"""`RowHome`: where rows in host memory lie that are kept beside the pools (`storage/host_rows.py`)."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Final

import torch
from torch import Tensor

from ambidex.core.errors import TierFullError
from ambidex.core.ids import KVPart
from ambidex.core.kv_mapping import HostLayout, KVMapping
from ambidex.core.units import format_size
from ambidex.storage.host_memory import HOST_MEMORY, HostMemory
from ambidex.storage.kv_parts import Nodes
from ambidex.storage.pinned import is_out_of_memory
from ambidex.storage.placed_memory import PlacedMemory
from ambidex.storage.slow_tier import SlowTier


class RowHome:
    """Gives memory for rows as the mapping of K and V has it, and paces who reads them where it is emulated.

    Args:
        layout: of the pool in host memory; which layers' V lies in the CXL tier.
        nodes: of the CXL tier; None: there is none, or it is emulated.
        slow: the emulated tier.
        memory: who is asked.
    """

    def __init__(
        self,
        layout: HostLayout,
        *,
        nodes: Nodes | None = None,
        slow: SlowTier | None = None,
        memory: HostMemory = HOST_MEMORY,
    ) -> None:
        self._layout = layout
        self._nodes = nodes
        self._slow = slow
        self.memory = memory

    def allocate(self, part: KVPart, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Memory for K or V of L layers, [L, numbers of a layer], which may hold anything; in huge pages, if there are.

        Raises:
            TierFullError: there is no such memory on the node of the CXL tier, or at all.
        Cost: touches what lies in the CXL tier.
        """
        num_layers, num_numbers = shape
        is_mixed = self._layout.mapping is KVMapping.INTERLEAVE
        first = 0 if is_mixed else self._layout.first_cxl_layer
        if self._nodes is None or not (is_mixed or part is KVPart.V) or first >= num_layers or 0 in shape:
            rows = _allocate(shape, dtype)
            self.memory.advise(rows)
            return rows
        layer_bytes = num_numbers * dtype.itemsize
        region = PlacedMemory(num_layers * layer_bytes, self.memory.numa)
        rows = torch.frombuffer(region.buffer, dtype=dtype, count=num_layers * num_numbers).view(shape)
        self.memory.advise(rows)
        wanted = [self._nodes.local, self._nodes.cxl] if is_mixed else [self._nodes.cxl]
        reason = region.place(first * layer_bytes, num_layers * layer_bytes, wanted)
        if reason is not None:
            raise TierFullError(f"rows of {part.upper()}: {reason}")
        return rows

    def moving(self, num_layers: int, part_bytes: int) -> AbstractContextManager[None]:
        """Move so many bytes of K, and of V, of each layer on the host within this."""
        if self._slow is None:
            return nullcontext()
        shares = sum(self._layout.cxl_share(part, layer_idx) for part in KVPart for layer_idx in range(num_layers))
        return self._slow.reading(shares * part_bytes, 2 * num_layers * part_bytes)

    def pace(self, part: KVPart, layer_idx: int, num_bytes: int) -> Callable[[float, float], float] | None:
        """What tells from the begin and the end of a read on the host when it would have ended; None: when it did."""
        if self._slow is None or num_bytes == 0:
            return None
        slow_bytes = num_bytes * self._layout.cxl_share(part, layer_idx)
        return partial(self._slow.read_end, slow_bytes, num_bytes) if slow_bytes else None

    def copying(self, part: KVPart, layer_idx: int, num_bytes: int) -> AbstractContextManager[None]:
        """Launch within this what brings rows to the accelerator."""
        if self._slow is None:
            return nullcontext()
        return self._slow.copying(num_bytes * self._layout.cxl_share(part, layer_idx), num_bytes)


def _allocate(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise TierFullError(f"rows of K and V: no {format_size(math.prod(shape) * dtype.itemsize)} of DRAM") from error


IN_DRAM: Final = RowHome(HostLayout(mapping=KVMapping.DRAM, num_near=0))
"""All rows lie in DRAM."""

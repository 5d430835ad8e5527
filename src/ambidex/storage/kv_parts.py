"""K and V of a pool in host memory, part of them on another NUMA node (`core/kv_mapping.py` says which)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.core.errors import TierFullError
from ambidex.core.ids import KVPart
from ambidex.core.kv_mapping import HostLayout, KVMapping
from ambidex.core.kv_spec import KVSpec
from ambidex.storage.host_memory import HOST_MEMORY, HostMemory
from ambidex.storage.placed_memory import PlacedMemory
from ambidex.storage.row_format import TORCH_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The NUMA node of the CXL tier, and the one near this process's cores, with which pages are interleaved."""

    cxl: int
    local: int


def place_parts(
    spec: KVSpec, layout: HostLayout, nodes: Nodes, memory: HostMemory = HOST_MEMORY
) -> Mapping[KVPart, Tensor] | str:
    """K and V of a pool, each [L, Hkv, N, P, stored_row_size] and on its nodes; or why they do not come to lie there.

    What belongs in DRAM is neither touched nor bound: it lies where the system puts it.

    Cost: touches what lies in the CXL tier.
    """
    blocks = (spec.num_layers, spec.num_kv_heads, layout.num_blocks, spec.block_size)
    parts: dict[KVPart, Tensor] = {}
    for part in KVPart:
        shape, dtype = (*blocks, spec.stored_row_size(part)), TORCH_DTYPES[spec.dtypes.of(part)]
        num_bytes = layout.num_blocks * spec.part_bytes_per_block(part)
        if num_bytes == 0:
            parts[part] = torch.empty(shape, dtype=dtype)
            continue
        try:
            region = PlacedMemory(num_bytes, memory.numa)
        except TierFullError as error:
            return str(error)
        tensor = torch.frombuffer(region.buffer, dtype=dtype, count=num_bytes // dtype.itemsize).view(shape)
        memory.advise(tensor)  # before a page is touched; what comes of it the pool asks again
        for start, stop in _spans(spec, layout, part):
            wanted = [nodes.local, nodes.cxl] if layout.mapping is KVMapping.INTERLEAVE else [nodes.cxl]
            reason = region.place(start, stop, wanted)
            if reason is not None:
                return f"{part.upper()} of {layout.num_blocks} blocks: {reason}"
        parts[part] = tensor
    return parts


def _spans(spec: KVSpec, layout: HostLayout, part: KVPart) -> Iterator[tuple[int, int]]:
    """Bytes of K or V, from and up to, that belong in the CXL tier or are interleaved."""
    record = spec.block_size * spec.row_bytes(part)
    head = layout.num_blocks * record
    whole = spec.num_layers * spec.num_kv_heads * head
    match layout.mapping:
        case KVMapping.INTERLEAVE:
            yield 0, whole
        case KVMapping.K_DRAM_V_CXL if part is KVPart.V:
            yield layout.first_cxl_layer * spec.num_kv_heads * head, whole
        case KVMapping.K_DRAM_V_CXL if layout.num_spilled:
            for start in range(0, whole, head):
                yield start + layout.num_near * record, start + head
        case _:
            return

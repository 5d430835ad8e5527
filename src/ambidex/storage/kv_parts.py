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
from ambidex.storage.placed_memory import PlacedMemory, find_moved, own_pages
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
            reason = region.place(start, stop, _wanted(layout, nodes))
            if reason is not None:
                return f"{part.upper()} of {layout.num_blocks} blocks: {reason}"
        parts[part] = tensor
    return parts


def find_moved_parts(
    spec: KVSpec, layout: HostLayout, nodes: Nodes, parts: Mapping[KVPart, Tensor], memory: HostMemory = HOST_MEMORY
) -> str | None:
    """Ask again where K and V lie that were placed, once they are pinned: why not on their nodes; None: they do, or the
    kernel does not say it.

    For who pins pages for long, the kernel moves them out of zones that can be unplugged, as memory of CXL nodes often
    is. Source: Linux, core-api/pin_user_pages (FOLL_LONGTERM) and admin-guide/mm/memory-hotplug (ZONE_MOVABLE).
    """
    for part, tensor in parts.items():
        for span in _spans(spec, layout, part) if tensor.numel() else ():
            first, last = own_pages(*span, tensor.nbytes)
            reason = find_moved(tensor.data_ptr() + first, last - first, _wanted(layout, nodes), memory.numa)
            if reason is not None:
                return (
                    f"{part.upper()} of {layout.num_blocks} blocks has moved as it was pinned for the GPU: {reason}: "
                    f"is the node's memory online as movable (`daxctl online-memory --no-movable`)?"
                )
    return None


def _wanted(layout: HostLayout, nodes: Nodes) -> list[int]:
    """Where pages of the CXL tier's part lie."""
    return [nodes.local, nodes.cxl] if layout.mapping is KVMapping.INTERLEAVE else [nodes.cxl]


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

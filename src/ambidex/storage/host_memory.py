"""What pools and divided weights ask of the operating system and the driver for their host memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ambidex.hw.topology import Topology, read_topology
from ambidex.storage.huge_pages import advise_huge_pages
from ambidex.storage.numa_calls import NUMA_CALLS, NumaCalls
from ambidex.storage.pinned import register_pinned


def _new_memory(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Requests, two of them answered by None or by the reason of the refusal; a test hands in one that refuses.

    `pin` lets the copy engine reach a tensor for as long as an owner lives, `advise` asks for huge pages. `allocate`
    gives the memory of divided weights, [n] uint8 that may hold anything: a benchmark hands in one that keeps it from
    engine to engine. `numa` has pages lie on a node, and `topology` says which nodes there are.
    """

    pin: Callable[[Tensor, object], str | None] = register_pinned
    advise: Callable[[Tensor], str | None] = advise_huge_pages
    allocate: Callable[[int], Tensor] = _new_memory
    numa: NumaCalls = NUMA_CALLS
    topology: Callable[[], Topology] = read_topology


HOST_MEMORY: Final = HostMemory()
"""The system's and the driver's own answers."""

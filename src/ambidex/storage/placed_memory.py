"""`PlacedMemory`: host memory of which parts lie on chosen NUMA nodes, as the kernel confirms.

    map        fresh pages that nobody has touched
    place      a part gets its policy, is touched, and the kernel is asked where each of its pages lies

A part that does not come to lie where it was asked for is a refusal with a reason, and no error: whoever asked goes on
with other memory. Imports no torch, so that it can be tried on a small virtual machine.
"""

import ctypes
import errno
import mmap
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ambidex.core.errors import InternalError, TierFullError
from ambidex.core.units import MIB, format_size
from ambidex.storage.numa_calls import NUMA_CALLS, PAGE_BYTES, MemoryPolicy, NumaCalls

TOUCHED_BYTES: Final = 256 * MIB
"""Between two questions where pages lie: a node that is full is noticed before much of another one is taken."""
LEAST_SHARE: Final = 0.25
"""Of the pages of an interleaved part that each of two nodes must have got. Pages are dealt in turn, but huge ones
whole, and from each mapping's own beginning: 4352 to 3840 of 8192 were seen."""
MANY_PAGES: Final = 16 * 2 * MIB // PAGE_BYTES
"""From so many on, shares of an interleaved part are looked at: 16 huge pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlaces:
    """Pages of a part by node, and those that nobody has touched or of which the kernel does not say it."""

    on_node: dict[int, int]
    num_absent: int

    @property
    def num_pages(self) -> int:
        """All of them."""
        return sum(self.on_node.values()) + self.num_absent


class PlacedMemory:
    """A private mapping; its memory goes when the last view of `buffer` does.

    Args:
        num_bytes: at least 1.
        calls: the kernel's, or a test's.
    Raises:
        TierFullError: the system maps no more memory.
    """

    def __init__(self, num_bytes: int, calls: NumaCalls = NUMA_CALLS) -> None:
        self._calls = calls
        self.num_bytes = num_bytes
        try:
            self.buffer = mmap.mmap(-1, -(-num_bytes // PAGE_BYTES) * PAGE_BYTES, flags=mmap.MAP_PRIVATE)
        except (OSError, OverflowError) as error:
            raise TierFullError(
                f"the system maps no {format_size(num_bytes)} of memory ({error}): ask for a smaller budget"
            ) from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))

    def place(self, start: int, stop: int, nodes: Sequence[int]) -> str | None:
        """Have bytes start … stop − 1, which nobody has touched, lie on a node, or in turn on several; returns why they
        do not, or None.

        A page lies on one node: those that the part shares with its neighbours stay theirs.
        Cost: touches the part, and asks the kernel about every page.
        Raises:
            InternalError: the part does not lie within the mapping, or no node is named.
        """
        if not 0 <= start <= stop <= self.num_bytes or not nodes:
            raise InternalError(f"bytes {start} to {stop} of {self.num_bytes} shall lie on the nodes {list(nodes)}")
        first, last = own_pages(start, stop, self.num_bytes)
        if first >= last:
            return None
        policy = MemoryPolicy.PREFERRED if len(nodes) == 1 else MemoryPolicy.INTERLEAVE
        error = self._calls.set_policy(self.address + first, last - first, policy, nodes)
        if error:
            return f"the kernel places no memory on {_names(nodes)}: {_explain(error)}"
        for begin in range(first, last, TOUCHED_BYTES):
            end = min(begin + TOUCHED_BYTES, last)
            self.touch(begin, end)
            places = self.find_pages(begin, end)
            if isinstance(places, int):
                return f"the kernel does not say where pages lie: {_explain(places)}"
            reason = _find_misplaced(places, nodes)
            if reason is not None:
                return f"{reason}: it is full, or has gone"
        return None

    def touch(self, start: int, stop: int) -> None:
        """Write zeros to bytes start … stop − 1, so that their pages come into being."""
        ctypes.memset(self.address + start, 0, stop - start)

    def find_pages(self, start: int, stop: int) -> PagePlaces | int:
        """Ask the kernel where the pages of bytes start … stop − 1 lie; the number of its error if it does not say."""
        first = start // PAGE_BYTES * PAGE_BYTES
        return _find_pages(self.address + first, self.address + stop, self._calls)


def own_pages(start: int, stop: int, num_bytes: int) -> tuple[int, int]:
    """Of a mapping of so many bytes, from and up to where the pages lie that its bytes start … stop − 1 share with no
    neighbour."""
    first = -(-start // PAGE_BYTES) * PAGE_BYTES
    return first, stop // PAGE_BYTES * PAGE_BYTES if stop < num_bytes else -(-stop // PAGE_BYTES) * PAGE_BYTES


def find_moved(address: int, num_bytes: int, nodes: Sequence[int], calls: NumaCalls) -> str | None:
    """Why whole pages from an address on, which were placed, do not lie on their nodes any more; None: they do, or the
    kernel does not say it.

    Cost: asks the kernel about every page.
    """
    for begin in range(address, address + num_bytes, TOUCHED_BYTES):
        places = _find_pages(begin, min(begin + TOUCHED_BYTES, address + num_bytes), calls)
        reason = None if isinstance(places, int) else _find_misplaced(places, nodes)
        if reason is not None:
            return reason
    return None


def _find_pages(first: int, stop: int, calls: NumaCalls) -> PagePlaces | int:
    nodes = calls.find_nodes(np.arange(first, stop, PAGE_BYTES, dtype=np.uint64))
    if isinstance(nodes, int):
        return nodes
    counts = Counter(nodes.tolist())
    return PagePlaces(
        on_node={node: count for node, count in sorted(counts.items()) if node >= 0},
        num_absent=sum(count for node, count in counts.items() if node < 0),
    )


def _find_misplaced(places: PagePlaces, nodes: Sequence[int]) -> str | None:
    """Why pages that were touched do not count as lying on the nodes; None: they do."""
    num_there = sum(places.on_node.get(node, 0) for node in nodes)
    if num_there < places.num_pages:
        elsewhere = ", ".join(f"{count} on node {node}" for node, count in places.on_node.items() if node not in nodes)
        return (
            f"{num_there} of {places.num_pages} pages came to lie on {_names(nodes)} ({elsewhere or 'others nowhere'})"
        )
    least = min(places.on_node.get(node, 0) for node in nodes)
    if len(nodes) > 1 and places.num_pages >= MANY_PAGES and least < LEAST_SHARE * places.num_pages:
        return f"of {places.num_pages} interleaved pages one of {_names(nodes)} got only {least}"
    return None


def _names(nodes: Sequence[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {' and '.join(map(str, nodes))}"


def _explain(error: int) -> str:
    """The system's word for an error, and what it means here."""
    meanings = {
        errno.EPERM: "this process may not (a container without the right: docker run --cap-add SYS_NICE)",
        errno.EINVAL: "it does not exist, has gone, or the process's cpuset leaves it out",
        errno.ENOMEM: "it has no memory left",
        errno.ENOSYS: "the kernel is built without NUMA, or is not Linux",
    }
    word = os.strerror(error)
    return f"{word} ({meanings[error]})" if error in meanings else word

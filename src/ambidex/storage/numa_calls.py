"""The system calls that say on which NUMA node pages shall lie, and ask where they do lie. No policy, no tensors.

Called through libc's `syscall`, so no library of NUMA calls is needed. Source: Linux, mbind(2), move_pages(2).
"""

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_NUMBERS: Final = {"x86_64": (237, 279), "aarch64": (235, 239)}
"""Of mbind and move_pages."""
_MAX_PAGES: Final = 1 << 18
"""That are asked about in one call: 2 MiB of addresses."""
_MASK_BITS: Final = ctypes.sizeof(ctypes.c_ulong) * 8


class MemoryPolicy(IntEnum):
    """How pages of a mapping are placed when they are first touched.

    PREFERRED: on one node, elsewhere when it is full. INTERLEAVE: in turn on each of some. A strict binding is not
    offered: where a bound node is full, the kernel kills a process rather than refuse a page.
    """

    PREFERRED = 1
    INTERLEAVE = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaCalls:
    """Two calls; a test hands in ones that fail.

    `set_policy(address, num_bytes, policy, nodes)` returns 0 or the number of the error. `find_nodes(addresses)` takes
    [n] uint64 addresses of pages and returns [n] int32: the node of each page, or a negative number of an error, −2 for
    a page that nobody has touched; or the number of the error of the whole call.
    """

    set_policy: Callable[[int, int, MemoryPolicy, Sequence[int]], int]
    find_nodes: Callable[[NDArray[np.uint64]], NDArray[np.int32] | int]


def _set_policy(address: int, num_bytes: int, policy: MemoryPolicy, nodes: Sequence[int]) -> int:
    numbers = _numbers()
    if numbers is None:
        return _NO_CALL
    words = [0] * (max(nodes) // _MASK_BITS + 1)
    for node in nodes:
        words[node // _MASK_BITS] |= 1 << node % _MASK_BITS
    mask = (ctypes.c_ulong * len(words))(*words)
    return _call(
        numbers[0], ctypes.c_ulong(address), ctypes.c_ulong(num_bytes), ctypes.c_ulong(policy), mask,
        ctypes.c_ulong(len(words) * _MASK_BITS + 1), ctypes.c_ulong(0),
    )  # fmt: skip


def _find_nodes(addresses: NDArray[np.uint64]) -> NDArray[np.int32] | int:
    numbers = _numbers()
    if numbers is None:
        return _NO_CALL
    nodes = np.empty(len(addresses), dtype=np.int32)
    for first in range(0, len(addresses), _MAX_PAGES):
        some = np.ascontiguousarray(addresses[first : first + _MAX_PAGES], dtype=np.uint64)
        found = np.empty(len(some), dtype=np.int32)
        error = _call(
            numbers[1], ctypes.c_ulong(0), ctypes.c_ulong(len(some)), ctypes.c_void_p(some.ctypes.data),
            ctypes.c_void_p(None), ctypes.c_void_p(found.ctypes.data), ctypes.c_ulong(0),
        )  # fmt: skip
        if error:
            return error
        nodes[first : first + len(some)] = found
    return nodes


_NO_CALL: Final = 38  # ENOSYS


def _numbers() -> tuple[int, int] | None:
    return _NUMBERS.get(platform.machine()) if sys.platform.startswith("linux") else None


def _call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    ctypes.set_errno(0)
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(number), *arguments) == -1 else 0


NUMA_CALLS: Final = NumaCalls(set_policy=_set_policy, find_nodes=_find_nodes)
"""The kernel's own."""

"""Two NUMA nodes that a test makes up: what a kernel would answer, and the ways in which it refuses."""

import errno
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ambidex.storage.numa_calls import PAGE_BYTES, MemoryPolicy, NumaCalls


@dataclass(slots=True, kw_only=True)
class FakeKernel:
    """Pages lie on node 0 unless their mapping's policy says otherwise and the node has room.

    `refuse` is the error of the policy call, `silent` that of the question where pages lie.
    """

    free_pages: dict[int, int] = field(default_factory=lambda: {0: 1 << 40, 1: 1 << 40})
    refuse: int = 0
    silent: int = 0
    policies: list[tuple[int, int, MemoryPolicy, tuple[int, ...]]] = field(default_factory=list)
    _where: dict[int, int] = field(default_factory=dict)

    def calls(self) -> NumaCalls:
        return NumaCalls(set_policy=self._set_policy, find_nodes=self._find_nodes)

    def move_all(self) -> None:
        """All pages lie on node 0 from now on, whatever was asked for."""
        self.policies.clear()
        self._where.clear()

    def _set_policy(self, address: int, num_bytes: int, policy: MemoryPolicy, nodes: Sequence[int]) -> int:
        assert address % PAGE_BYTES == num_bytes % PAGE_BYTES == 0, "the kernel takes whole pages"
        if self.refuse:
            return self.refuse
        if not set(nodes) <= self.free_pages.keys():
            return errno.EINVAL
        self.policies.append((address, num_bytes, policy, tuple(nodes)))
        return 0

    def _find_nodes(self, addresses: NDArray[np.uint64]) -> NDArray[np.int32] | int:
        if self.silent:
            return self.silent
        return np.array([self._place(int(address)) for address in addresses], dtype=np.int32)

    def _place(self, address: int) -> int:
        """The page's node, which it gets when it is first asked for: callers touch pages before."""
        if address not in self._where:
            wanted = [0]
            for start, num_bytes, _, nodes in self.policies:
                if start <= address < start + num_bytes:
                    wanted = [nodes[(address - start) // PAGE_BYTES % len(nodes)]]
            node = next(node for node in (*wanted, *self.free_pages) if self.free_pages[node] > 0)
            self.free_pages[node] -= 1
            self._where[address] = node
        return self._where[address]

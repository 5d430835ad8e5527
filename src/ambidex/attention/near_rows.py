"""`NearRows`: the newest keys of the requests that decode, on the accelerator, where a step's own are put first.

They go on from there when the step is at its end, all layers at once: into the request's rows in host memory, and into
its block if that lies in rows on the accelerator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.core.ids import KVPart, RequestId, Tier
from ambidex.core.kv_spec import num_near_rows
from ambidex.core.step import ScheduledRequest
from ambidex.kernels import api
from ambidex.storage.host_rows import HostRows
from ambidex.storage.kv_pool import KVPool, RowKVPool

Angles = tuple[Tensor, Tensor]


@dataclass(slots=True)
class _Near:
    """The newest rows of a request, of positions `base` …, in a slot of its own."""

    slot: int
    base: int
    next_position: int


class NearRows:
    """Near rows of each request, and those of the step.

    Args:
        pool: the accelerator's.
        num_near: newest keys before a query's own that are near.
        max_requests: whose near rows are kept, at most.

    Attributes:
        k, v: [L, Hkv, slots, R, D]; each request has a slot of R rows.
    """

    def __init__(self, pool: KVPool, *, num_near: int, max_requests: int) -> None:
        spec = pool.spec
        shape = (spec.num_layers, spec.num_kv_heads, max_requests, num_near_rows(num_near), spec.head_dim)
        self.k, self.v = (torch.empty(shape, dtype=pool.k.dtype, device=pool.device) for _ in range(2))
        self._pool = pool
        self._num_near = num_near
        self._free = list(range(max_requests))
        self._kept: dict[RequestId, _Near] = {}
        self._step: list[_Near] = []
        self._places: list[int] = []
        self._blocks: list[tuple[int, int]] | None = None
        self._slots: Tensor | None = None

    @property
    def num_requests(self) -> int:
        """Requests whose near rows are kept now."""
        return len(self._kept)

    @property
    def is_stored_late(self) -> bool:
        """Whether `keep_new` puts the step's rows into their blocks; else who attends stores them layer by layer."""
        return self._blocks is not None

    def forget(self, request_id: RequestId) -> None:
        """Drop those of a request that ended."""
        near = self._kept.pop(request_id, None)
        if near is not None:
            self._free.append(near.slot)

    def begin(self, requests: Sequence[ScheduledRequest], rows: Sequence[HostRows]) -> None:
        """Prepare for a step with one new token of each request, whose older rows are all in host memory.

        Cost: a request's first step, and one in about as many as there are near rows, copies them from there.
        """
        ids = {request.request_id for request in requests}
        if len(self._kept.keys() | ids) > self.k.shape[2]:
            for request_id in self._kept.keys() - ids:
                self.forget(request_id)
        self._step = [self._follow(request, part) for request, part in zip(requests, rows, strict=True)]
        self._places = [request.start - near.base for request, near in zip(requests, self._step, strict=True)]
        self._blocks = self._find_blocks(requests)
        self._slots = None

    def place(self, row: int, position: int) -> int:
        """Where a near position of a request of the step lies among the rows of all slots, side by side."""
        near = self._step[row]
        return near.slot * self.k.shape[3] + position - near.base

    def add(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """Rotate the step's queries and keys, and put K and V among the near rows of a layer.

        Args:
            q: [B, Hq, D]; k, v: [B, Hkv, D], on the accelerator; angles: None: nothing is rotated.
        Returns:
            The rotated queries, and what makes the rotated keys [B, Hkv, D] for those who need them besides.
        Cost: one launch.
        """
        if q.dtype == self.k.dtype:
            if self._slots is None:  # of an eager step: one of fixed form has its own
                own = [self.place(row, near.next_position - 1) for row, near in enumerate(self._step)]
                self._slots = torch.tensor(own, dtype=torch.int64, device=self.k.device)
            slots = self._slots
            q = api.rotate_and_store(q, k, v, self.k[layer_idx], self.v[layer_idx], slots, angles=angles)
            return q, lambda: self.k[layer_idx].flatten(1, 2)[:, slots].transpose(0, 1)
        if angles is not None:
            q, k = api.rotate(q, *angles), api.rotate(k, *angles)
        new_k, new_v = self._pool.round(KVPart.K, k), self._pool.round(KVPart.V, v)
        for row, (near, place) in enumerate(zip(self._step, self._places, strict=True)):
            self.k[layer_idx, :, near.slot, place] = new_k[row]
            self.v[layer_idx, :, near.slot, place] = new_v[row]
        return q, lambda: k

    def rows(self, layer_idx: int, row: int, num_far: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """K and V [Hkv, n, D] of one request in a layer, positions num_far … num_keys − 1; views."""
        near = self._step[row]
        seen = slice(num_far - near.base, num_keys - near.base)
        return self.k[layer_idx, :, near.slot, seen], self.v[layer_idx, :, near.slot, seen]

    def keep_new(self, rows: Sequence[HostRows]) -> None:
        """The step is at its end: its rows are rows of host memory, and of their blocks if they are stored late.

        Cost: four launches a request.
        """
        for row, (near, place, kept) in enumerate(zip(self._step, self._places, rows, strict=True)):
            k, v = self.k[:, :, near.slot, place], self.v[:, :, near.slot, place]  # [L, Hkv, D]
            kept.append(k, v)
            if self._blocks is not None:
                block_id, offset = self._blocks[row]
                self._pool.k[:, :, block_id, offset] = k
                self._pool.v[:, :, block_id, offset] = v

    def _find_blocks(self, requests: Sequence[ScheduledRequest]) -> list[tuple[int, int]] | None:
        """Block and offset of each new row, if all go into rows on the accelerator."""
        if not isinstance(self._pool, RowKVPool):
            return None
        size, found = self._pool.spec.block_size, []
        for request in requests:
            block = request.blocks[request.start // size]
            if block.tier is not Tier.GPU:
                return None
            found.append((int(block.block_id), request.start % size))
        return found

    def _follow(self, request: ScheduledRequest, rows: HostRows) -> _Near:
        """The near rows before a request's new one, with room for that one."""
        start = request.start
        near = self._kept.get(request.request_id)
        if near is not None and near.next_position == start and start - near.base < self.k.shape[3]:
            near.next_position += 1
            return near
        if near is None:
            near = self._kept[request.request_id] = _Near(self._free.pop(), 0, 0)
        near.base, near.next_position = max(0, start - self._num_near), start + 1
        if near.base == start:
            return near
        for own, part in ((self.k, rows.k_there), (self.v, rows.v_there)):
            own[:, :, near.slot, : start - near.base] = part[:, :, near.base : start]
        return near

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
    """The newest rows of a request: k, v [L, Hkv, n, D], of positions `base` …"""

    k: Tensor
    v: Tensor
    base: int
    next_position: int


class NearRows:
    """Near rows of each request, and those of the step.

    Args:
        pool: the accelerator's.
        num_near: newest keys before a query's own that are near.
        max_requests: whose near rows are kept, at most.
    """

    def __init__(self, pool: KVPool, *, num_near: int, max_requests: int) -> None:
        self._pool = pool
        self._num_near = num_near
        self._max_requests = max_requests
        self._kept: dict[RequestId, _Near] = {}
        self._step: list[_Near] = []
        self._places: list[int] = []
        self._blocks: list[tuple[int, int]] | None = None
        self._slots = torch.empty(0)

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
        self._kept.pop(request_id, None)

    def begin(self, requests: Sequence[ScheduledRequest], rows: Sequence[HostRows]) -> None:
        """Prepare for a step with one new token of each request, whose older rows are all in host memory.

        Cost: a request's first step, and one in about as many as there are near rows, copies them from there.
        """
        ids = [request.request_id for request in requests]
        if len(self._kept.keys() | set(ids)) > self._max_requests:
            self._kept = {request_id: self._kept[request_id] for request_id in ids if request_id in self._kept}
        self._step = [self._follow(request, part) for request, part in zip(requests, rows, strict=True)]
        self._places = [request.start - near.base for request, near in zip(requests, self._step, strict=True)]
        self._blocks = self._find_blocks(requests)
        if len(self._places) == 1:  # else rows are copied one by one
            self._slots = torch.tensor(self._places, dtype=torch.int64, device=self._pool.device)

    def add(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, angles: Angles | None
    ) -> tuple[Tensor, Callable[[], Tensor]]:
        """Rotate the step's queries and keys, and put K and V among the near rows of a layer.

        Args:
            q: [B, Hq, D]; k, v: [B, Hkv, D], on the accelerator; angles: None: nothing is rotated.
        Returns:
            The rotated queries, and what makes the rotated keys [B, Hkv, D] for those who need them besides.
        Cost: one launch for one request.
        """
        if len(self._step) == 1 and q.dtype == self._pool.k.dtype:
            near, place = self._step[0], self._places[0]
            k_rows, v_rows = near.k[layer_idx], near.v[layer_idx]
            q = api.rotate_and_store(q, k, v, k_rows[:, None], v_rows[:, None], self._slots, angles=angles)
            return q, lambda: k_rows[None, :, place]
        if angles is not None:
            q, k = api.rotate(q, *angles), api.rotate(k, *angles)
        new_k, new_v = self._pool.round(KVPart.K, k), self._pool.round(KVPart.V, v)
        for row, (near, place) in enumerate(zip(self._step, self._places, strict=True)):
            near.k[layer_idx, :, place] = new_k[row]
            near.v[layer_idx, :, place] = new_v[row]
        return q, lambda: k

    def rows(self, layer_idx: int, row: int, num_far: int, num_keys: int) -> tuple[Tensor, Tensor]:
        """K and V [Hkv, n, D] of one request in a layer, positions num_far … num_keys − 1; views."""
        near = self._step[row]
        seen = slice(num_far - near.base, num_keys - near.base)
        return near.k[layer_idx, :, seen], near.v[layer_idx, :, seen]

    def keep_new(self, rows: Sequence[HostRows]) -> None:
        """The step is at its end: its rows are rows of host memory, and of their blocks if they are stored late.

        Cost: four launches a request.
        """
        for row, (near, place, kept) in enumerate(zip(self._step, self._places, rows, strict=True)):
            k, v = near.k[:, :, place], near.v[:, :, place]  # [L, Hkv, D]
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
        if near is not None and near.next_position == start and start - near.base < near.k.shape[2]:
            near.next_position += 1
            return near
        del near
        self._kept.pop(request.request_id, None)  # given back before others are made
        first = max(0, start - self._num_near)
        num_layers, num_heads, _, head_dim = rows.k.shape
        shape = (num_layers, num_heads, num_near_rows(self._num_near), head_dim)
        made = _Near(
            k=torch.empty(shape, dtype=rows.k.dtype, device=self._pool.device),
            v=torch.empty(shape, dtype=rows.v.dtype, device=self._pool.device),
            base=first,
            next_position=start + 1,
        )
        made.k[:, :, : start - first] = rows.k_there[:, :, first:start]
        made.v[:, :, : start - first] = rows.v_there[:, :, first:start]
        self._kept[request.request_id] = made
        return made

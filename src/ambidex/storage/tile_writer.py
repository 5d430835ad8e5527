"""`TileWriter`: the step's new rows that belong in host memory, laid out and sent there by the accelerator itself."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ambidex.core.step import ScheduledRequest
from ambidex.storage.side_stream import SideStream
from ambidex.storage.tiled_pool import TiledKVPool


class TileWriter:
    """Writes new rows into a pool in tile order, beside the computation and without a wait of the host.

    What `write` was given is complete for whoever comes behind `join` on the current stream.

    Args:
        pool: within reach of `device` (`TiledKVPool.is_within_reach`).
        device: where the rows are computed.
    """

    def __init__(self, pool: TiledKVPool, device: torch.device) -> None:
        self._pool = pool
        self._device = device
        self._stream = SideStream(device)
        self._jobs: Tensor | None = None
        self._written: list[tuple[int, int]] = []  # blocks that get new rows, and how many
        self._held: tuple[Tensor, ...] = ()  # rows that are being read on the other stream

    def begin(self, requests: Sequence[ScheduledRequest]) -> None:
        """Note where the new rows of a step go; what an earlier step left is joined.

        Cost: on CUDA, one small copy if there are rows for this pool.
        """
        self.join()
        jobs = make_jobs(requests, self._pool)
        self._jobs = torch.tensor(jobs, dtype=torch.int64).to(self._device, non_blocking=True) if jobs else None
        self._written = [(block_id, stop - first) for _, block_id, first, stop in jobs]

    def write(self, layer_idx: int, k: Tensor, v: Tensor) -> None:
        """Write those of the step's rows [T, Hkv, D] that belong here, in a floating format.

        Rows of the layer before are joined first: they were written long ago, and their memory is wanted.
        """
        if self._jobs is None:
            return
        self.join()
        self._held = (k, v)
        self._stream.wait_for_current()
        with self._stream.active():
            self._pool.write_rows(
                slice(layer_idx, layer_idx + 1), self._jobs, k.transpose(0, 1)[None], v.transpose(0, 1)[None]
            )
            slow = self._pool.slow
            if slow is not None:
                share = 1 / self._pool.spec.block_size
                slow.delay_stream(
                    sum(share * num * slow.bytes_of_blocks(layer_idx, [block_id]) for block_id, num in self._written)
                )

    def join(self) -> None:
        """What the current stream is given from now on finds all rows written."""
        self._stream.join_current()
        self._held = ()


def make_jobs(requests: Sequence[ScheduledRequest], pool: TiledKVPool) -> list[tuple[int, int, int, int]]:
    """For each block of the pool's tier that gets new rows: the row of the step that is its token 0 (negative if that
    one is older), the block, its first new token and its last one + 1."""
    size, jobs, first_row = pool.spec.block_size, [], 0
    for request in requests:
        end = request.start + len(request.token_ids)
        for index in range(request.start // size, -(-end // size)):
            block, position = request.blocks[index], index * size
            if block.tier is pool.tier:
                jobs.append(
                    (
                        first_row + position - request.start,
                        int(block.block_id),
                        max(request.start - position, 0),
                        min(end - position, size),
                    )
                )
        first_row += len(request.token_ids)
    return jobs

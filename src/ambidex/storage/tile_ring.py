"""`TileRing`: pieces of a pool in host memory on their way to the accelerator, some ahead of who uses them.

    piece        0    1    2    3    4  …               in the order in which they will be used
    buffer       0    1    2    0    1                  a piece is copied when its buffer's last one was used up

    copies     | 0 | 1 | 2 |   wait   | 3 | 4 |         on a stream of their own
    computing          | 0 | 1 |   other work           on the current stream: waits for a piece, frees its buffer

Both ways an event keeps the order: `arrived` before a piece is read, `used` before its buffer is written again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from ambidex.core.errors import InternalError
from ambidex.core.kv_spec import STREAM_BUFFERS, StreamBuffers
from ambidex.kernels import tiles
from ambidex.storage.side_stream import Mark, SideStream
from ambidex.storage.tiled_pool import TiledKVPool

LEAST_RUN_BYTES: Final = 128 * 1024
"""Bytes of consecutive blocks of one head from which the copy engine brings them; shorter runs are fetched by threads.
Measured (H200, PCIe 5 x16): a pinned copy of 64 KiB takes 16 µs, of 1 MiB 29 µs, where 55 GB/s are 1.2 and 19 µs; some
threads gather records of 16 KiB at 50 GB/s."""


@dataclass(frozen=True, slots=True)
class BlockList:
    """Blocks of one request that travel together, ascending in position."""

    ids: tuple[int, ...]
    device_ids: Tensor
    """[n] int64, the same on the accelerator."""
    runs: tuple[slice, ...] = field(init=False)
    """Places among the ids, each a run of consecutive ids."""

    def __post_init__(self) -> None:
        cuts = [i for i in range(1, len(self.ids)) if self.ids[i] != self.ids[i - 1] + 1]
        object.__setattr__(self, "runs", tuple(slice(*pair) for pair in pairwise((0, *cuts, len(self.ids)))))


class TileRing:
    """Buffers on an accelerator through which blocks of a pool travel, layer by layer.

    `start`, then for each piece `take` and `free`, in the pieces' order.

    Args:
        pool: where the blocks lie; one that the device does not reach is copied by the copy engine only.
        least_run_bytes: of consecutive blocks that the copy engine brings.
    """

    def __init__(
        self,
        pool: TiledKVPool,
        sizes: StreamBuffers,
        device: torch.device,
        *,
        least_run_bytes: int = LEAST_RUN_BYTES,
    ) -> None:
        self._pool = pool
        self._least_run_bytes = least_run_bytes
        self._reaches = pool.is_within_reach(device)
        most = sizes.piece_blocks
        self._buffers = [
            [torch.empty(part[0, :, 0].numel() * most, dtype=part.dtype, device=device) for part in pool.tensors]
            for _ in range(STREAM_BUFFERS)
        ]
        self._arrived = [Mark(device) for _ in range(STREAM_BUFFERS)]
        self._used = [Mark(device) for _ in range(STREAM_BUFFERS)]
        self._stream = SideStream(device)
        self._pieces: Sequence[tuple[int, BlockList]] = ()
        self._num_sent = self._num_taken = 0

    def start(self, pieces: Sequence[tuple[int, BlockList]]) -> None:
        """Forget what is left of earlier pieces and begin with these, (layer, blocks); the first are sent at once.

        What the current stream was given before, such as writing the pool, is complete before any is read.
        """
        self._pieces = pieces
        self._num_sent = self._num_taken = 0
        self._stream.wait_for_current()
        for _ in pieces[:STREAM_BUFFERS]:
            self._send()

    def stop(self) -> None:
        """What the current stream is given from now on comes behind all copies: what they read may go."""
        self._stream.join_current()
        self._pieces = ()
        self._num_sent = self._num_taken = 0

    def take(self) -> tuple[Tensor, ...]:
        """The next piece's K, V and for int8 their scales, each [Hkv, n, …] in the pool's order.

        Raises:
            InternalError: there is none, or the one before was not freed.
        """
        if not self._num_taken < self._num_sent:
            raise InternalError(f"piece {self._num_taken} of {len(self._pieces)} is taken before it was sent")
        buffer = self._num_taken % STREAM_BUFFERS
        self._arrived[buffer].wait()
        return self._views(buffer, self._pieces[self._num_taken][1])

    def free(self) -> None:
        """What the current stream was given so far is the last use of the piece: its buffer takes the next in line."""
        self._used[self._num_taken % STREAM_BUFFERS].set()
        self._num_taken += 1
        if self._num_sent < len(self._pieces):
            self._send()

    def _send(self) -> None:
        layer_idx, blocks = self._pieces[self._num_sent]
        buffer = self._num_sent % STREAM_BUFFERS
        with self._stream.active():
            self._used[buffer].wait()
            for source, to in zip(self._pool.layer_tensors(layer_idx), self._views(buffer, blocks), strict=True):
                self._copy(source, to, blocks)
            if self._pool.slow is not None:
                self._pool.slow.delay_stream(self._pool.slow.bytes_of_blocks(layer_idx, blocks.ids))
            self._arrived[buffer].set()
        self._num_sent += 1

    def _copy(self, source: Tensor, to: Tensor, blocks: BlockList) -> None:
        """Bring blocks [Hkv, N, …] → [Hkv, n, …] by whatever is fast for runs of that length."""
        if self._reaches and source[0, 0].nbytes * len(blocks.ids) < self._least_run_bytes * len(blocks.runs):
            records, targets = (part.reshape(*part.shape[:3], -1) for part in (source, to))  # scales: [Hkv, N, P, 1]
            tiles.fetch_blocks(records, blocks.device_ids, targets)
            return
        # Head by head and run by run: each is contiguous on both sides, which is what torch copies without a wait; as a
        # list, since a call from Python for each would take as long as the link.
        targets_of_runs: list[Tensor] = []
        sources_of_runs: list[Tensor] = []
        for run in blocks.runs:
            first = blocks.ids[run.start]
            targets_of_runs += to[:, run].unbind(0)
            sources_of_runs += source[:, first : first + run.stop - run.start].unbind(0)
        torch._foreach_copy_(targets_of_runs, sources_of_runs, non_blocking=True)

    def _views(self, buffer: int, blocks: BlockList) -> tuple[Tensor, ...]:
        views = []
        for part, memory in zip(self._pool.tensors, self._buffers[buffer], strict=True):
            shape = (part.shape[1], len(blocks.ids), *part.shape[3:])
            views.append(memory[: torch.Size(shape).numel()].view(shape))
        return tuple(views)

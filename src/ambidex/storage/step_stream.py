"""`StepStream`: keys in DRAM on their way to the accelerator during a decode step, layer after layer, ahead of it.

    link          | layer 0 | layer 1 |  wait  | layer 2 | …        a layer's blocks go into one of two buffers
    accelerator       products, its own keys | 0 |  …  | 1 | …      attends over a layer's blocks once they have arrived

Keys of old blocks do not depend on the step, so the link works through the whole of it, products included. The order
is kept by words in host memory, which the accelerator's stream and that of the copies write and wait for: `arrived[i]`
before layer i's blocks are read, `used[i]` before its buffer is written again. The step may be a captured graph: what
it launches is the same in each step. The copies are not part of it; a thread of this class launches those that wait.

NOTE: loading a kernel waits for all streams of the device. Were one loaded while the copies wait for a layer whose end
is not launched yet, neither would go on. So a step that may load kernels, the first of its kind, is `inline`: its
copies stand in the accelerator's own stream, and nobody waits for a word. Nor are copies launched that wait for a step
which the driver has not taken yet: a stream that waits takes so many launches (about a thousand, and a layer of many
requests may have hundreds), then the next one holds up its thread, which must not be what the step's launch waits for.
Nor must the step's launch wait for them for ever: one that takes long may do so, and they are launched then.
"""

import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from ambidex.core.errors import LaneError
from ambidex.core.kv_spec import STEP_BUFFERS
from ambidex.kernels import tiles
from ambidex.kernels.cpu.native import WORD_STRIDE
from ambidex.kernels.cuda.copy2d import RunCopies
from ambidex.storage.side_stream import SideStream
from ambidex.storage.tiled_pool import TiledKVPool
from ambidex.storage.words import WAIT_LIMIT_S, StepFence, StreamWords, Words, naming

LONG_LAUNCH_S: Final = 0.05
"""Launches of whole steps take milliseconds."""
MOST_RUNS_AT_ONCE: Final = 8
"""Copies of a layer's K, or V, up to which `start` itself launches those of the first layers, which wait for nothing:
the thread would come to them only when the step's launch lets go of interpreter and driver. More of them would take
longer than that."""
LEAST_COPY_BYTES: Final = 256 * 1024
"""Bytes of a copy (consecutive blocks of all heads) from which the copy engine brings them, on average over a step's;
shorter ones are fetched by threads of the accelerator."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Consecutive blocks of the pool, `first` … `first + num − 1`, and the place of the first in the buffer."""

    first: int
    place: int
    num: int


class StepStream:
    """Buffers, words and the thread that launches copies.

    A step is `start`, then for each layer `wait`, the use of `layer`, `free`, then `mark_launched`, at last `finish`.
    Or it is all within `inline`, without the others.

    Args:
        pool: where the blocks lie; pinned, unless the device is the CPU.
        num_blocks: that a buffer holds.
        device: the accelerator.
        words: how its side writes and waits for words; the copies' stream does so by itself.
        row_dtype: of the rows that blocks of integers become there, if the pool holds such; else they are attended as
            they lie.
    """

    def __init__(
        self,
        pool: TiledKVPool,
        num_blocks: int,
        device: torch.device,
        words: Words,
        *,
        row_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._pool = pool
        self._device = device
        self._words = words
        self.num_blocks = num_blocks
        num_layers, num_heads = pool.k.shape[:2]
        self._buffers = [
            tuple(
                torch.empty((num_heads, num_blocks, *part.shape[3:]), dtype=part.dtype, device=device)
                for part in pool.tensors
            )
            for _ in range(STEP_BUFFERS)
        ]
        rows = (num_heads, num_blocks * pool.spec.block_size, pool.spec.head_dim)
        self.rows = (
            (torch.empty(rows, dtype=row_dtype, device=device), torch.empty(rows, dtype=row_dtype, device=device))
            if pool.spec.dtype.has_scales
            else None
        )
        """K and V of a layer's blocks as rows, [Hkv, num_blocks · P, D] each: for whoever attends; None for floats."""
        is_cuda = device.type == "cuda"
        # [arrived or used, L, words of a cache line]
        self._flags = torch.zeros(2, num_layers, WORD_STRIDE, dtype=torch.int32, pin_memory=is_cuda)
        self._host_flags = self._flags.numpy()  # the same memory
        self._fence = StepFence(is_cuda=is_cuda)
        self._copies = SideStream(device)
        self._copy_words = StreamWords(self._copies.handle) if is_cuda else words
        self._last_copies: torch.cuda.Event | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: Exception | None = None
        self._inline: Callable[[int], None] | None = None
        # By layer, what launches copies of its tensors; and its words.
        self._run_copies = [
            [RunCopies(*pair) for pair in zip(pool.layer_tensors(i), self.layer(i), strict=True)]
            for i in range(num_layers if is_cuda and pool.num_blocks and num_blocks else 0)
        ]
        self._arrived, self._used = ([words_[i, :1] for i in range(num_layers)] for words_ in self._flags)
        if is_cuda and pool.num_blocks and num_blocks:
            self._fetch(0, torch.zeros(1, dtype=torch.int64, device=device))  # the thread must never load a kernel
        threading.Thread(target=_work, args=(self._jobs,), name="ambidex-stream-lane", daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)

    def start(self, runs: Sequence[BlockRun], launched: threading.Event | None = None) -> None:
        """Begin to bring a step's blocks, the same in each layer; returns when the accelerator has come to the end of
        the last step, so that nobody waits for a word.

        Args:
            launched: is set when the driver has taken the step, before which, or 50 ms, no copies are launched that
                wait for it; None: it waits for nothing of this stream's.
        Raises:
            LaneError: the last step, or its copies, have not come to their end.
        """
        self._fence.wait(WAIT_LIMIT_S, self.describe)
        self._await_copies()
        self._error = None
        self._host_flags[1] = 0
        if not runs:
            self._host_flags[0, :, 0] = 1
            return
        self._host_flags[0] = 0
        num_sent = min(STEP_BUFFERS, len(self._pool.k)) if len(runs) <= MOST_RUNS_AT_ONCE else 0
        try:
            send = self._find_way(runs)
            self._send_layers(range(num_sent), send)
        except Exception as error:
            raise LaneError(f"the stream lane could not bring keys from DRAM: {error}") from error
        self._idle.clear()
        self._jobs.put(lambda: self._send_rest(num_sent, send, launched))

    def finish(self) -> None:
        """Wait until all copies of the step are launched.

        Raises:
            LaneError: one could not be, or not in time; the step runs out all the same, what it gives is worthless.
        """
        if not self._idle.wait(WAIT_LIMIT_S):
            # What waits for the device (memory that is unpinned, say) may hold the thread: it must not wait for us.
            self._host_flags[0, :, 0] = 1
            raise LaneError(f"the stream lane launched no copies within {WAIT_LIMIT_S:.0f} s")
        if self._error is not None:
            raise LaneError(f"the stream lane could not bring keys from DRAM: {self._error}") from self._error

    def mark_launched(self) -> None:
        """Say that a whole step has been launched."""
        self._fence.mark()

    def describe(self) -> str:
        """How far the words of the last step are, for people."""
        arrived, used = (int((flags != 0).sum()) for flags in self._host_flags[:, :, 0])
        return f"of {self._flags.shape[1]} layers the streamed keys of {arrived} have arrived, {used} were used"

    def release(self) -> None:
        """End all waits of a step that breaks off: what was not launched will never use or free a buffer."""
        self._host_flags[:, :, 0] = 1

    @contextmanager
    def inline(self, runs: Sequence[BlockRun]) -> Iterator[None]:
        """Launch a step whose copies stand in its own stream.

        Raises:
            CopyError: a copy cannot be launched.
        """
        self._inline = self._find_way(runs) if runs else _copy_nothing
        try:
            yield
        finally:
            self._inline = None

    def layer(self, layer_idx: int) -> tuple[Tensor, ...]:
        """K, V and of integers their scales of a layer's blocks, each [Hkv, num_blocks, …] in the pool's order."""
        return self._buffers[layer_idx % STEP_BUFFERS]

    def wait(self, layer_idx: int) -> None:
        """Launch: wait until a layer's blocks have arrived."""
        if self._inline is not None:
            self._inline(layer_idx)
            return
        with naming(f"the stream lane, keys in DRAM, layer {layer_idx}"):
            self._words.wait(self._arrived[layer_idx])

    def free(self, layer_idx: int) -> None:
        """Launch: what was launched so far is the last use of a layer's blocks."""
        if self._inline is None:
            self._words.write(self._used[layer_idx])

    def _send_layers(self, layers: range, send: Callable[[int], None]) -> None:
        """Launch the copies of some layers."""
        with self._copies.active():
            try:
                for layer_idx in layers:
                    if layer_idx >= STEP_BUFFERS:
                        self._copy_words.wait(self._used[layer_idx - STEP_BUFFERS])
                    send(layer_idx)
                    self._copy_words.write(self._arrived[layer_idx])
            finally:
                if self._device.type == "cuda":
                    self._last_copies = torch.cuda.current_stream(self._device).record_event()

    def _send_rest(self, first: int, send: Callable[[int], None], launched: threading.Event | None) -> None:
        """In the thread: launch the copies of the layers from `first` on."""
        layers = range(len(self._pool.k))
        try:
            self._send_layers(layers[first:STEP_BUFFERS], send)
            if launched is not None:
                launched.wait(LONG_LAUNCH_S)
            self._send_layers(layers[STEP_BUFFERS:], send)
        except Exception as error:  # handed to the caller of `finish`: else the accelerator would wait for ever
            self._error = error
            self._host_flags[0, :, 0] = 1  # what was not sent will never arrive: the step runs out
        finally:
            self._idle.set()

    def _find_way(self, runs: Sequence[BlockRun]) -> Callable[[int], None]:
        """How the runs of a layer come into its buffer, in the current stream."""
        num_blocks = sum(run.num for run in runs)
        mean_bytes = self._pool.k[0, :, 0].nbytes * num_blocks / len(runs)
        if mean_bytes < LEAST_COPY_BYTES and self._pool.is_within_reach(self._device):
            ids = torch.cat([torch.arange(run.first, run.first + run.num) for run in runs])
            with self._copies.active():
                there = ids.to(self._device)  # waits until they are there
            return lambda layer_idx: self._fetch(layer_idx, there)
        return partial(self._launch_copies if self._device.type == "cuda" else self._copy, runs)

    def _launch_copies(self, runs: Sequence[BlockRun], layer_idx: int) -> None:
        """On a GPU, by its copy engine."""
        # To ask for the current stream takes longer than to launch a copy.
        handle = self._copies.handle if self._inline is None else torch.cuda.current_stream(self._device).cuda_stream
        stream = ctypes.c_void_p(handle)
        for copies in self._run_copies[layer_idx]:
            for run in runs:
                copies.launch(stream, first=run.first, place=run.place, num=run.num)

    def _copy(self, runs: Sequence[BlockRun], layer_idx: int) -> None:
        """Without one, at once."""
        for source, to in zip(self._pool.layer_tensors(layer_idx), self.layer(layer_idx), strict=True):
            for run in runs:
                to[:, run.place : run.place + run.num] = source[:, run.first : run.first + run.num]

    def _fetch(self, layer_idx: int, ids: Tensor) -> None:
        """By threads of the GPU: blocks [n], in their order."""
        for source, to in zip(self._pool.layer_tensors(layer_idx), self.layer(layer_idx), strict=True):
            tiles.fetch_blocks(_records(source), ids, _records(to[:, : len(ids)]))

    def _await_copies(self) -> None:
        end = time.monotonic() + WAIT_LIMIT_S
        if not self._idle.wait(WAIT_LIMIT_S):  # its copies would count as those of the next step
            raise LaneError(f"the last step's copies were not launched within {WAIT_LIMIT_S:.0f} s")
        while self._last_copies is not None and not self._last_copies.query():  # type: ignore[no-untyped-call]  # torch has no types here
            if time.monotonic() > end:
                raise LaneError(f"the copies of the last step did not end within {WAIT_LIMIT_S:.0f} s")
        self._last_copies = None


def _records(part: Tensor) -> Tensor:
    """A tensor of blocks [Hkv, N, …] with four axes: scales of int8 have three. A view."""
    return part.reshape(*part.shape[:3], -1)


def _copy_nothing(_layer_idx: int) -> None:
    """The way of no blocks."""


def _work(jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # it refers to its owner, which could else not be given up

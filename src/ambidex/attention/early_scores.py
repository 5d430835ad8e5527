"""`EarlyScores`: scores of far keys, computed by the CPU where the keys lie, a layer ahead of the accelerator.

    accelerator   layer i: q̂ of layer i + 1 ──▶ pinned … attention and MLP of layer i …   layer i + 1: takes the scores
    CPU           waits for q̂ ─▶ q̂·k of all far keys ─▶ pinned scores ─────────────────▶

A native thread waits for q̂, and the engine's CPU threads score. Buffers are taken in turns of two, layer by layer:
those of layer i are free again when q̂ of layer i + 2 is asked for, since what the accelerator reads of them was
launched before.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.core.errors import InternalError, LaneError
from ambidex.core.kv_spec import SCORE_BUFFERS
from ambidex.kernels.cpu.native import WORD_STRIDE, ThreadPool
from ambidex.kernels.cpu.score_rows import KeyRows, ScorePool, ScoreThread
from ambidex.kernels.cuda.pinned_view import view_on_gpu
from ambidex.storage.host_memory import HOST_MEMORY, HostMemory
from ambidex.storage.slow_tier import wait_until
from ambidex.storage.words import WAIT_LIMIT_S, StreamWords

Pace = Callable[[float, float], float]
"""When keys that were read from one time to another would have been read from the memory that is emulated."""


@dataclass(slots=True)
class _Turn:
    """What a layer's question is made of until the answer has been read."""

    scores: Tensor
    q: Tensor
    q_there: Tensor
    """The queries in host memory, and the same memory as the accelerator writes it."""


@dataclass(frozen=True, slots=True)
class _Pending:
    number: int
    sizes: list[int]
    pace: Pace | None


class EarlyScores:
    """Answers one question a layer.

    Args:
        shape: Hkv, query heads of each, D.
        dtype: of the keys, in which scores leave the CPU, too.
        device: the accelerator.
        threads: who scores.
        max_keys: of all rows of a step together; 0: nothing is ever asked for.
        memory: who is asked to pin the buffers of scores.

    Attributes:
        scores: what the CPU scores into, [buffers, n] in host memory; `scores_there`: the same as the accelerator sees
            it, if `pin_refusal` is None.
        pin_refusal: why they are not pinned, on a GPU; scores then come to it more slowly.
        cpu_s: seconds of scoring since `begin`; `wait_s` those for which `wait` did.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        threads: ThreadPool,
        max_keys: int,
        memory: HostMemory = HOST_MEMORY,
    ) -> None:
        self._num_heads = shape[0] * shape[1]
        self._shape = shape
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._thread = ScoreThread(ScorePool(threads), limit_s=WAIT_LIMIT_S) if max_keys else None
        self._pending: dict[int, _Pending] = {}
        self.scores = self.scores_there = torch.empty(SCORE_BUFFERS, self._num_heads * max_keys, dtype=dtype)
        self._turns = [_Turn(part, torch.empty(0), torch.empty(0)) for part in self.scores]
        self._stream_words = StreamWords()
        self._words = torch.zeros(SCORE_BUFFERS, WORD_STRIDE, dtype=torch.int32, pin_memory=self._is_cuda)
        self._host_words = self._words.numpy()  # the same memory
        is_pinned = self._is_cuda and max_keys > 0
        self.pin_refusal = memory.pin(self.scores, self) if is_pinned else None
        if is_pinned and self.pin_refusal is None:
            self.scores_there = view_on_gpu(self.scores)
        self.cpu_s = self.wait_s = 0.0

    def begin(self) -> None:
        """Start anew with a step; what a broken one has left is waited for."""
        for pending in self._pending.values():
            self.thread.wait(pending.number)
        self._pending.clear()
        self.cpu_s = self.wait_s = 0.0

    def ask(
        self,
        layer_idx: int,
        q: Tensor,
        keys: Sequence[KeyRows],
        num_keys: Sequence[int],
        scale: float,
        pace: Pace | None = None,
    ) -> None:
        """Have a layer's scores computed.

        Args:
            q: [B, Hq, D] on the accelerator, rotated.
            keys: of each row in host memory; `num_keys`: how many of them are far. Those must not change.
            pace: see `Pace`; None: nothing is emulated.
        Cost: one launch and a word of the stream; waits for nothing.
        """
        place = layer_idx % SCORE_BUFFERS
        turn = self._turns[place]
        if turn.q.shape != q.shape or turn.q.dtype != q.dtype:
            turn.q = torch.empty(q.shape, dtype=q.dtype, pin_memory=self._is_cuda)
            turn.q_there = view_on_gpu(turn.q) if self._is_cuda else turn.q
        sizes = [self._num_heads * num for num in num_keys]
        if sum(sizes) > turn.scores.numel():
            raise InternalError(f"a step has {sum(sizes)} early scores: there is room for {turn.scores.numel()}")
        self._host_words[place, 0] = 0
        if self._is_cuda:
            torch.add(q, 0, out=turn.q_there)  # a kernel: a job for the copy engine takes longer
            self._stream_words.write(self._words[place, :1])
        else:
            turn.q.copy_(q)
        number = self.thread.ask(
            turn.q, keys, num_keys, turn.scores, scale=scale, word=self._host_words[place] if self._is_cuda else None
        )
        self._pending[layer_idx] = _Pending(number, sizes, pace)

    def wait(self, layer_idx: int) -> list[Tensor]:
        """Wait for the scores of a layer that was asked for: of each row [Hkv, G, n] in host memory, until two layers
        later.

        Raises:
            LaneError: the accelerator did not send the queries in time.
        """
        start = time.perf_counter()
        pending = self._pending.pop(layer_idx)
        scored = self.thread.wait(pending.number)
        if not scored.is_answered:
            raise LaneError(
                f"the accelerator sent no early queries of layer {layer_idx} to the CPU within {WAIT_LIMIT_S:.0f} s"
            )
        end_s = scored.end_s
        if pending.pace is not None:
            end_s = max(end_s, pending.pace(scored.begin_s, end_s))
            wait_until(end_s)
        self.cpu_s += end_s - scored.begin_s
        scores = self._turns[layer_idx % SCORE_BUFFERS].scores
        found, place = [], 0
        for size in pending.sizes:
            found.append(scores[place : place + size].view(self._shape[0], self._shape[1], size // self._num_heads))
            place += size
        self.wait_s += time.perf_counter() - start
        return found

    def bring(self, scores: Tensor) -> Tensor:
        """Launch: bring those of one row to the accelerator, in the numbers in which they left the CPU."""
        return scores.to(self._device, non_blocking=self._is_cuda)

    def set_num_threads(self, num_threads: int) -> None:
        """Score with threads of its own from now on, if anything is scored; no question is open."""
        if self._thread is not None:
            self._thread = ScoreThread(ScorePool(ThreadPool(num_threads)), limit_s=WAIT_LIMIT_S)

    def close(self) -> None:
        """End the thread, once what it was asked for has its answer; nothing can be asked for any more."""
        self._thread = None

    @property
    def thread(self) -> ScoreThread:
        """Who scores."""
        if self._thread is None:
            raise InternalError("early scores were asked for of a policy without, or after the engine was closed")
        return self._thread

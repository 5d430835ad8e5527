"""`EarlyScores`: scores of far keys, computed by the CPU where the keys lie, a layer ahead of the accelerator.

    accelerator   layer i: q̂ of layer i + 1 ──▶ pinned … attention and MLP of layer i …   layer i + 1: takes the scores
    CPU           waits for q̂ ─▶ q̂·k of all far keys ─▶ pinned scores ─────────────────▶

One thread hands the products to torch's. Buffers are taken in turns of two, layer by layer: those of layer i are free
again when q̂ of layer i + 2 is asked for, since what the accelerator reads of them was launched before.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from ambidex.core.errors import InternalError
from ambidex.core.kv_spec import SCORE_BUFFERS
from ambidex.storage.host_memory import HOST_MEMORY, HostMemory


class EarlyScores:
    """Answers one question a layer.

    Args:
        shape: Hkv, query heads of each, D.
        dtype: of the keys, in which scores leave the CPU, too.
        device: the accelerator.
        max_keys: of all rows of a step together.
        memory: who is asked to pin the buffers of scores.

    Attributes:
        pin_refusal: why they are not pinned, on a GPU; scores then come to it more slowly.
        cpu_s: seconds of products since `begin`; `wait_s` those for which `wait` did.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_keys: int,
        memory: HostMemory = HOST_MEMORY,
    ) -> None:
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ambidex-early-scores")
        self._pending: dict[int, Future[list[Tensor]]] = {}
        self._queries: list[Tensor] = [torch.empty(0)] * SCORE_BUFFERS
        self._scores = torch.empty(SCORE_BUFFERS, shape[0] * shape[1] * max_keys, dtype=dtype)
        self.pin_refusal = memory.pin(self._scores, self) if self._is_cuda else None
        self.cpu_s = self.wait_s = 0.0

    def begin(self) -> None:
        """Start anew with a step; what a broken one has left is waited for."""
        for pending in self._pending.values():
            pending.exception()
        self._pending.clear()
        self.cpu_s = self.wait_s = 0.0

    def ask(
        self,
        layer_idx: int,
        q: Tensor,
        keys: Sequence[Tensor],
        scale: float,
        reading: AbstractContextManager[None] | None = None,
    ) -> None:
        """Have a layer's scores computed.

        Args:
            q: [B, Hq, D] on the accelerator, rotated.
            keys: of each row's far keys, [Hkv, n, D] in host memory; those that change must not be among them.
            reading: within which they are read.
        Cost: one copy and an event; waits for nothing.
        """
        turn = layer_idx % SCORE_BUFFERS
        if self._queries[turn].shape != q.shape:
            self._queries[turn] = torch.empty(q.shape, dtype=self._dtype, pin_memory=self._is_cuda)
        queries = self._queries[turn]
        queries.copy_((q * scale).to(self._dtype), non_blocking=self._is_cuda)
        arrived = torch.cuda.current_stream(self._device).record_event() if self._is_cuda else None
        buffers = self._buffers(turn, keys)
        self._pending[layer_idx] = self._thread.submit(
            self._answer, queries, arrived, list(keys), buffers, reading or nullcontext()
        )

    def wait(self, layer_idx: int) -> list[Tensor]:
        """Wait for the scores of a layer that was asked for: of each row [Hkv, G, n] in host memory, until two layers
        later."""
        start = time.perf_counter()
        found = self._pending.pop(layer_idx).result()
        self.wait_s += time.perf_counter() - start
        return found

    def bring(self, scores: Tensor) -> Tensor:
        """Launch: bring those of one row to the accelerator, fp32."""
        return scores.to(self._device, non_blocking=self._is_cuda).float()

    def set_num_threads(self, num_threads: int) -> None:
        """How many threads torch computes with in the thread that answers: it has a number of its own."""
        self._thread.submit(torch.set_num_threads, num_threads).result()

    def close(self) -> None:
        """End the thread, once what it was asked for has its answer; nothing can be asked for any more."""
        self._thread.shutdown()

    def _buffers(self, turn: int, keys: Sequence[Tensor]) -> list[Tensor]:
        """Where the scores of each row go, [Hkv, G, n]."""
        num_heads, group_size, _ = self._shape
        sizes = [num_heads * group_size * key.shape[1] for key in keys]
        held = self._scores[turn]
        if sum(sizes) > held.numel():
            raise InternalError(f"a step has {sum(sizes)} early scores: there is room for {held.numel()}")
        parts = torch.split(held[: sum(sizes)], sizes)
        return [part.view(num_heads, group_size, key.shape[1]) for part, key in zip(parts, keys, strict=True)]

    @torch.inference_mode()
    def _answer(
        self,
        queries: Tensor,
        arrived: torch.cuda.Event | None,
        keys: Sequence[Tensor],
        buffers: list[Tensor],
        reading: AbstractContextManager[None],
    ) -> list[Tensor]:
        if arrived is not None:
            arrived.synchronize()
        start = time.perf_counter()
        with reading:
            for q, key, scores in zip(queries, keys, buffers, strict=True):
                if key.shape[1]:
                    torch.bmm(q.view(self._shape), key.transpose(1, 2), out=scores)
        self.cpu_s += time.perf_counter() - start
        return buffers

"""`FixedScores`: how a step that the accelerator runs on its own meets the CPU, which scores a layer ahead of it.

    accelerator   layer i: q̂ of layer i + 1 ─▶ pinned  asked[i + 1] = 1   …   layer i + 1: waits for answered[i + 1]
    native thread          waits for asked[i + 1] ─▶ q̂·k of all far keys ─▶ pinned scores
    the step's thread      waits for the native one ─▶ answered[i + 1] = 1, asks it for layer i + 3

Queries and scores have two buffers each, taken in turns layer by layer: the accelerator sends the queries of layer
i + 2 only after it has read the scores of layer i. Words are one a layer, and 0 again at the begin of a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ambidex.attention.early_scores import EarlyScores
from ambidex.core.errors import LaneError
from ambidex.core.kv_spec import SCORE_BUFFERS
from ambidex.core.model_spec import ModelSpec
from ambidex.kernels.cpu.native import WORD_STRIDE
from ambidex.kernels.cuda.pinned_view import view_on_gpu
from ambidex.storage.host_rows import HostRows
from ambidex.storage.lane_clock import LaneClock
from ambidex.storage.words import WAIT_LIMIT_S, HostWords, KernelWords, StepFence, TimedWords, Words, naming


@dataclass(frozen=True, slots=True)
class FarRows:
    """Rows in host memory of a step's requests, and how many of them are far; first layer that looks ahead, and whether
    the CPU scores these rows."""

    rows: Sequence[HostRows]
    num_far: Sequence[int]
    first_layer: int
    is_scored: bool


_NO_ROWS: Final = FarRows((), (), 0, is_scored=False)


class FixedScores:
    """Buffers and words for steps of B rows.

    Args:
        early: the thread that scores, and what it scores into, which the accelerator must be able to read.
        spec: heads, layers and head_dim (the scale is head_dim ** -0.5).
        num_rows: B.
        max_far: far keys of a step, at most.
        dtype: of queries.
        device: the accelerator; with CUDA the buffers are pinned.
        clock: is told for how long the accelerator waits; None: nobody is.
    """

    def __init__(
        self,
        early: EarlyScores,
        spec: ModelSpec,
        num_rows: int,
        *,
        max_far: int,
        dtype: torch.dtype,
        device: torch.device,
        clock: LaneClock | None = None,
    ) -> None:
        is_cuda = device.type == "cuda"
        self._early = early
        self._num_scores = spec.num_q_heads * max_far
        self._num_layers = spec.num_layers
        self._scale = spec.head_dim**-0.5
        shape = (SCORE_BUFFERS, num_rows, spec.num_q_heads, spec.head_dim)
        self._q = torch.empty(shape, dtype=dtype, pin_memory=is_cuda)
        self._q_there = view_on_gpu(self._q) if is_cuda else self._q
        # [asked, answered, L, words of a cache line]
        self._flags = torch.zeros(2, spec.num_layers, WORD_STRIDE, dtype=torch.int32, pin_memory=is_cuda)
        self._host_flags = self._flags.numpy()  # the same memory
        self._words: Words = KernelWords() if is_cuda else HostWords()
        if clock is not None:
            self._words = TimedWords(self._words, clock)
        self._fence = StepFence(is_cuda=is_cuda)
        self._far = _NO_ROWS
        self._asked: dict[int, int] = {}
        self.cpu_s = 0.0
        """Seconds of scoring since `reset`."""

    def send(self, layer_idx: int, q: Tensor) -> None:
        """Launch: bring rotated early queries [B, Hq, D] of a layer to the CPU."""
        torch.add(q, 0, out=self._q_there[layer_idx % SCORE_BUFFERS])  # a kernel, as in `EarlyScores`
        self._words.write(self._flags[0, layer_idx, :1])

    def receive(self, layer_idx: int) -> Tensor:
        """Launch: wait for the scores of a layer; they are read over the link, and valid until those of two layers
        later are asked for."""
        with naming(f"the CPU, scores of far keys, layer {layer_idx}"):
            self._words.wait(self._flags[1, layer_idx, :1])
        return self._early.scores_there[layer_idx % SCORE_BUFFERS, : self._num_scores]

    def reset(self) -> None:
        """Make ready for a step.

        Raises:
            LaneError: the accelerator has not come to the end of the last step in time.
        """
        self._fence.wait(WAIT_LIMIT_S, self.describe)
        self.drain()
        self._host_flags[:] = 0
        self.cpu_s = 0.0

    def begin(self, far: FarRows) -> None:
        """Ask for the first layers of a step; the keys must stay as they are until the last answer."""
        self._far = far
        for layer_idx in range(far.first_layer, min(far.first_layer + SCORE_BUFFERS, self._num_layers)):
            self._ask(layer_idx)

    def answer(self, layer_idx: int) -> None:
        """Wait for the scores of a layer and tell the accelerator; then ask for a later one.

        Raises:
            LaneError: the early queries did not come in time.
        """
        scored = self._early.thread.wait(self._asked.pop(layer_idx))
        if not scored.is_answered:
            raise LaneError(
                f"the accelerator sent no early queries of layer {layer_idx} to the CPU within {WAIT_LIMIT_S:.0f} s"
            )
        self._host_flags[1, layer_idx, 0] = 1
        self.cpu_s += scored.end_s - scored.begin_s
        if layer_idx + SCORE_BUFFERS < self._num_layers:
            self._ask(layer_idx + SCORE_BUFFERS)

    def _ask(self, layer_idx: int) -> None:
        place = layer_idx % SCORE_BUFFERS
        self._asked[layer_idx] = self._early.thread.ask(
            self._q[place, : len(self._far.rows)],
            [rows.keys[layer_idx] for rows in self._far.rows],
            self._far.num_far,
            self._early.scores[place],
            scale=self._scale,
            word=self._host_flags[0, layer_idx],
        )

    def drain(self) -> None:
        """Wait for the answers that a step which broke off has left open: rows are nobody's before that. Its waits have
        been ended, so it takes no longer than they."""
        while self._asked:
            self._early.thread.wait(self._asked.popitem()[1])
        self._far = _NO_ROWS

    def release(self) -> None:
        """End all waits: what was not launched will never ask, and what is not answered gives something worthless."""
        self._host_flags[:, :, 0] = 1

    def settle(self) -> None:
        """Wait for the end of a step whose waits were ended.

        Raises:
            LaneError: the accelerator has not come to it in time.
        """
        self.drain()
        self._fence.wait(WAIT_LIMIT_S, self.describe)

    def mark_launched(self) -> None:
        """Say that a whole step has been launched."""
        self._fence.mark()

    def describe(self) -> str:
        """How far the words of the last step are, for people."""
        asked, answered = (int((flags != 0).sum()) for flags in self._host_flags[:, :, 0])
        return f"of {self._num_layers} layers {asked} were asked for scores of far keys, {answered} answered"

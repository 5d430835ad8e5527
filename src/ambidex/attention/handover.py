"""`Handover`: how a step that the accelerator runs on its own meets the CPU lane, layer after layer.

    accelerator    q ────────▶ pinned   asked[i] = 1       … attends over its own keys …    wait for answered[i]   merge
    CPU                                 wait for asked[i]  attend in DRAM   answered[i] = 1

The same buffers serve every layer: the accelerator sends the next queries only after it has read the last answer.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ambidex.attention.bounded_scan import BoundedScan
from ambidex.attention.state import AttentionState
from ambidex.core.errors import LaneError
from ambidex.core.ids import Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.kernels.cpu.bounded import make_arrays
from ambidex.kernels.cpu.native import WORD_STRIDE, AttentionScript, KeyBatch
from ambidex.kernels.cuda.pinned_view import view_on_gpu
from ambidex.kernels.reference.scanned import NUM_LANE_FIGURES
from ambidex.storage.lane_clock import LaneClock
from ambidex.storage.lane_thread import beside
from ambidex.storage.tiled_pool import TiledKVPool
from ambidex.storage.words import WAIT_LIMIT_S, HostWords, KernelWords, StepFence, TimedWords, Words, naming


class Handover:
    """Buffers, words and the CPU lane's script for steps of B rows.

    Args:
        spec: heads, layers and head_dim (the scale is head_dim ** -0.5).
        pool: the DRAM pool.
        num_rows: B.
        dtype: of queries.
        device: the accelerator; with CUDA the buffers are pinned.
        bounded: the bounded policy; None: the CPU lane attends all its keys.
        clock: is told how long both sides work; None: nobody is.
    """

    def __init__(
        self,
        spec: ModelSpec,
        pool: TiledKVPool,
        num_rows: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        bounded: BoundedScan | None = None,
        clock: LaneClock | None = None,
    ) -> None:
        is_cuda = device.type == "cuda"
        self._clock = clock
        heads = (num_rows, spec.num_q_heads, spec.head_dim)
        self._words: Words = KernelWords() if is_cuda else HostWords()
        if clock is not None:
            self._words = TimedWords(self._words, clock)
        self._q = torch.empty(heads, dtype=dtype, pin_memory=is_cuda)
        self._out = torch.empty(heads, dtype=torch.float32, pin_memory=is_cuda)
        self._lse = torch.empty(heads[:2], dtype=torch.float32, pin_memory=is_cuda)
        # The same memory as the accelerator sees it: its kernels read and write it over the link, without copies.
        self._q_there, self._out_there, self._lse_there = (
            view_on_gpu(buffer) if is_cuda else buffer for buffer in (self._q, self._out, self._lse)
        )
        # [asked, answered or streamed, L, words of a cache line]
        self._flags = torch.zeros(3, spec.num_layers, WORD_STRIDE, dtype=torch.int32, pin_memory=is_cuda)
        self._host_flags = self._flags.numpy()  # the same memory
        self._num_last = 0
        self._is_bounded = bounded is not None
        self.figures = self.out_norms = self.lane_figures = torch.empty(0)
        """What the bounded op left out of the last step, [L, B, Hq, NUM_FIGURES]; lengths of answers, [L, B, Hq]; what
        the scan lane left out, [L, B, Hq, NUM_LANE_FIGURES]."""
        self._scanned: Sequence[KeyBatch] = ()
        self._fence = StepFence(is_cuda=is_cuda)
        self._script = AttentionScript(pool.native, *self._flags)
        self._layers = [
            AttentionScript(pool.native, *self._flags[:, layer_idx : layer_idx + 1])
            for layer_idx in range(spec.num_layers)
        ]
        for layer_idx, script in enumerate(self._layers):
            k, v = pool.layer(layer_idx)
            k_scales, v_scales = pool.scales(layer_idx)
            for target in (self._script, script):
                target.add_layer(
                    self._q, k, v, scale=spec.head_dim**-0.5, k_scales=k_scales, v_scales=v_scales, out=self._out,
                    lse=self._lse,
                )  # fmt: skip
            if bounded is not None:
                self._bound_layer(layer_idx, bounded, is_cuda=is_cuda)

    def _bound_layer(self, layer_idx: int, bounded: BoundedScan, *, is_cuda: bool) -> None:
        """Add the keys that are scanned; what the accelerator saw of its own is known once `show_near` has run."""
        if layer_idx == 0:
            self.figures = bounded.new_figures(len(self._q))
            self._near_lse = torch.empty(self._lse.shape, pin_memory=is_cuda)
            self.out_norms = torch.zeros(bounded.spec.num_layers, *self._lse.shape, pin_memory=is_cuda)
            self.lane_figures = torch.zeros(*self.out_norms.shape, NUM_LANE_FIGURES, pin_memory=is_cuda)
            # [L, words of a cache line]: whether the CPU lane had answered when the accelerator's own part ended.
            self._seen = torch.ones(bounded.spec.num_layers, WORD_STRIDE, dtype=torch.int32, pin_memory=is_cuda)
            self._host_seen = self._seen.numpy()  # the same memory
            self._near_lse_there, self._out_norms_there, self._lane_figures_there = (
                view_on_gpu(part) if is_cuda else part for part in (self._near_lse, self.out_norms, self.lane_figures)
            )
            self._seen_there, self._flags_there = (
                view_on_gpu(part) if is_cuda else part for part in (self._seen, self._flags)
            )
        layer = bounded.copies[Tier.DRAM].layer(layer_idx)
        arrays = make_arrays(
            self._q, layer, scale=bounded.spec.head_dim**-0.5, max_mass=bounded.max_mass, near=(self._out, self._lse),
            out=self._out, lse=self._lse, figures=self.figures[layer_idx], other_lse=self._near_lse,
        )  # fmt: skip
        for script in (self._script, self._layers[layer_idx]):
            script.bound_layer(bounded.native.native, arrays, layer, self.figures, self._near_lse, bounded)

    def scan(self, batches: Sequence[KeyBatch]) -> None:
        """Name the keys of each layer that the bounded op reads in the next steps."""
        self._scanned = batches

    @property
    def num_last(self) -> int:
        """Layers of the last step in which the CPU lane's answer came after the accelerator's own part had ended."""
        return int((self._host_seen[:, 0] == 0).sum()) if self._is_bounded else self._num_last

    def show_near(self, layer_idx: int, lse: Tensor, part: Tensor | None) -> None:
        """Launch: tell the bounded op how much of the softmax the accelerator's own keys hold, [B, Hq] fp32.

        Args:
            part: [B] fp32, log of the part of it that counts in what the CPU lane may leave out; None: all of it.
        """
        torch.add(lse, 0 if part is None else part[:, None], out=self._near_lse_there)
        self.mark_streamed(layer_idx)

    def note_end(self, layer_idx: int) -> None:
        """Launch: note whether the CPU lane has answered, now that the accelerator has ended its own part."""
        torch.add(self._flags_there[1, layer_idx, :1], 0, out=self._seen_there[layer_idx, :1])

    def show_answers(self, outs: Sequence[Tensor], lane_figures: Sequence[Tensor]) -> None:
        """Launch: keep how long the whole answers [B, Hq, D] of the layers are: errors are measured by it.

        Args:
            lane_figures: of the scan lane, [B, Hq, NUM_LANE_FIGURES] of each layer; empty: it has no part in the step.
        """
        self._out_norms_there.copy_(torch.stack(list(outs)).float().norm(dim=-1))
        if lane_figures:
            self._lane_figures_there.copy_(torch.stack(list(lane_figures)))

    def send(self, layer_idx: int, q: Tensor) -> None:
        """Launch: bring rotated queries [B, Hq, D] to the CPU lane."""
        torch.add(q, 0, out=self._q_there)  # a kernel; copy_ would be a job for the copy engine, which is slower
        self._words.write(self._flags[0, layer_idx, :1])

    def mark_streamed(self, layer_idx: int) -> None:
        """Launch: say that the accelerator has ended its own part of a layer's attention."""
        self._words.write(self._flags[2, layer_idx, :1])

    def receive(self, layer_idx: int) -> AttentionState:
        """Launch: wait for the CPU lane's answer. It is read over the link, and valid until the next layer's."""
        with naming(f"the CPU lane, keys in DRAM, layer {layer_idx}"):
            self._words.wait(self._flags[1, layer_idx, :1])
        return AttentionState(self._out_there, self._lse_there)

    def reset(self) -> None:
        """Make ready for a step.

        Raises:
            LaneError: the accelerator has not come to the end of the last step in time.
        """
        self._fence.wait(WAIT_LIMIT_S, self.describe)
        self._host_flags[:] = 0
        if self._is_bounded:
            self._host_seen[:] = 1

    def describe(self) -> str:
        """How far the words of the last step are, for people."""
        asked, answered = (int((flags != 0).sum()) for flags in self._host_flags[:2, :, 0])
        return f"of {self._flags.shape[1]} layers with keys in DRAM {asked} were asked, {answered} answered"

    def mark_launched(self) -> None:
        """Say that a whole step has been launched."""
        self._fence.mark()

    def answer(self, batches: Sequence[KeyBatch]) -> None:
        """Do the CPU lane's part of a step that was launched, in the calling thread.

        Args:
            batches: the keys of each layer in the DRAM pool.
        Raises:
            LaneError: the queries of a layer did not come in time. The accelerator's waits are ended all the same, so
                the step runs out; what it gives is worthless.
        """
        num_layers = self._flags.shape[1]
        num_answered = 0
        try:
            num_answered, self._num_last = self._script.run(batches, limit_s=WAIT_LIMIT_S, scanned=self._scanned)
            if self._clock is not None:
                self._clock.add_cpu(self._script.busy_s)
        finally:
            if num_answered < num_layers:
                self._host_flags[1, :, 0] = 1
        if num_answered < num_layers:
            raise LaneError(
                f"the accelerator sent no queries of layer {num_answered} to the CPU lane within {WAIT_LIMIT_S:.0f} s"
            )

    def answer_layer(self, layer_idx: int, batch: KeyBatch) -> None:
        """Do the CPU lane's part of one layer: between them the caller does other things. `num_last` stays as it was.

        Raises:
            LaneError: the queries did not come in time.
        """
        start = self._wait_asked(layer_idx) if self._clock is not None else 0.0
        num_answered, _ = self._layers[layer_idx].run(
            [batch], limit_s=WAIT_LIMIT_S, scanned=self._scanned[layer_idx : layer_idx + 1]
        )
        if num_answered < 1:
            raise LaneError(
                f"the accelerator sent no queries of layer {layer_idx} to the CPU lane within {WAIT_LIMIT_S:.0f} s"
            )
        if self._clock is not None:
            self._clock.add_cpu(time.perf_counter() - start)

    def _wait_asked(self, layer_idx: int) -> float:
        """When the queries of a layer came, in `time.perf_counter` seconds; or when it was time to give up."""
        word, end = self._host_flags[0, layer_idx], time.perf_counter() + WAIT_LIMIT_S
        while not word[0] and time.perf_counter() < end:
            time.sleep(0)
        return time.perf_counter()

    def release(self) -> None:
        """End all waits: what was not launched will never ask, and what is not answered gives something worthless."""
        self._host_flags[:, :, 0] = 1

    def answer_alone(self, batches: Sequence[KeyBatch]) -> None:
        """Do the CPU lane's part with the queries that are there; nothing else may be under way."""
        self.reset()
        self._host_flags[::2, :, 0] = 1  # asked, and what the accelerator saw of its own is known
        self.answer(batches)

    def answering(self, batches: Sequence[KeyBatch]) -> AbstractContextManager[None]:
        """Do the CPU lane's part in a thread of its own while the caller launches the step.

        Raises:
            LaneError: see `answer`.
        """
        return beside(lambda: self.answer(batches), release=self.release, mark_launched=self.mark_launched)

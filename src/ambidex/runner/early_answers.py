"""`EarlyAnswers`: what the CPU does in a step of fixed form with early queries, in the order in which it is asked."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from ambidex.attention.fixed_scores import FarRows, FixedScores
from ambidex.attention.handover import Handover
from ambidex.kernels.cpu.native import KeyBatch
from ambidex.storage.lane_thread import beside


class EarlyAnswers:
    """The CPU's part of a step: attention over keys in DRAM in the layers that attend all, and scores in the others, if
    keys are chosen by them.

    Args:
        scores: of far keys.
        keys: attention over keys in DRAM; None: there are none.
        num_layers: of the model.
    """

    def __init__(self, scores: FixedScores, keys: Handover | None, num_layers: int) -> None:
        self.scores = scores
        self.keys = keys
        self._num_layers = num_layers

    def reset(self) -> None:
        """Make ready for a step.

        Raises:
            LaneError: the accelerator has not come to the end of the last step in time.
        """
        self.scores.reset()
        if self.keys is not None:
            self.keys.reset()

    def mark_launched(self) -> None:
        """Say that a whole step has been launched."""
        self.scores.mark_launched()
        if self.keys is not None:
            self.keys.mark_launched()

    @torch.inference_mode()
    def answer(self, far: FarRows, batches: Sequence[KeyBatch] | None) -> None:
        """Do the CPU's part of a step that was launched, in the calling thread and that which scores.

        Args:
            far: keys that are scored, or not.
            batches: the keys of each layer in the DRAM pool; None: there are none.
        Raises:
            LaneError: the accelerator did not ask in time. Its waits are ended all the same, so the step runs out; what
                it gives is worthless.
        """
        is_done = False
        try:
            if far.is_scored:
                self.scores.begin(far)
            for layer_idx in range(self._num_layers if far.is_scored else far.first_layer):
                if layer_idx >= far.first_layer:
                    self.scores.answer(layer_idx)
                elif self.keys is not None and batches is not None:
                    self.keys.answer_layer(layer_idx, batches[layer_idx])
            is_done = True
        finally:
            if not is_done:
                self.release()
                self.scores.drain()

    def describe(self) -> str:
        """How far both sides are, for people."""
        return "; ".join(part.describe() for part in (self.keys, self.scores) if part is not None)

    def release(self) -> None:
        """End all waits of both sides."""
        self.scores.release()
        if self.keys is not None:
            self.keys.release()

    def settle(self) -> None:
        """Wait for the end of a step whose waits were ended.

        Raises:
            LaneError: the accelerator has not come to it in time.
        """
        self.scores.settle()

    def answering(self, far: FarRows, batches: Sequence[KeyBatch] | None) -> AbstractContextManager[None]:
        """Do the CPU's part in a thread of its own while the caller launches the step.

        Raises:
            LaneError: see `answer`.
        """
        return beside(lambda: self.answer(far, batches), release=self.release, mark_launched=self.mark_launched)

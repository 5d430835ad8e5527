"""`HostAnswers`: all that the CPU does in a step that the accelerator runs on its own, in the order in which it asks.

In each layer: rows of the projections before attention, keys in DRAM, rows behind attention and of the MLP; at last
rows of the last projection. Where nothing but keys lies in DRAM, one native call answers all layers.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from ambidex.attention.handover import Handover
from ambidex.kernels.cpu.native import KeyBatch
from ambidex.mlp.handover import WeightHandover
from ambidex.mlp.split_site import HostPlace
from ambidex.storage.lane_thread import beside


class HostAnswers:
    """The CPU's part of a step.

    Args:
        keys: attention over keys in DRAM; None: there are none.
        weights: products with weights in DRAM; None: there are none.
        places: those of the weights, in the order of use.
        num_layers: of the model.
    """

    def __init__(
        self, keys: Handover | None, weights: WeightHandover | None, places: Sequence[HostPlace], num_layers: int
    ) -> None:
        self.keys = keys
        self.weights = weights
        self._before: list[list[int]] = [[] for _ in range(num_layers + 1)]
        self._behind: list[list[int]] = [[] for _ in range(num_layers + 1)]  # the last entry: behind all layers
        for index, place in enumerate(places):
            layer_idx = num_layers if place.layer_idx is None else place.layer_idx
            (self._before if place.is_before_attention else self._behind)[layer_idx].append(index)

    def reset(self) -> None:
        """Make ready for a step.

        Raises:
            LaneError: the accelerator has not come to the end of the last step in time.
        """
        for handover in (self.keys, self.weights):
            if handover is not None:
                handover.reset()

    def mark_launched(self) -> None:
        """Say that a whole step has been launched."""
        for handover in (self.keys, self.weights):
            if handover is not None:
                handover.mark_launched()

    @torch.inference_mode()
    def answer(self, batches: Sequence[KeyBatch] | None) -> None:
        """Do the CPU's part of a step that was launched, in the calling thread.

        Args:
            batches: the keys of each layer in the DRAM pool; None: there are none.
        Raises:
            LaneError: the accelerator did not ask in time. Its waits are ended all the same, so the step runs out; what
                it gives is worthless.
        """
        if self.weights is None:
            assert self.keys is not None, "a step without a part for the CPU is not answered"
            assert batches is not None, "the keys of a step are known"
            self.keys.answer(batches)
            return
        is_done = False
        try:
            for layer_idx in range(len(self._before)):
                for place in self._before[layer_idx]:
                    self.weights.answer(place)
                if self.keys is not None and batches is not None and layer_idx < len(batches):
                    self.keys.answer_layer(layer_idx, batches[layer_idx])
                for place in self._behind[layer_idx]:
                    self.weights.answer(place)
            is_done = True
        finally:
            if not is_done:
                self.release()

    def describe(self) -> str:
        """How far both sides are, for people."""
        return "; ".join(handover.describe() for handover in (self.weights, self.keys) if handover is not None)

    def release(self) -> None:
        """End all waits of both sides."""
        for handover in (self.keys, self.weights):
            if handover is not None:
                handover.release()

    def answering(self, batches: Sequence[KeyBatch] | None) -> AbstractContextManager[None]:
        """Do the CPU's part in a thread of its own while the caller launches the step.

        Raises:
            LaneError: see `answer`.
        """
        return beside(lambda: self.answer(batches), release=self.release, mark_launched=self.mark_launched)

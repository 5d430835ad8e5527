"""`Predictor`: trained matrices say which neurons behind a ReLU a token needs, before the matrix in front is read.

    score = fc2 · relu(fc1 · x),  needed where it is above a threshold         formats/neuron_predictor.py

Neurons that it misses count as 0, so answers change; neurons that it names for nothing cost a row each. A token's
neurons are its own: those that another token of the step needs do not count for it.
"""

from typing import Final

import torch
from torch import Tensor

from ambidex.kernels import api
from ambidex.kernels.linear import LinearContext, LinearOp

CHECK_EVERY: Final = 16
"""One of so many steps of a place multiplies all rows as well, to see how many active neurons were found."""


class Predictor:
    """Of some neurons of a place.

    Args:
        first: [r, K]; second: [n, r], a row for each of the neurons. Plain numbers in CPU memory.
        threshold: of scores.
        linear: what the products share.
    """

    def __init__(self, first: Tensor, second: Tensor, *, threshold: float, linear: LinearContext) -> None:
        self._first = first
        self._second = second
        self._threshold = threshold
        self._linear = linear

    @staticmethod
    def num_bytes(rank: int, width: int, num_rows: int, number_bytes: int) -> int:
        """Of both matrices."""
        return rank * (width + num_rows) * number_bytes

    def head(self, num_rows: int) -> "PredictorPart":
        """Of the first neurons."""
        return PredictorPart(self._first, self._second[:num_rows], self._threshold, self._linear)


class PredictorPart:
    """Of the first neurons of a place, with ops of its own."""

    def __init__(self, first: Tensor, second: Tensor, threshold: float, linear: LinearContext) -> None:
        self._first, self._second, self._threshold = first, second, threshold
        self._multiply_first, self._multiply_second = LinearOp(linear), LinearOp(linear)

    def needed(self, x: Tensor) -> Tensor:
        """x [T, K] fp32 → [T, n] bool: the neurons that each token is expected to need."""
        inner = api.activate(self._multiply_first(x, (self._first,), (None,))[0], "relu")
        return torch.gt(self._multiply_second(inner, (self._second,), (None,))[0], self._threshold)

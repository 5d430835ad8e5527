"""`Part`: some rows of a place's matrices in one piece of memory, and their product."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ambidex.core.model_spec import Activation
from ambidex.kernels.linear import LinearContext, LinearOp
from ambidex.layers.mlp import activate_neurons
from ambidex.mlp.cuts import SiteShape


class Rows:
    """The numbers of some rows, in one flat memory: the rows of each matrix, then the columns behind them.

    Args:
        shape: of the place.
        rows: which of its rows.
        memory: numbers_per_row · rows numbers.
    """

    def __init__(self, shape: SiteShape, rows: range, memory: Tensor) -> None:
        self.rows = rows
        self.memory = memory
        num_rows, width = len(rows), shape.num_in
        end = shape.num_ins * num_rows * width
        self.joint_in = memory[:end].view(shape.num_ins * num_rows, width)  # [num_ins · n, K]
        self.ins = self.joint_in.chunk(shape.num_ins)  # each [n, K]
        self.out = memory[end:].view(shape.num_out, num_rows) if shape.num_out else None  # [num_out, n]


class Part:
    """Multiplies x with some rows.

    Args:
        numbers: the rows, on the device of x.
        activation: of neurons; None: there are none.
        linear: what the products of the device share.
    """

    def __init__(self, numbers: Rows, activation: Activation | None, linear: LinearContext) -> None:
        self.rows = numbers.rows
        self.num_in = numbers.joint_in.shape[1]
        self.num_bytes = numbers.memory.nbytes
        self._activation = activation
        is_joint = numbers.memory.device.type == "cuda"  # one launch; the native CPU product takes several matrices
        self._weights = (numbers.joint_in,) if is_joint else tuple(numbers.ins)
        self._num_ins = len(numbers.ins)
        self._biases: tuple[Tensor | None, ...] = (None,) * len(self._weights)
        self._out = numbers.out
        self._multiply_ins = LinearOp(linear)
        self._multiply_out = LinearOp(linear)

    def bind(self, biases: Sequence[Tensor]) -> None:
        """Take the biases of neurons, [N] for each matrix, in the dtype and on the device of x."""
        own = [bias[self.rows.start : self.rows.stop] for bias in biases]
        if own:
            self._biases = (torch.cat(own),) if len(self._weights) < len(own) else tuple(own)

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, K] → [T, n] for rows, [T, num_out] for neurons, which is their part of a sum."""
        inner = self._multiply_ins(x, self._weights, self._biases)
        if self._out is None or self._activation is None:
            return inner[0]
        if len(inner) < self._num_ins:
            inner = inner[0].chunk(self._num_ins, dim=-1)
        return self._multiply_out(activate_neurons(inner, self._activation), (self._out,), (None,))[0]


def join(shape: SiteShape, answers: Sequence[tuple[range, Tensor]], dtype: torch.dtype) -> Tensor:
    """What the whole place gives, [T, answer_width], from what its parts give: rows side by side, neurons summed.

    Args:
        answers: rows and product of each part; together all rows that are wanted.
        dtype: of the answer. Sums are fp32.
    """
    first = answers[0][1]
    if len(answers) == 1:
        return first.to(dtype)
    if shape.num_out:
        total = first.float()
        for _, product in answers[1:]:
            total = total + product
        return total.to(dtype)
    start = min(rows.start for rows, _ in answers)
    stop = max(rows.stop for rows, _ in answers)
    joined = first.new_empty((first.shape[0], stop - start), dtype=dtype)
    for rows, product in answers:
        joined[:, rows.start - start : rows.stop - start].copy_(product)
    return joined

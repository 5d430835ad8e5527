"""`Part`: some rows of a place's matrices in one piece of memory, and their product."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ambidex.core.model_spec import Activation
from ambidex.core.sparsity import NeuronMask
from ambidex.kernels.cpu.quantized import QuantizedMatrix, Weight, packed_bytes
from ambidex.kernels.linear import LinearContext, LinearOp
from ambidex.kernels.neurons import sum_all
from ambidex.layers.mlp import activate_neurons
from ambidex.mlp.cuts import SiteShape


class Rows:
    """The numbers of some rows, in one flat memory: the rows of each matrix, then the columns behind them.

    Args:
        shape: of the place.
        rows: which of its rows.
        memory: `SiteShape.num_bytes` bytes, uint8, and what fills them up.
        dtype: of plain numbers.
    """

    def __init__(self, shape: SiteShape, rows: range, memory: Tensor, dtype: torch.dtype) -> None:
        self.rows = rows
        self.memory = memory
        num_rows, width = len(rows), shape.num_in
        self.joint_in: Tensor | None = None  # [num_ins · n, K] of plain numbers
        self.ins: tuple[Weight, ...]  # each [n, K]
        self.out: Weight | None = None  # [num_out, n]
        self.columns: Tensor | None = None  # [n, num_out]: `out` where it lies neuron by neuron
        if shape.kind is not None:
            size = packed_bytes(shape.kind, (num_rows, width))
            end = shape.num_ins * size
            self.ins = tuple(
                _packed(shape.kind, (num_rows, width), memory[start : start + size]) for start in range(0, end, size)
            ) if num_rows else ()  # fmt: skip
            if shape.num_out and num_rows:
                size = packed_bytes(shape.kind, (shape.num_out, num_rows))
                self.out = _packed(shape.kind, (shape.num_out, num_rows), memory[end : end + size])
            return
        numbers = memory[: shape.num_bytes(num_rows, dtype.itemsize)].view(dtype)
        end = shape.num_ins * num_rows * width
        self.joint_in = numbers[:end].view(shape.num_ins * num_rows, width)
        self.ins = self.joint_in.chunk(shape.num_ins)
        if shape.is_neuron_major:
            self.columns = numbers[end:].view(num_rows, shape.num_out)
            self.out = self.columns.T
        elif shape.num_out:
            self.out = numbers[end:].view(shape.num_out, num_rows)


def _packed(kind: str, shape: tuple[int, int], memory: Tensor) -> QuantizedMatrix:
    return QuantizedMatrix(kind, shape, memory.view(-1, packed_bytes(kind, (1, shape[1]))))


class Part:
    """Multiplies x with some rows.

    Args:
        numbers: the rows, on the device of x.
        activation: of neurons; None: there are none.
        linear: what the products of the device share.
        mask: sets some neurons to 0; None: none.
    """

    def __init__(
        self, numbers: Rows, activation: Activation | None, linear: LinearContext, mask: NeuronMask | None = None
    ) -> None:
        self.rows = numbers.rows
        self.numbers = numbers
        self.num_in = numbers.ins[0].shape[1]
        self.num_bytes = numbers.memory.nbytes
        self.activation = activation
        self.mask = mask
        is_joint = numbers.memory.device.type == "cuda"  # one launch; the native CPU product takes several matrices
        self._weights: tuple[Weight, ...] = numbers.ins
        if is_joint and numbers.joint_in is not None:
            self._weights = (numbers.joint_in,)
        self._num_ins = len(numbers.ins)
        self.biases: tuple[Tensor | None, ...] = (None,) * len(self._weights)
        self._out = numbers.out
        self.linear = linear
        self.counts: Tensor | None = None  # [n] int32: added to in calls that are counted
        self._multiply_ins = LinearOp(linear)
        self._multiply_out = LinearOp(linear)

    @property
    def is_quantized(self) -> bool:
        """Whether its matrices are."""
        return isinstance(self.numbers.ins[0], QuantizedMatrix)

    def bind(self, biases: Sequence[Tensor]) -> None:
        """Take the biases of neurons, [N] for each matrix, in the dtype and on the device of x."""
        own = [bias[self.rows.start : self.rows.stop] for bias in biases]
        if own:
            self.biases = (torch.cat(own),) if len(self._weights) < len(own) else tuple(own)

    def __call__(self, x: Tensor, *, is_counted: bool = False) -> Tensor:
        """x [T, K] → [T, n] for rows, [T, num_out] for neurons, which is their part of a sum.

        Args:
            is_counted: add to `counts`, if there are any, for how many tokens each neuron is not 0.
        """
        inner = self._multiply_ins(x, self._weights, self.biases)
        if self._out is None or self.activation is None:
            return inner[0]
        if len(inner) < self._num_ins:
            inner = inner[0].chunk(self._num_ins, dim=-1)
        return self.finish(inner, is_counted=is_counted)

    def finish(self, inner: Sequence[Tensor], *, total: Tensor | None = None, is_counted: bool = False) -> Tensor:
        """What neurons give, [T, num_out], from the products of their rows, [T, n] for each matrix.

        Args:
            total: fp32, added to it.
        """
        assert self.activation is not None, "these are neurons"
        assert self._out is not None, "these are neurons"
        neurons = activate_neurons(inner, self.activation, self.mask)
        if is_counted and self.counts is not None:
            self.counts.add_(neurons.ne(0).sum(0))
        if self.numbers.columns is not None:
            product = sum_all(neurons, (self.numbers.columns,), self.linear)
            return product if total is None else total + product
        return self._multiply_out(neurons, (self._out,), (None,), residual=total)[0]


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

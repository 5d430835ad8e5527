"""The door to matrix products: `x @ weight.T + bias`, for one matrix or several over the same x.

Other than the ops of `api.py` these keep something from call to call: threads, scratch memory, and the native form of
weights that do not move. So they are objects, made once for a model and once for a place in it.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.linear import LinearPool, Matrices
from ambidex.kernels.dispatch import choose
from ambidex.kernels.reference import linear as reference_linear
from ambidex.kernels.torch_ops import linear as torch_linear

MOST_NATIVE_TOKENS: Final = 128
"""Up to so many rows of x the native op is chosen on a CPU. Measured on 2 cores of an AVX2 EPYC, with other processes
about, bf16 weights, best of many runs in turn (K x N: native, torch after widening, torch with fp32 weights): 128 rows,
576 x 3072: 5.0, 11.8, 4.2 ms; 1536 x 576: 2.6, 2.1, 1.9; 4096 x 2048: 36, 35, 32; 512 rows: 24, 31, 20; 14, 14, 9;
260, 168, 163. With 32 rows and fewer it is 1.2 to 15 times as fast as torch with fp32 weights. A constant, not a
measurement at start: which op computes shows in the last bits of the result, and the same step must give the same bits
tomorrow."""


class LinearContext:
    """What all matrix products of a model share.

    Args:
        threads: the threads of the native op; None where there is none (on a GPU, or without the compiled module).
    """

    def __init__(self, threads: native.ThreadPool | None = None) -> None:
        self.pool = None if threads is None else LinearPool(threads)
        self.scratch = torch_linear.Scratch()
        self.multiplies_bf16 = threads is not None and native.isa() in ("avx512bf16", "amx")


class LinearOp:
    """The product of x with matrices at one place of a model."""

    def __init__(self, context: LinearContext) -> None:
        self._context = context
        self._matrices: Matrices | None = None

    def __call__(self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Multiply.

        Args:
            x: [..., K] fp32, or in the dtype of the weights.
            weights: each [N, K] of one dtype (fp32, bf16, fp16); biases: [N] in the dtype of x, or None, for each.
        Returns:
            [..., N] in the dtype of x for each weight. Products of an fp32 x are fp32 whatever the weights' dtype, but
            for bf16 weights and more than MOST_NATIVE_TOKENS rows on a CPU that multiplies bf16: there x and the
            product are rounded to bf16.
        Raises:
            ShapeError: the tensors do not fit each other.
        Cost: reads the weights once. Beyond MOST_NATIVE_TOKENS rows, 16-bit weights are widened first on other CPUs.
        """
        implementation = choose("linear", x.device.type).name
        pool = self._context.pool
        if (
            implementation == "native"
            and pool is not None
            and x.dtype == torch.float32
            and x.dim() == 2
            and x.shape[0] <= MOST_NATIVE_TOKENS
        ):
            if self._matrices is None or not self._matrices.lies_at(weights, biases):
                self._matrices = Matrices(weights, biases)
            return pool.multiply(self._matrices, x.contiguous())
        for weight in weights:
            if weight.shape[1] != x.shape[-1]:
                raise ShapeError(f"x: expected {weight.shape[1]} numbers in the last axis, got shape {tuple(x.shape)}")
        if implementation == "reference":
            return tuple(reference_linear.linear(x, *pair) for pair in zip(weights, biases, strict=True))
        return tuple(
            torch_linear.linear(
                x, weight, bias, scratch=self._context.scratch, multiplies_bf16=self._context.multiplies_bf16
            )
            for weight, bias in zip(weights, biases, strict=True)
        )

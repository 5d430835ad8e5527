"""The door to matrix products: `x @ weight.T + bias`, for one matrix or several over the same x.

Other than the ops of `api.py` these keep something from call to call: threads, scratch memory, and the native form of
weights that do not move. So they are objects, made once for a model and once for a place in it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.linear import LEAST_TILED_TOKENS, LinearPool, Matrices, TilesFrom, format_of
from ambidex.kernels.cpu.quantized import QuantizedMatrix, Weight
from ambidex.kernels.dispatch import choose
from ambidex.kernels.reference import linear as reference_linear
from ambidex.kernels.reference import quantized as reference_quantized
from ambidex.kernels.torch_ops import linear as torch_linear

T = TypeVar("T")

MOST_NATIVE_TOKENS: Final = 128
"""Up to so many rows of x the native op is chosen on a CPU for weights that are not quantised. Measured on 2 cores of
an AVX2 EPYC, with other processes about, bf16 weights, best of many runs in turn (K x N: native, torch after widening,
torch with fp32 weights): 128 rows, 576 x 3072: 5.0, 11.8, 4.2 ms; 1536 x 576: 2.6, 2.1, 1.9; 4096 x 2048: 36, 35, 32;
512 rows: 24, 31, 20; 14, 14, 9; 260, 168, 163. With 32 rows and fewer it is 1.2 to 15 times as fast as torch with fp32
weights. A constant, not a measurement at start: which op computes shows in the last bits of the result, and the same
step must give the same bits tomorrow.

Quantised weights are multiplied natively whatever the number of rows: 16-bit integers are the faster product on AVX2.
CPU time of one thread there, native against torch in fp32 and what dequantising takes before it: 768 x 3072, 512 rows,
Q4_1: 21.4, 27.8 + 1.8 ms; Q4_K: 25.7, 28.0 + 1.7; 1536 x 576, 128 rows, Q8_0: 2.6, 3.1 + 0.8."""


class LinearContext:
    """What all matrix products of a model share.

    Args:
        threads: the threads of the native op; None where there is none (on a GPU, or without the compiled module).
        most_native_tokens: rows of x up to which the native op is chosen for weights that are not quantised.
        tiles_from: rows of x from which on matrix tiles multiply 4-bit weights, see `LinearPool`.
    """

    def __init__(
        self,
        threads: native.ThreadPool | None = None,
        *,
        most_native_tokens: int = MOST_NATIVE_TOKENS,
        tiles_from: TilesFrom = LEAST_TILED_TOKENS,
    ) -> None:
        self.most_native_tokens = most_native_tokens
        self.weight_first = False
        """Which form torch's products of bf16 have; see `torch_ops.linear`."""
        self.pool = None if threads is None else LinearPool(threads, tiles_from=tiles_from)
        self.scratch = torch_linear.Scratch()
        self.multiplies_bf16 = threads is not None and native.isa() in ("avx512bf16", "amx")


@dataclass(frozen=True, slots=True)
class _Call:
    """Matrices of one format, which one native call multiplies, and their places among all."""

    places: tuple[int, ...]
    matrices: Matrices


class LinearOp:
    """The product of x with matrices at one place of a model."""

    def __init__(self, context: LinearContext) -> None:
        self._context = context
        self._calls: tuple[_Call, ...] = ()

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Weight],
        biases: Sequence[Tensor | None],
        *,
        residual: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """Multiply.

        Args:
            x: [..., K] fp32, or in the dtype of the weights.
            weights: each [N, K], fp32, bf16, fp16 or quantised; biases: [N] in the dtype of x, or None, for each.
            residual: [..., N] in the dtype of x, added to the product of the only weight.
        Returns:
            [..., N] in the dtype of x for each weight. Products of an fp32 x are fp32 whatever the weights' dtype, but
            for bf16 weights and more than MOST_NATIVE_TOKENS rows on a CPU that multiplies bf16: there x and the
            product are rounded to bf16.
        Raises:
            ShapeError: the tensors do not fit each other.
        Cost: reads the weights once. Beyond MOST_NATIVE_TOKENS rows, 16-bit weights are widened first on other CPUs.
            A native call takes weights of one format; of several formats each has a call.
        """
        implementation = choose("linear", x.device.type).name
        pool = self._context.pool if implementation == "native" and x.dtype == torch.float32 and x.dim() == 2 else None
        if pool is not None:
            x = x.contiguous()
            if x.shape[0] <= self._context.most_native_tokens or all(
                isinstance(weight, QuantizedMatrix) for weight in weights
            ):
                return self._multiply_natively(pool, x, weights, biases, residual)
        for weight in weights:
            if weight.shape[1] != x.shape[-1]:
                raise ShapeError(f"x: expected {weight.shape[1]} numbers in the last axis, got shape {tuple(x.shape)}")
        products = tuple(
            self._multiply_one(implementation, pool, x, weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
        )
        return products if residual is None else (products[0] + residual,)

    def _multiply_one(
        self, implementation: str, pool: LinearPool | None, x: Tensor, weight: Weight, bias: Tensor | None
    ) -> Tensor:
        if isinstance(weight, QuantizedMatrix):
            if pool is not None:
                return pool.multiply(Matrices([weight], [bias]), x)[0]
            if weight.data.device.type == "cuda":
                return _multiply_on_gpu(x, weight, bias)
            weight = weight.dense()
        if implementation == "reference":
            return reference_linear.linear(x, weight, bias)
        return torch_linear.linear(
            x,
            weight,
            bias,
            scratch=self._context.scratch,
            multiplies_bf16=self._context.multiplies_bf16,
            weight_first=self._context.weight_first,
        )

    def _multiply_natively(
        self,
        pool: LinearPool,
        x: Tensor,
        weights: Sequence[Weight],
        biases: Sequence[Tensor | None],
        residual: Tensor | None,
    ) -> tuple[Tensor, ...]:
        if len(self._calls) == 1 and self._calls[0].matrices.lies_at(weights, biases):  # nearly every call
            return pool.multiply(self._calls[0].matrices, x, residual=residual)
        if not self._calls or not all(
            call.matrices.lies_at(_pick(weights, call.places), _pick(biases, call.places)) for call in self._calls
        ):
            self._calls = tuple(_sort_by_format(weights, biases))
        ys = {
            place: y
            for call in self._calls
            for place, y in zip(call.places, pool.multiply(call.matrices, x, residual=residual), strict=True)
        }
        return tuple(ys[place] for place in range(len(weights)))


def _multiply_on_gpu(x: Tensor, weight: QuantizedMatrix, bias: Tensor | None) -> Tensor:
    """x [..., K] → [..., N] in the dtype of x, from a packed matrix in GPU memory."""
    num_rows = weight.shape[0]
    if choose("quantized_linear", x.device.type).name == "triton":
        from ambidex.kernels.triton import quantized as triton_quantized

        y = triton_quantized.multiply(x.flatten(0, -2), weight.data, weight.kind, num_rows)
        y = y.view(*x.shape[:-1], num_rows)
    else:
        y = x @ reference_quantized.dense(weight.data, weight.kind, num_rows).to(x.dtype).T
    return y if bias is None else y + bias


def _sort_by_format(weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> Iterable[_Call]:
    places_of: dict[str, list[int]] = {}
    for place, weight in enumerate(weights):
        places_of.setdefault(format_of(weight), []).append(place)
    for places in places_of.values():
        yield _Call(tuple(places), Matrices(_pick(weights, places), _pick(biases, places)))


def _pick(items: Sequence[T], places: Sequence[int]) -> list[T]:
    return [items[place] for place in places]

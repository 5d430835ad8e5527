"""Native matrix products: weights are read where they lie, once for all tokens of a call, by all threads."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu import memory, native
from ambidex.kernels.cpu.native import array_of, check_loaded, number_of
from ambidex.kernels.cpu.quantized import QuantizedMatrix, Weight

with suppress(ImportError):  # `native` says so when the module is used
    from ambidex import _native


class Matrices:
    """Weights of one width, with their biases, that are multiplied with the same x in one call.

    Args:
        weights: each [N, K] in CPU memory, contiguous; all fp32, all bf16, all fp16, or all quantised and of one kind.
        biases: [N] fp32 or None for each weight.
    Raises:
        NativeModuleError: the compiled module is missing or does not load.
        ShapeError: the tensors do not fit each other.
    """

    def __init__(self, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> None:
        check_loaded()
        formats = [format_of(weight) for weight in weights]
        if len(set(formats)) != 1:
            raise ShapeError(f"weights: expected one format, got {formats}")
        bias_arrays = [None if bias is None else array_of(bias) for bias in biases]
        try:
            self.native = _bind(weights, bias_arrays)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"matrices: {error}") from error
        self.num_out = tuple(weight.shape[0] for weight in weights)
        self.kind = formats[0]
        self._places = tuple(weight.data_ptr() for weight in weights)
        self._bias_places = tuple(bias is not None and bias.data_ptr() for bias in biases)

    def lies_at(self, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> bool:
        """Whether the tensors still are the memory that these matrices were made of."""
        return self._places == tuple(weight.data_ptr() for weight in weights) and self._bias_places == tuple(
            bias is not None and bias.data_ptr() for bias in biases
        )


def format_of(weight: Weight) -> str:
    """What the numbers of a weight are: matrices of one call have one format.

    Raises:
        ShapeError: there is no native product for it.
    """
    return weight.kind if isinstance(weight, QuantizedMatrix) else number_of(weight)


def _bind(weights: Sequence[Weight], biases: list[npt.NDArray[np.generic] | None]) -> "_native.Matrices":
    if packed := [weight for weight in weights if isinstance(weight, QuantizedMatrix)]:
        num_out = [weight.shape[0] for weight in packed]
        return _native.Matrices.quantized([weight.data.numpy() for weight in packed], packed[0].kind, num_out, biases)
    dense = [weight for weight in weights if isinstance(weight, Tensor)]
    return _native.Matrices([array_of(weight) for weight in dense], number_of(dense[0]), biases)


LEAST_TILED_TOKENS: Final = 8
"""Measured on 16 cores with AMX, Q4_0 and Q4_K, 15 threads: tiles read 34 to 93 GB/s of weights for one token where
vectors read 102 to 116; for 8 tokens 56 to 84 against 55 to 67, for 16 49 to 64 against 28 to 34. Where `ambidex
calibrate` has measured the machine, its profile says it by format (`CpuRates.tiles_from`)."""
TILED_KINDS: Final = ("Q4_0", "Q4_1", "Q4_K")
"""Formats that AMX tiles multiply, too."""
TilesFrom = int | None | Mapping[str, int | None]
"""Tokens from which on they do; None: never. By format, or for all."""


class LinearPool:
    """Matrix products, and the scratch memory that they keep.

    Args:
        threads: who computes; calls with the same threads run one after the other.
        tiles_from: tokens of a call from which on 4-bit weights are multiplied in AMX tiles, if the processor has them;
            each number of x is then one or two of bf16, off by at most 2^-16 of it. A format that is not among those
            named has LEAST_TILED_TOKENS.
    Raises:
        NativeModuleError: the compiled module is missing or does not load.
    """

    def __init__(self, threads: native.ThreadPool, *, tiles_from: TilesFrom = LEAST_TILED_TOKENS) -> None:
        check_loaded()
        self._tiles_from = tiles_from
        self._vectors, self._tiles = (
            _native.LinearPool(threads.native, tiles_quantized=is_tiled) for is_tiled in (False, True)
        )

    def multiply(
        self, matrices: Matrices, x: Tensor, *, residual: Tensor | None = None, isa: str | None = None
    ) -> tuple[Tensor, ...]:
        """x · Wᵀ + bias for each matrix; products and sums in fp32.

        With quantised matrices x is turned into integers of 15 bits and a sign, with one scale for each 32 numbers:
        that changes a number of x by at most 2^-16 of the largest of its 32. Products of a block are summed exactly,
        all else in fp32. A token's result does not depend on the tokens beside it, but for 4-bit weights on how many
        they are: see `tiles_from`.

        Args:
            x: [T, K] fp32 in CPU memory, contiguous.
            residual: [T, N] fp32, added to the product of the only matrix.
            isa: one of `native.available_isas()`, for tests; None for the fastest.
        Returns:
            [T, N] fp32 for each matrix.
        Raises:
            ShapeError: tensors do not fit the matrices.
        Cost: reads each weight from memory once, the GIL released; blocks of 4 tokens read it again from cache.
        """
        ys = [memory.new_fp32((x.shape[0], num_out)) for num_out in matrices.num_out]
        memory.keep(matrices)
        tiles_from = self._tiles_from
        if isinstance(tiles_from, Mapping):
            tiles_from = tiles_from.get(matrices.kind, LEAST_TILED_TOKENS)
        is_tiled = tiles_from is not None and x.shape[0] >= tiles_from
        try:
            (self._tiles if is_tiled else self._vectors).multiply(
                matrices.native, x.numpy(), ys, None if residual is None else residual.numpy(), isa=isa
            )
        except (TypeError, ValueError) as error:
            raise ShapeError(f"linear: {error}") from error
        return tuple(torch.from_numpy(y) for y in ys)

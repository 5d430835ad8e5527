"""Neurons behind a ReLU of which a token needs a few: one native call reads their rows where they lie.

The reference gathers the rows first, which writes and reads them once more, between calls of torch whose threads sleep.
"""

from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu import memory
from ambidex.kernels.cpu.native import ThreadPool, array_of, check_loaded, number_of

with suppress(ImportError):  # `native` says so when the module is used
    from ambidex import _native

STEP: Final = 64
"""Rows have a multiple of so many numbers."""


class PickedPool:
    """The threads, and a sum of each of them.

    Args:
        threads: who computes; calls with the same threads run one after the other.
    Raises:
        NativeModuleError: the compiled module is missing or does not load.
    """

    def __init__(self, threads: ThreadPool) -> None:
        check_loaded()
        self._native = _native.PickedPool(threads.native)

    def relu_sum(
        self,
        table: Tensor,
        in_rows: Tensor,
        out_rows: Tensor,
        biases: Tensor | None,
        x: Tensor,
        *,
        isa: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """h[i] = relu(x · table[in_rows[i]] + biases[i]) and Σ over i of h[i] · table[out_rows[i]].

        Products and sums are fp32; the same threads give the same bits.

        Args:
            table: [R, K] in CPU memory, contiguous; fp32, bf16 or fp16; K a multiple of `STEP`.
            in_rows, out_rows: [k] int64, rows of the table.
            biases: [k] fp32; None: 0.
            x: [K] fp32.
            isa: one of `native.available_isas()`, for tests; None for the fastest.
        Returns:
            h [k] and the sum [K], fp32.
        Raises:
            ShapeError: the tensors do not fit each other, or a row is not in the table.
        Cost: reads the rows in front once, and those behind where h is not 0; the GIL is released.
        """
        h, y = memory.new_fp32((in_rows.shape[0],)), memory.new_fp32((table.shape[1],))
        try:
            self._native.relu_sum(
                array_of(table), number_of(table), in_rows.numpy(), out_rows.numpy(),
                None if biases is None else biases.numpy(), x.numpy(), h, y, isa=isa,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise ShapeError(f"relu_sum: {error}") from error
        return torch.from_numpy(h), torch.from_numpy(y)

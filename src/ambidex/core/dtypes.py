"""Number formats of weights, activations and KV, without a tensor library."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from ambidex.core.errors import InternalError


class DType(StrEnum):
    """A number format. The engine computes in the floating ones. `INT8` and `INT4` are of K and V alone, whose rows
    have scales then (docs/kv_layout.md)."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def num_bits(self) -> int:
        """Bits of one number."""
        return {DType.FP32: 32, DType.BF16: 16, DType.FP16: 16, DType.INT8: 8, DType.INT4: 4}[self]

    @property
    def num_bytes(self) -> int:
        """Bytes of one number.

        Raises:
            InternalError: of `INT4`, two of which share a byte.
        """
        if self.num_bits < 8:
            raise InternalError(f"a number of {self} has no bytes of its own: ask for its bits")
        return self.num_bits // 8

    @property
    def has_scales(self) -> bool:
        """Rows of integers have scales beside them."""
        return self in (DType.INT8, DType.INT4)


WEIGHT_BLOCKS: Final[Mapping[str, tuple[int, int]]] = {
    **{dtype.value: (1, dtype.num_bytes) for dtype in (DType.FP32, DType.BF16, DType.FP16)},
    "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
"""Formats of matrices: numbers of a block, and bytes of a block. Source of the quantised ones: ggml, ggml-common.h."""

GPU_WEIGHT_KINDS: Final = ("Q8_0", "Q4_0", "Q4_1")
"""Quantised formats that a GPU multiplies as they are stored (`kernels/triton/quantized.py`)."""
PACKED_ROWS: Final = 16
"""Rows of quantised numbers that lie together in memory; the last group is filled up."""


def weight_bytes(kind: str, num_numbers: int) -> int:
    """Bytes of a matrix of so many numbers in one of `WEIGHT_BLOCKS`; a last block that is not full counts whole."""
    block_len, block_bytes = WEIGHT_BLOCKS[kind]
    return -(-num_numbers // block_len) * block_bytes


def matrix_bytes(kind: str, num_rows: int, width: int) -> int:
    """Bytes of a matrix in memory: of quantised ones whole groups of `PACKED_ROWS` rows are there."""
    if WEIGHT_BLOCKS[kind][0] > 1:
        num_rows = -(-num_rows // PACKED_ROWS) * PACKED_ROWS
    return weight_bytes(kind, num_rows * width)

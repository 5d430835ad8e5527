"""Number formats of weights, activations and KV, without a tensor library."""

from enum import StrEnum


class DType(StrEnum):
    """A number format. The engine computes in the floating ones; `INT8` rows of K and V have one fp32 scale each."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"

    @property
    def num_bytes(self) -> int:
        """Bytes of one number."""
        return {DType.FP32: 4, DType.BF16: 2, DType.FP16: 2, DType.INT8: 1}[self]

    @property
    def num_scale_bytes(self) -> int:
        """Bytes of the scale that goes with each row of numbers; 0 for floating formats."""
        return 4 if self is DType.INT8 else 0

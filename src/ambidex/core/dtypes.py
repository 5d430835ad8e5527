"""Number formats of weights, activations and KV, without a tensor library."""

from enum import StrEnum


class DType(StrEnum):
    """A format that the engine computes in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def num_bytes(self) -> int:
        """Bytes of one number."""
        return 4 if self is DType.FP32 else 2

"""`TensorInfo`: where one tensor lies in a file, whatever the format of the file."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: `num_bytes` bytes from byte `offset` of the file on.

    `dtype` is spelt as the file's format spells it (`BF16`, `Q4_K`); `shape` is row-major, as in torch.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int

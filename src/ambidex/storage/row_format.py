"""`RowFormat`: rows of K or of V as a pool in tile order keeps them, and the scales beside them.

scales    int8  [..., N, P] fp32        the scale of each row
          int4  [..., N, W, P] words    its scale, and steps and zeros of its groups (kernels/reference/int4.py)
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ambidex.core.dtypes import DType
from ambidex.core.ids import KVPart
from ambidex.core.kv_spec import KVSpec
from ambidex.kernels import api
from ambidex.kernels.reference import int4

TORCH_DTYPES: Final = {
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.INT8: torch.int8,
    DType.INT4: torch.uint8,
}
"""Of the elements of a pool; those of int4 are bytes with two numbers."""


class RowFormat:
    """The format of one part of a pool's rows.

    Args:
        spec: of the pool; part: K or V.
    """

    def __init__(self, spec: KVSpec, part: KVPart) -> None:
        self.dtype = spec.dtypes.of(part)
        self.torch_dtype = TORCH_DTYPES[self.dtype]
        self._head_dim = spec.head_dim
        self._row_size = spec.stored_row_size(part)
        self._block_size = spec.block_size
        self._num_words = spec.num_scale_words(part)

    @property
    def stored_dim(self) -> int:
        """Elements of a row outside of its tile: head_dim numbers, of int4 all bytes of the padded row."""
        return self._row_size if self.dtype is DType.INT4 else self._head_dim

    def scales_shape(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Of the scales of blocks [..., N]."""
        return (*blocks, *((self._num_words,) if self.dtype is DType.INT4 else ()), self._block_size)

    def encode(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows [..., D] in this format, [..., stored_dim], and their scales [...], of int4 [..., W], if it has any."""
        if self.dtype is DType.INT4:
            return int4.pack_rows(rows)
        if self.dtype is DType.INT8:
            return api.quantize_rows(rows)
        return rows.to(self.torch_dtype), None

    def decode(self, stored: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What `encode` gave, as rows [..., D] of a floating format."""
        if scales is None:
            return stored.to(dtype)
        if self.dtype is DType.INT4:
            return int4.unpack_rows(stored, scales, self._head_dim).to(dtype)
        return (stored * scales[..., None]).to(dtype)

    def put_scales(self, scales: Tensor, slots: Tensor, new: Tensor) -> None:
        """Write scales of new rows.

        Args:
            scales: of one layer; slots: [T] int64; new: [T, Hkv] or [T, Hkv, W], from `encode`.
        """
        if self.dtype is DType.INT4:
            scales[:, slots // self._block_size, :, slots % self._block_size] = new
        else:
            scales.flatten(1)[:, slots] = new.T

    def take_scales(self, scales: Tensor, heads: Tensor, slots: Tensor) -> Tensor:
        """Scales of some rows of one layer, [n] heads and slots: [n] or [n, W]."""
        if self.dtype is DType.INT4:
            return scales[heads, slots // self._block_size, :, slots % self._block_size]
        return scales.flatten(1)[heads, slots]

    def block_scales(self, scales: Tensor, block_ids: Tensor) -> Tensor:
        """Scales of all rows of blocks of one layer side by side: [Hkv, n · P] or [Hkv, n · P, W]."""
        return self.join_scales(scales[:, block_ids])

    def join_scales(self, taken: Tensor) -> Tensor:
        """Scales of blocks [Hkv, n, …] by row: [Hkv, n · P] or [Hkv, n · P, W]."""
        return taken.transpose(2, 3).flatten(1, 2) if self.dtype is DType.INT4 else taken.flatten(1, 2)

    def scales_of_block(self, scales: Tensor, block_id: int) -> Tensor:
        """Scales of a block in all layers: [L, Hkv, P] or [L, Hkv, P, W]."""
        taken = scales[:, :, block_id]
        return taken.transpose(2, 3) if self.dtype is DType.INT4 else taken

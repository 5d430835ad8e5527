"""`KVSpec`: the shape of the KV cache and the bytes that follow from it, for allocator, cost model and benchmarks."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ambidex.core.dtypes import DType
from ambidex.core.model_spec import ModelSpec

TILE_TOKENS: Final = 16
"""A block in tile order holds a multiple of so many tokens: the rows of an AMX tile, the lanes of an AVX-512 vector."""
TILE_DIMS: Final = 32
"""A row in tile order is padded to a multiple of so many numbers: the bf16 pairs of an AMX tile's row."""


class KVOrder(StrEnum):
    """How the numbers of a block stand in memory (docs/kv_layout.md)."""

    ROWS = "rows"
    TILES = "tiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """KV cache of one model on one tier: a block holds K and V of `block_size` consecutive tokens in all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    block_size: int
    order: KVOrder = KVOrder.ROWS

    @classmethod
    def of(cls, model: ModelSpec, *, dtype: DType, block_size: int, order: KVOrder = KVOrder.ROWS) -> "KVSpec":
        """The KV cache of a model."""
        return cls(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
            block_size=block_size,
            order=order,
        )

    @property
    def row_size(self) -> int:
        """Numbers that K or V of one token and head takes in memory."""
        if self.order is KVOrder.ROWS:
            return self.head_dim
        return -(-self.head_dim // TILE_DIMS) * TILE_DIMS

    @property
    def bytes_per_token_layer(self) -> int:
        """Bytes of K and V of one token in one layer, scales included."""
        return 2 * self.num_kv_heads * (self.row_size * self.dtype.num_bytes + self.dtype.num_scale_bytes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return self.bytes_per_token_layer * self.num_layers

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block in all layers."""
        return self.bytes_per_token * self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

"""`KVSpec`: the shape of the KV cache and the bytes that follow from it, for allocator, cost model and benchmarks."""

from dataclasses import dataclass

from ambidex.core.dtypes import DType
from ambidex.core.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """KV cache of one model: a block holds K and V of `block_size` consecutive tokens in all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    block_size: int

    @classmethod
    def of(cls, model: ModelSpec, *, dtype: DType, block_size: int) -> "KVSpec":
        """The KV cache of a model."""
        return cls(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtype,
            block_size=block_size,
        )

    @property
    def bytes_per_token_layer(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.num_bytes

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

"""`KVPool`: the KV bytes of one tier. Which block belongs to whom is the control plane's business (`kv/`)."""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from ambidex.core.dtypes import DType
from ambidex.core.errors import TierFullError
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import KVSpec
from ambidex.core.units import format_size
from ambidex.storage.pinned import register_pinned

TORCH_DTYPES: Final[Mapping[DType, torch.dtype]] = {
    DType.FP32: torch.float32,
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
}


class KVPool:
    """K and V of `num_blocks` blocks on one tier, in the layout of `docs/kv_layout.md`.

    Memory is neither zeroed nor touched: a row holds anything until it is stored.

    Args:
        spec: layers, heads, head_dim, dtype and block size.
        num_blocks: may be 0.
        device: where the tensors lie; the host for DRAM.
        pinned: ask for pinned host memory; `is_pinned` and `num_pin_failures` say what came of it.
        register: pins a tensor for as long as an owner lives; the CUDA driver's way unless a test gives another.
    Raises:
        TierFullError: the device has not that many bytes.
    """

    def __init__(
        self,
        spec: KVSpec,
        tier: Tier,
        num_blocks: int,
        *,
        device: torch.device,
        pinned: bool,
        register: Callable[[Tensor, object], bool] = register_pinned,
    ) -> None:
        self.spec = spec
        self.tier = tier
        self.num_blocks = num_blocks
        self.device = device
        self.k = self._allocate()  # [L, Hkv, N, P, D]
        self.v = self._allocate()  # [L, Hkv, N, P, D]
        self._layers = tuple(zip(self.k, self.v, strict=True))
        self.num_pin_failures = sum(not register(part, self) for part in (self.k, self.v)) if pinned else 0
        self.is_pinned = pinned and self.num_pin_failures == 0

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V of all blocks."""
        return self.num_blocks * self.spec.bytes_per_block

    def layer(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer, each [Hkv, N, P, D]; views."""
        return self._layers[layer_idx]

    def _allocate(self) -> Tensor:
        spec = self.spec
        shape = (spec.num_layers, spec.num_kv_heads, self.num_blocks, spec.block_size, spec.head_dim)
        try:
            return torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype], device=self.device)
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU is one, too
            raise TierFullError(
                f"tier {self.tier}: no {format_size(self.num_bytes)} for {self.num_blocks} KV blocks on {self.device}: "
                f"ask for fewer tokens or a smaller budget"
            ) from error

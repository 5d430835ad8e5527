"""`TiledKVPool`: a pool in host memory in tile order, which the native CPU attention reads at the speed of the bus."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from ambidex.core.ids import KVPart, Tier
from ambidex.core.kv_spec import KVSpec
from ambidex.kernels import api, tiles
from ambidex.kernels.cpu.native import AttentionPool
from ambidex.kernels.dispatch import choose
from ambidex.kernels.reference import kv_tiles
from ambidex.storage.host_memory import HOST_MEMORY, HostMemory
from ambidex.storage.kv_pool import TORCH_DTYPES, KVPool
from ambidex.storage.slow_tier import SlowTier


class TiledKVPool(KVPool):
    """K and V in tile order (`docs/kv_layout.md`); int8 rows have one fp32 scale each.

    Args:
        native: the threads that pack and unpack rows.
    """

    def __init__(
        self,
        spec: KVSpec,
        tier: Tier,
        num_blocks: int,
        *,
        native: AttentionPool,
        pinned: bool,
        memory: HostMemory = HOST_MEMORY,
        parts: Mapping[KVPart, Tensor] | None = None,
        slow: SlowTier | None = None,
    ) -> None:
        super().__init__(
            spec, tier, num_blocks, device=torch.device("cpu"), pinned=pinned, memory=memory, parts=parts, slow=slow
        )
        self.native = native
        scales = (spec.num_layers, spec.num_kv_heads, num_blocks, spec.block_size)
        self.k_scales = torch.empty(scales) if spec.dtype.num_scale_bytes else None  # [L, Hkv, N, P] fp32
        self.v_scales = torch.empty(scales) if spec.dtype.num_scale_bytes else None
        self._pin(*self.tensors[2:])

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        if self.k_scales is None or self.v_scales is None:
            return (self.k, self.v)
        return (self.k, self.v, self.k_scales, self.v_scales)

    def is_within_reach(self, device: torch.device) -> bool:
        """Whether kernels on the device read and write this pool in place: the host's own, and Triton's if pinned."""
        if device.type == "cpu":
            return True
        return self.is_pinned and all(
            choose(op, device.type).name == "triton" for op in ("fetch_blocks", "pack_blocks", "unpack_blocks")
        )

    def layer_tensors(self, layer_idx: int) -> tuple[Tensor, ...]:
        """K, V and for int8 their scales of one layer, each [Hkv, N, …]; views."""
        return tuple(part[layer_idx] for part in self.tensors)

    def scales(self, layer_idx: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Scales of K and V of one layer, each [Hkv, N, P] fp32; None for floating formats."""
        if self.k_scales is None or self.v_scales is None:
            return None, None
        return self.k_scales[layer_idx], self.v_scales[layer_idx]

    def store(self, layer_idx: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        k_pool, v_pool = self.layer(layer_idx)
        k_scales, v_scales = self.scales(layer_idx)
        self._store("k", k_pool, k_scales, slots, k)
        self._store("v", v_pool, v_scales, slots, v)

    def round(self, rows: Tensor) -> Tensor:
        numbers, scales = self._numbers(rows)
        return _values(numbers, scales, rows.dtype)

    def gather(
        self, layer_idx: int, block_ids: Tensor, *, first_key: int, num_keys: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """K and V rows first_key … first_key + num_keys − 1 of blocks of one layer, each [Hkv, num_keys, D].

        Args:
            block_ids: [n] int64; the rows are counted over their n · P rows side by side.
            dtype: of the answer.
        Cost: copies the rows, twice where the dtype is not the pool's.
        """
        keys = slice(first_key, first_key + num_keys)
        gathered = []
        parts: tuple[Literal["k", "v"], ...] = ("k", "v")
        for part, pool, scales in zip(parts, self.layer(layer_idx), self.scales(layer_idx), strict=True):
            rows = self.native.gather_rows(
                part, pool, block_ids, first_key=first_key, num_keys=num_keys, head_dim=self.spec.head_dim
            )
            gathered.append(
                _values(rows, None if scales is None else scales[:, block_ids].flatten(1, 2)[:, keys], dtype)
            )
        return gathered[0], gathered[1]

    def take_rows(self, part: KVPart, layer_idx: int, heads: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        take = kv_tiles.take_v if part is KVPart.V else kv_tiles.take_k
        numbers = take(self.layer(layer_idx)[part is KVPart.V], heads, slots, self.spec.head_dim)
        scales = self.scales(layer_idx)[part is KVPart.V]
        return _values(numbers, None if scales is None else scales.flatten(1)[heads, slots], dtype)

    def read_rows(
        self, part: KVPart, layer_idx: int, block_ids: Tensor, *, num_keys: int, dtype: torch.dtype
    ) -> Tensor:
        pool, scales = self.layer(layer_idx)[part is KVPart.V], self.scales(layer_idx)[part is KVPart.V]
        rows = self.native.gather_rows(
            part.value, pool, block_ids, first_key=0, num_keys=num_keys, head_dim=self.spec.head_dim
        )
        return _values(rows, None if scales is None else scales[:, block_ids].flatten(1, 2)[:, :num_keys], dtype)

    def read_block(self, block_id: int) -> tuple[Tensor, Tensor]:
        dtype = torch.float32 if self.k_scales is not None else self.k.dtype
        k = kv_tiles.unpack_k(self.k[:, :, block_id], self.spec.head_dim)
        v = kv_tiles.unpack_v(self.v[:, :, block_id], self.spec.head_dim)
        if self.k_scales is None or self.v_scales is None:
            return k, v
        return _values(k, self.k_scales[:, :, block_id], dtype), _values(v, self.v_scales[:, :, block_id], dtype)

    def write_block(self, block_id: int, k: Tensor, v: Tensor) -> None:
        """Fill a block; rows on another device are laid out there, so what crosses the link is ready to be read.

        Cost: one launch and no wait if the device reaches this pool; else one copy of K, one of V, and a wait.
        """
        if self.is_within_reach(k.device):
            job = torch.tensor([[0, block_id, 0, self.spec.block_size]]).to(k.device, non_blocking=True)
            self.write_rows(slice(None), job, k, v)
            return
        numbers = [self._numbers(k), self._numbers(v)]
        packed = [kv_tiles.pack_k(numbers[0][0]), kv_tiles.pack_v(numbers[1][0])]
        scales = [part for _, part in numbers if part is not None]
        # Contiguous, so one copy each, into pinned memory; torch would copy into a block's strided places by itself
        # through pageable memory.
        arrived = [part.contiguous().to("cpu", non_blocking=True) for part in (*packed, *scales)]
        torch.cuda.current_stream(k.device).synchronize()
        for part, source in zip(self.tensors, arrived, strict=True):
            part[:, :, block_id].copy_(source)

    def write_rows(self, layers: slice, jobs: Tensor, k: Tensor, v: Tensor) -> None:
        """Write rows into blocks of some layers, by the device that holds the rows.

        Args:
            jobs: [J, 4] int64 on the device of k, as in `kernels.tiles.pack_blocks`.
            k, v: [L, Hkv, T, D] of those layers, in a floating format, on a device that reaches this pool.
        Cost: does not wait for a GPU.
        """
        tiles.pack_blocks(
            k, v, jobs, self.k[layers], self.v[layers],
            k_scales=None if self.k_scales is None else self.k_scales[layers],
            v_scales=None if self.v_scales is None else self.v_scales[layers],
        )  # fmt: skip

    def _store(
        self, part: Literal["k", "v"], pool: Tensor, pool_scales: Tensor | None, slots: Tensor, rows: Tensor
    ) -> None:
        numbers, scales = self._numbers(rows)
        self.native.store_rows(part, pool, slots, numbers.contiguous())
        if pool_scales is not None and scales is not None:
            pool_scales.flatten(1)[:, slots] = scales.T

    def _numbers(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Rows [..., D] in the pool's format, and their scales [...] if it has any."""
        if self.spec.dtype.num_scale_bytes:
            return api.quantize_rows(rows)
        return rows.to(TORCH_DTYPES[self.spec.dtype]), None


def _values(numbers: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Numbers [..., D] of the pool, with their scales [...] if any, in a floating format."""
    return (numbers if scales is None else numbers * scales[..., None]).to(dtype)

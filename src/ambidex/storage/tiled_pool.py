"""`TiledKVPool`: a pool in host memory in tile order, which the native CPU attention reads at the speed of the bus."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ambidex.core.dtypes import DType
from ambidex.core.ids import KVPart, Tier
from ambidex.core.kv_spec import KVSpec
from ambidex.kernels import tiles
from ambidex.kernels.cpu.native import AttentionPool
from ambidex.kernels.dispatch import choose
from ambidex.kernels.reference import kv_tiles
from ambidex.storage.host_memory import HOST_MEMORY, HostMemory
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.row_format import RowFormat
from ambidex.storage.slow_tier import SlowTier


class TiledKVPool(KVPool):
    """K and V in tile order (`docs/kv_layout.md`); rows of integers have scales beside them.

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
        self.formats = {part: RowFormat(spec, part) for part in KVPart}
        """Of the rows of K and V."""
        blocks = (spec.num_layers, spec.num_kv_heads, num_blocks)
        # int8 [L, Hkv, N, P] fp32, int4 [L, Hkv, N, W, P] words of 4 bytes
        self.k_scales, self.v_scales = (
            torch.empty(rows.scales_shape(blocks)) if rows.dtype.has_scales else None for rows in self.formats.values()
        )
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
        """K, V and for integers their scales of one layer, each [Hkv, N, …]; views."""
        return tuple(part[layer_idx] for part in self.tensors)

    def scales(self, layer_idx: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Scales of K and V of one layer, of int8 [Hkv, N, P] fp32, of int4 [Hkv, N, W, P]; None for floats."""
        if self.k_scales is None or self.v_scales is None:
            return None, None
        return self.k_scales[layer_idx], self.v_scales[layer_idx]

    def store(self, layer_idx: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        parts = zip(KVPart, self.layer(layer_idx), self.scales(layer_idx), (k, v), strict=True)
        for part, pool, pool_scales, rows in parts:
            stored, scales = self.formats[part].encode(rows)
            self.native.store_rows(part.value, pool, slots, stored.contiguous())
            if pool_scales is not None and scales is not None:
                self.formats[part].put_scales(pool_scales, slots, scales)

    def round(self, part: KVPart, rows: Tensor) -> Tensor:
        return self.formats[part].decode(*self.formats[part].encode(rows), rows.dtype)

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
        k, v = (self._gather(part, layer_idx, block_ids, keys, dtype) for part in KVPart)
        return k, v

    def take_rows(self, part: KVPart, layer_idx: int, heads: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
        take = kv_tiles.take_v if part is KVPart.V else kv_tiles.take_k
        rows = self.formats[part]
        stored = take(self.layer(layer_idx)[part is KVPart.V], heads, slots, rows.stored_dim)
        scales = self.scales(layer_idx)[part is KVPart.V]
        return rows.decode(stored, None if scales is None else rows.take_scales(scales, heads, slots), dtype)

    def read_rows(
        self, part: KVPart, layer_idx: int, block_ids: Tensor, *, num_keys: int, dtype: torch.dtype
    ) -> Tensor:
        return self._gather(part, layer_idx, block_ids, slice(0, num_keys), dtype)

    def copy_rows(self, part: KVPart, block_ids: Tensor, places: Tensor, to: Tensor) -> None:
        size = self.spec.block_size
        is_v = part is KVPart.V
        num = int(((places + size).clamp(max=to.shape[2]) - places.clamp(min=0)).clamp(min=0).sum())
        for layer_idx, rows in enumerate(to):
            with self.reading(part, layer_idx, block_ids, rows_per_block=len(rows) * num / max(1, len(block_ids))):
                self.native.copy_rows(part.value, self.layer(layer_idx)[is_v], block_ids, places, rows)

    def is_read_by(self, device: torch.device) -> bool:
        """See `KVPool`. Emulated memory is the host's, whose clock tells how long a read must take."""
        return super().is_read_by(device) or (self.slow is None and self.is_within_reach(device))

    def bring_rows(
        self,
        part: KVPart,
        layer_idx: int,
        block_ids: Tensor,
        *,
        num_keys: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        if device.type == "cpu" or not self.is_read_by(device):
            return super().bring_rows(part, layer_idx, block_ids, num_keys=num_keys, dtype=dtype, device=device)
        return self.fetch_rows(part, layer_idx, block_ids, num_keys=num_keys, dtype=dtype)

    def fetch_rows(
        self, part: KVPart, layer_idx: int, block_ids: Tensor, *, num_keys: int, dtype: torch.dtype
    ) -> Tensor:
        """`read_rows` by the device that reaches this pool and holds `block_ids`; the rows lie there.

        Cost: reads the blocks over the link as they are, and turns them into rows behind it; the host does not wait.
        """
        rows, is_v = self.formats[part], part is KVPart.V
        unpack = kv_tiles.unpack_v if is_v else kv_tiles.unpack_k
        stored = unpack(_fetch(self.layer(layer_idx)[is_v], block_ids), rows.stored_dim).flatten(1, 2)[:, :num_keys]
        scales = self.scales(layer_idx)[is_v]
        fetched = None if scales is None else rows.join_scales(_fetch(scales, block_ids))[:, :num_keys]
        return rows.decode(stored, fetched, dtype)

    def read_block(self, block_id: int) -> tuple[Tensor, Tensor]:
        k, v = (self._read_block(part, block_id) for part in KVPart)
        return k, v

    def write_block(self, block_id: int, k: Tensor, v: Tensor) -> None:
        """Fill a block; rows on another device are laid out there, so what crosses the link is ready to be read.

        Cost: one launch and no wait if the device reaches this pool; else one copy of K, one of V, and a wait.
        """
        if self.is_within_reach(k.device):
            job = torch.tensor([[0, block_id, 0, self.spec.block_size]]).to(k.device, non_blocking=True)
            self.write_rows(slice(None), job, k, v)
            return
        encoded = [self.formats[part].encode(rows) for part, rows in zip(KVPart, (k, v), strict=True)]
        packed = [kv_tiles.pack_k(encoded[0][0]), kv_tiles.pack_v(encoded[1][0])]
        scales = [
            part.transpose(2, 3) if self.formats[name].dtype is DType.INT4 else part
            for name, (_, part) in zip(KVPart, encoded, strict=True)
            if part is not None
        ]
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

    def _gather(self, part: KVPart, layer_idx: int, block_ids: Tensor, keys: slice, dtype: torch.dtype) -> Tensor:
        """Rows of one part of blocks of a layer, [Hkv, keys, D]."""
        rows, is_v = self.formats[part], part is KVPart.V
        stored = self.native.gather_rows(
            part.value, self.layer(layer_idx)[is_v], block_ids,
            first_key=keys.start, num_keys=keys.stop - keys.start, head_dim=rows.stored_dim,
        )  # fmt: skip
        scales = self.scales(layer_idx)[is_v]
        return rows.decode(stored, None if scales is None else rows.block_scales(scales, block_ids)[:, keys], dtype)

    def _read_block(self, part: KVPart, block_id: int) -> Tensor:
        """Rows of one part of a block, [L, Hkv, P, D]; of integers in fp32."""
        rows, is_v = self.formats[part], part is KVPart.V
        pool, scales = (self.v, self.v_scales) if is_v else (self.k, self.k_scales)
        unpack = kv_tiles.unpack_v if is_v else kv_tiles.unpack_k
        stored = unpack(pool[:, :, block_id], rows.stored_dim)
        if scales is None:
            return stored
        return rows.decode(stored, rows.scales_of_block(scales, block_id), torch.float32)


def _fetch(pool: Tensor, block_ids: Tensor) -> Tensor:
    """Blocks of one layer [Hkv, N, …] where the ids lie: [Hkv, n, …]."""
    shape = (pool.shape[0], len(block_ids), *pool.shape[2:])
    blocks = torch.empty(shape, dtype=pool.dtype, device=block_ids.device)
    records = [part if part.dim() == 4 else part[..., None] for part in (pool, blocks)]  # scales are one word a row
    tiles.fetch_blocks(records[0], block_ids, records[1])
    return blocks

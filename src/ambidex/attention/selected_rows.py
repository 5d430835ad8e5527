"""`SelectedRows`: reads rows of K and V for decode queries, from where they are kept, and counts them."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ambidex.attention.context_rows import TIERS
from ambidex.attention.row_store import take_rows
from ambidex.attention.step_requests import Work
from ambidex.core.ids import KVPart, Lane, Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.storage.host_rows import HostRows
from ambidex.storage.kv_pool import KVPool

LANES = (Lane.GPU, Lane.CPU)
"""Of `TIERS`: rows of each tier count for its lane."""


class SelectedRows:
    """Rows of a step's requests.

    Args:
        spec: KV heads.
        pools: of both tiers.
        dtype: in which the policy scores.
    """

    def __init__(self, spec: ModelSpec, pools: Mapping[Tier, KVPool], dtype: torch.dtype) -> None:
        self._spec = spec
        self._pools = pools
        self._dtype = dtype
        self._device = pools[Tier.GPU].device
        self.begin()

    def begin(self) -> None:
        """Count anew, for another step."""
        self._num_own_bytes = 0
        self._num_rows = torch.zeros(len(TIERS), dtype=torch.int64, device=self._device)

    def lane_bytes(self) -> dict[Lane, int]:
        """Bytes that were read since `begin`: rows of each tier by its lane; a policy's copies count for the GPU lane.

        Cost: waits for the device.
        """
        read = self.bytes_of(self._num_rows.tolist())
        read[Lane.GPU] += self._num_own_bytes
        return read

    def bytes_of(self, num_rows: list[int]) -> dict[Lane, int]:
        """Bytes of so many rows of K or V of each tier, by its lane."""
        sizes = [self._pools[tier].spec.bytes_per_token_layer // (2 * self._spec.num_kv_heads) for tier in TIERS]
        return {lane: count * size for lane, count, size in zip(LANES, num_rows, sizes, strict=True)}

    def note_bytes(self, num_bytes: int) -> None:
        """Count bytes of a policy's own copies."""
        self._num_own_bytes += num_bytes

    def write(self, layer_idx: int, work: Work, rows: HostRows, k: Tensor, v: Tensor) -> None:
        """Write a request's new rows of a layer behind those that are there."""
        new, to = slice(work.first_row, work.first_row + work.num_rows), slice(work.start, work.start + work.num_rows)
        pool = self._pools[Tier.GPU]
        rows.k_there[layer_idx, :, to] = pool.round(KVPart.K, k[new]).transpose(0, 1)
        rows.v_there[layer_idx, :, to] = pool.round(KVPart.V, v[new]).transpose(0, 1)

    def take(self, work: Work, part: KVPart, layer_idx: int, places: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of K or V at some places [Hkv, M], on the device: [Hkv, M, D]."""
        if work.rows is None:
            return work.context.take(part, layer_idx, places, dtype)
        there = work.rows.k_there if part is KVPart.K else work.rows.v_there
        num_bytes = places.numel() * there.shape[3] * there.itemsize
        with work.rows.home.copying(part, layer_idx, num_bytes):
            return take_rows(there[layer_idx], places, work.rows.base).to(dtype)

    def read(self, work: Work, part: KVPart, layer_idx: int, dtype: torch.dtype) -> Tensor:
        """All rows of K or V, on the device: [Hkv, S, D]."""
        if work.rows is None:
            return work.context.read(part, layer_idx, dtype)
        there = work.rows.k_there if part is KVPart.K else work.rows.v_there
        rows = there[layer_idx, :, : work.start + work.num_rows]
        with work.rows.home.copying(part, layer_idx, rows.numel() * rows.itemsize):
            return rows.to(self._device, dtype)

    def key_reader(self, work: Work, layer_idx: int) -> Callable[[int], Tensor]:
        """What reads K of the first so many tokens, in the policy's format: all of it at the first time."""
        keys = _Once(lambda: self.read(work, KVPart.K, layer_idx, self._dtype))

        def read(num_keys: int) -> Tensor:
            is_dram = work.context.is_dram[:num_keys]
            on_dram = is_dram.sum() * self._spec.num_kv_heads
            self._num_rows += torch.stack((num_keys * self._spec.num_kv_heads - on_dram, on_dram))
            return keys.get()[:, :num_keys]

        return read

    def key_taker(self, work: Work, layer_idx: int) -> Callable[[Tensor], Tensor]:
        """What reads K of some tokens, in the policy's format."""

        def take(places: Tensor) -> Tensor:
            on_dram = work.context.is_dram[places].sum()
            self._num_rows += torch.stack((places.numel() - on_dram, on_dram))
            return self.take(work, KVPart.K, layer_idx, places, self._dtype)

        return take

    def count(self, work: Work, union: Tensor) -> None:
        """Count rows of K or V that are read, by tier."""
        on_dram = (union & work.context.is_dram[: union.shape[1]]).sum()
        self._num_rows += torch.stack((union.sum() - on_dram, on_dram))


class _Once:
    """A value that is made when it is first asked for."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self._make = make
        self._value: Tensor | None = None

    def get(self) -> Tensor:
        if self._value is None:
            self._value = self._make()
        return self._value

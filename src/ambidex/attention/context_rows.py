"""`ContextRows`: K and V of one request by position, wherever they lie."""

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from ambidex.core.ids import KVPart, Tier
from ambidex.core.step import BlockRef
from ambidex.storage.kv_pool import KVPool

TIERS: Final = (Tier.GPU, Tier.DRAM)


class ContextRows:
    """Positions 0 … S − 1 of a request during one step.

    Args:
        blocks: those that cover the positions, in order.
        pools: `Tier.GPU` is the accelerator's, where answers go; `Tier.DRAM` in host memory.
    """

    def __init__(self, blocks: Sequence[BlockRef], num_keys: int, *, pools: Mapping[Tier, KVPool]) -> None:
        self.num_keys = num_keys
        self._pools = pools
        self._device = pools[Tier.GPU].device
        size = self._block_size = pools[Tier.GPU].spec.block_size
        self._num_kv_heads = pools[Tier.GPU].spec.num_kv_heads
        used = blocks[: -(-num_keys // size)]
        ids = torch.tensor([block.block_id for block in used], dtype=torch.int64)
        is_dram = torch.tensor([block.tier is Tier.DRAM for block in used], dtype=torch.bool)
        offsets = torch.arange(num_keys) % size
        self.slots = (ids.repeat_interleave(size)[:num_keys] * size + offsets).to(self._device)  # [S]
        self.is_dram = is_dram.repeat_interleave(size)[:num_keys].to(self._device)  # [S]
        chosen_of = dict(zip(TIERS, (~is_dram, is_dram), strict=True))
        # Of each tier its blocks, and the position of each one's first row.
        self._blocks = {
            tier: (ids[chosen], torch.nonzero(chosen)[:, 0] * size)
            for tier, chosen in chosen_of.items()
            if chosen.any()
        }
        self._parts = {
            tier: (ids[chosen], torch.nonzero(chosen.repeat_interleave(size)[:num_keys])[:, 0].to(self._device))
            for tier, chosen in chosen_of.items()
            if chosen.any()
        }
        self._ids: dict[Tier, Tensor] = {}  # of blocks that were read, where they are asked for

    @property
    def is_read_by_host(self) -> bool:
        """Whether the host reads some of the rows, so that new ones must be waited for before `read`."""
        return not all(self._pools[tier].is_read_by(self._device) for tier in self._parts)

    def read(self, part: KVPart, layer_idx: int, dtype: torch.dtype) -> Tensor:
        """K or V of all positions, [Hkv, S, D] on the accelerator."""
        rows = None
        for tier, (ids, positions) in self._parts.items():
            pool = self._pools[tier]
            if tier not in self._ids:
                self._ids[tier] = ids.to(self._device if pool.is_read_by(self._device) else pool.device)
            with pool.reading(part, layer_idx, ids, rows_per_block=self._num_kv_heads * len(positions) / len(ids)):
                found = pool.bring_rows(
                    part, layer_idx, self._ids[tier], num_keys=len(positions), dtype=dtype, device=self._device
                )
            if len(self._parts) == 1:
                return found
            if rows is None:
                rows = torch.empty(
                    (found.shape[0], self.num_keys, found.shape[2]), dtype=dtype, device=self._device
                )  # [Hkv, S, D]
            rows[:, positions] = found
        assert rows is not None, "a request that attends has at least its own key"
        return rows

    def take(self, part: KVPart, layer_idx: int, places: Tensor, dtype: torch.dtype) -> Tensor:
        """K or V at some positions.

        Args:
            places: [Hkv, M] int64, positions for each KV head.
        Returns:
            [Hkv, M, D] on the accelerator.
        """
        num_heads, num_places = places.shape
        heads = torch.arange(num_heads, device=places.device).repeat_interleave(num_places)
        flat = places.flatten()
        slots = self.slots[flat]
        rows = None
        for tier, is_here in self._tiers_of(flat):
            pool = self._pools[tier]
            own_heads, own_slots = (heads, slots) if is_here is None else (heads[is_here], slots[is_here])
            with pool.reading(part, layer_idx, own_slots // self._block_size, rows_per_block=1):
                found = pool.take_rows(part, layer_idx, own_heads.to(pool.device), own_slots.to(pool.device), dtype)
            found = found.to(self._device)
            if is_here is None:
                rows = found
                continue
            if rows is None:
                rows = torch.empty((len(flat), found.shape[1]), dtype=dtype, device=self._device)
            rows[is_here] = found
        assert rows is not None, "a request has blocks on some tier"
        return rows.view(num_heads, num_places, -1)

    def copy_to_host(self, part: KVPart, to: Tensor, first: int) -> None:
        """Copy K or V of positions `first`, `first` + 1, … of all layers.

        Args:
            to: [L, Hkv, n, D] in host memory, which a GPU's driver has pinned, in the number format of the pools; the
                rows of a head are side by side.
        Cost: reads the rows once. Rows that come from a GPU are there when its current stream is at its end.
        """
        size, end = self._block_size, first + to.shape[2]
        for tier, (ids, places) in self._blocks.items():
            is_wanted = (places + size > first) & (places < end)
            if bool(is_wanted.any()):
                self._pools[tier].copy_rows(part, ids[is_wanted], places[is_wanted] - first, to)

    def _tiers_of(self, flat: Tensor) -> list[tuple[Tier, Tensor | None]]:
        """The tiers of some positions, each with the mask of those that lie there; None: all."""
        if len(self._parts) == 1:
            return [(tier, None) for tier in self._parts]
        is_dram = self.is_dram[flat]
        return [(Tier.GPU, ~is_dram), (Tier.DRAM, is_dram)]

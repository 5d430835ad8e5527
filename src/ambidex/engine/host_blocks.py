"""How many blocks host memory holds, and how K and V of them are laid over DRAM and the CXL tier. Numbers only."""

import math
import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ambidex.core.errors import ConfigError
from ambidex.core.ids import KVPart, Tier
from ambidex.core.kv_mapping import HostLayout, KVMapping
from ambidex.core.kv_spec import KeptRows, KVSpec
from ambidex.core.units import format_size

Pair = tuple[int, int]
"""Bytes, or budgets, in DRAM and in the CXL tier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBlocks:
    """Blocks in host memory as they are laid out, and what each kind of them takes.

    A block counts for `Tier.DRAM` if its K lies there, for `Tier.CXL` if it is spilled. `block_bytes` are K, V and
    scales of a block of a kind on each tier of memory; `beside_bytes` what policies keep of each block in DRAM. Where a
    policy keeps rows, there is room for those of `num_row_blocks` blocks, of host memory or not, of `row_bytes` each.
    """

    layout: HostLayout
    block_bytes: Mapping[Tier, Mapping[Tier, int]]
    beside_bytes: int = 0
    num_row_blocks: int = 0
    row_bytes: Mapping[Tier, int] = field(default_factory=dict)

    @property
    def num_blocks(self) -> dict[Tier, int]:
        """Blocks of each kind; spilled ones are named only where there are any."""
        spilled = {Tier.CXL: self.layout.num_spilled} if self.layout.num_spilled else {}
        return {Tier.DRAM: self.layout.num_near, **spilled}

    def bytes_of(self, num_blocks: Mapping[Tier, int]) -> dict[Tier, int]:
        """K, V and scales of so many blocks of each kind, by the tier of memory where they lie."""
        sums = dict.fromkeys(self.block_bytes[Tier.DRAM], 0)
        for kind, sizes in self.block_bytes.items():
            for tier, size in sizes.items():
                sums[tier] += num_blocks.get(kind, 0) * size
        return sums


def divide_host(
    mapping: KVMapping,
    spec: KVSpec,
    *,
    dram: int,
    cxl: int,
    most_blocks: int,
    beside: int = 0,
    num_near_v: int = 0,
    rows: KeptRows | None = None,
    num_gpu_blocks: int = 0,
) -> HostBlocks:
    """Lay out as many blocks as two budgets hold, at most `most_blocks`.

    K goes to DRAM and V to the CXL tier, but for that of the first `num_near_v` layers. Where the CXL tier is full,
    V of more layers goes to DRAM, of as few as may be. Where DRAM is full, V of all layers goes to the CXL tier; and
    where that is not enough, K of some blocks: who gives out blocks sees to it that these are the oldest.

    Rows that a policy keeps of K and V lie where K and V of blocks in host memory do. Those of blocks on the
    accelerator get up to half of the budgets, and what blocks in host memory with their rows leave.

    Args:
        mapping: one of the three, not `auto`.
        dram, cxl: bytes that are left for blocks.
        beside: bytes that policies keep of each block, always in DRAM.
        num_near_v: first layers in which the CPU reads V in every step, whatever it does in the others.
        rows: what a policy keeps of each token, of these blocks and of `num_gpu_blocks` others.
    Raises:
        ConfigError: the budget of the CXL tier does not hold its part of one block.
    """
    layouts = [*_layouts(mapping, spec, beside, num_near_v, rows)]
    best, best_count, num_gpu_rows = layouts[0], -1, 0
    wanted_rows = num_gpu_blocks if rows is not None else 0
    for candidate in layouts:
        num_rows = _count_fitting(wanted_rows, (dram // 2, cxl // 2), candidate.row_sizes)
        left = _subtract((dram, cxl), num_rows, candidate.row_sizes)
        count = _count_fitting(most_blocks, left, candidate.sizes)
        left = _subtract(left, count, candidate.sizes)
        num_rows += _count_fitting(wanted_rows - num_rows, left, candidate.row_sizes)
        if count + num_rows > best_count + num_gpu_rows:
            best, best_count, num_gpu_rows = candidate, count, num_rows
        if count == most_blocks and num_rows == wanted_rows:
            break
    dram, cxl = _subtract((dram, cxl), num_gpu_rows, best.row_sizes)
    if mapping is not KVMapping.DRAM and cxl < best.sizes[1]:
        raise ConfigError(
            f"`cxl_memory` leaves {format_size(cxl)} for K and V, which hold not one block: "
            f"{format_size(best.sizes[1])} of each block lie there: give more, or a smaller `block_size`"
        )
    near, spilled = max(0, best_count), 0
    near_bytes, number_bytes = best.near, sum(spec.part_bytes_per_block(part) for part in KVPart)
    spilled_bytes = {Tier.DRAM: spec.scale_bytes_per_block, Tier.CXL: number_bytes}
    if mapping is KVMapping.K_DRAM_V_CXL and best.first_cxl_layer == 0 and near < most_blocks:
        spilled, near = _count_spilled(
            spec, near, most_blocks, dram=dram, cxl=cxl, near_sizes=best.sizes,
            spilled_sizes=(
                spilled_bytes[Tier.DRAM] + beside + best.row_sizes[0], spilled_bytes[Tier.CXL] + best.row_sizes[1]
            ),
        )  # fmt: skip
    return HostBlocks(
        layout=HostLayout(mapping=mapping, num_near=near, num_spilled=spilled, first_cxl_layer=best.first_cxl_layer),
        block_bytes={Tier.DRAM: near_bytes, **({Tier.CXL: spilled_bytes} if spilled else {})},
        beside_bytes=beside,
        num_row_blocks=num_gpu_rows + near + spilled if rows is not None else 0,
        row_bytes=dict(zip(near_bytes, best.row_sizes, strict=False)) if rows is not None else {},
    )


def _count_fitting(most: int, budgets: Pair, sizes: Pair) -> int:
    """How many of so many bytes each both budgets hold."""
    return min([most, *(budget // size for budget, size in zip(budgets, sizes, strict=True) if size)])


def _subtract(budgets: Pair, count: int, sizes: Pair) -> Pair:
    """What so many of so many bytes each leave."""
    return budgets[0] - count * sizes[0], budgets[1] - count * sizes[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """A way to lay out blocks: K, V and scales of one on each tier, what one takes of both budgets, and what the rows
    that a policy keeps of it take of that."""

    first_cxl_layer: int
    near: Mapping[Tier, int]
    sizes: Pair
    row_sizes: Pair


def _layouts(
    mapping: KVMapping, spec: KVSpec, beside: int, num_near_v: int, rows: KeptRows | None
) -> Iterator[_Layout]:
    """The one that is wanted, then those with less in the CXL tier, then those with more."""
    k, v, scales = spec.part_bytes_per_block(KVPart.K), spec.part_bytes_per_block(KVPart.V), spec.scale_bytes_per_block
    if mapping is KVMapping.DRAM:
        size = k + v + scales
        row_sizes = _row_sizes(mapping, spec, rows, 0)
        yield _Layout(
            first_cxl_layer=0,
            near={Tier.DRAM: size},
            sizes=(size + beside + row_sizes[0], row_sizes[1]),
            row_sizes=row_sizes,
        )
        return
    wanted = min(num_near_v, spec.num_layers - 1)
    numbers_of_layers = (
        [0] if mapping is KVMapping.INTERLEAVE else [*range(wanted, spec.num_layers), *reversed(range(wanted))]
    )
    if mapping is KVMapping.INTERLEAVE:
        k = v = (k + v) // 2  # pages of both in turn on both
    for num_layers in numbers_of_layers:
        moved = v // spec.num_layers * num_layers
        near = {Tier.DRAM: k + scales + moved, Tier.CXL: v - moved}
        row_sizes = _row_sizes(mapping, spec, rows, num_layers)
        yield _Layout(
            first_cxl_layer=num_layers,
            near=near,
            sizes=(near[Tier.DRAM] + beside + row_sizes[0], near[Tier.CXL] + row_sizes[1]),
            row_sizes=row_sizes,
        )


def _row_sizes(mapping: KVMapping, spec: KVSpec, rows: KeptRows | None, first_cxl_layer: int) -> Pair:
    """Bytes in DRAM and in the CXL tier of the rows of one block."""
    if rows is None:
        return 0, 0
    of_layer, num_layers = rows.part_bytes_per_layer * spec.block_size, rows.num_layers
    num_far = {
        KVMapping.DRAM: 0,
        KVMapping.INTERLEAVE: num_layers,
        KVMapping.K_DRAM_V_CXL: num_layers - first_cxl_layer,
    }[mapping]
    return (2 * num_layers - num_far) * of_layer + rows.score_bytes * spec.block_size, num_far * of_layer


def _count_spilled(
    spec: KVSpec,
    near: int,
    most_blocks: int,
    *,
    dram: int,
    cxl: int,
    near_sizes: Pair,
    spilled_sizes: Pair,
) -> tuple[int, int]:
    """Spilled and near blocks: each kind a multiple of the blocks whose K fills whole pages, as a page lies on one
    node."""
    record = spec.part_bytes_per_block(KVPart.K) // (spec.num_layers * spec.num_kv_heads)
    whole = mmap.PAGESIZE // math.gcd(record, mmap.PAGESIZE)
    kept = near // whole * whole
    left = [budget - kept * size for budget, size in zip((dram, cxl), near_sizes, strict=True)]
    fitting = [budget // size for budget, size in zip(left, spilled_sizes, strict=True) if size]
    spilled = max(0, min(most_blocks - kept, *fitting)) // whole * whole
    return (spilled, kept) if kept + spilled > near else (0, near)

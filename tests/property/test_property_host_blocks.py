"""Blocks laid over DRAM and a CXL tier: no budget is ever exceeded, and nothing that fits is left out."""

import math
import mmap

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError
from ambidex.core.ids import KVPart, Tier
from ambidex.core.kv_mapping import KVMapping
from ambidex.core.kv_spec import KeptRows, KVOrder, KVSpec
from ambidex.engine.host_blocks import HostBlocks, divide_host

FLOATS, INTEGERS = (DType.FP32, DType.BF16), (DType.INT8, DType.INT4)
FORMATS = [*((dtype, dtype) for dtype in FLOATS), *((k, v) for k in INTEGERS for v in INTEGERS)]
"""Of K and V."""


def make_spec(
    formats: tuple[DType, DType], num_layers: int, num_kv_heads: int, head_dim: int, block_size: int
) -> KVSpec:
    return KVSpec(
        num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=formats[0], v_dtype=formats[1],
        block_size=block_size, order=KVOrder.TILES,
    )  # fmt: skip


SPECS = st.builds(
    make_spec, st.sampled_from(FORMATS), st.integers(1, 5), st.integers(1, 3), st.sampled_from((16, 64, 80)),
    st.sampled_from((16, 64)),
)  # fmt: skip


def used(host: HostBlocks) -> dict[Tier, int]:
    sizes = host.bytes_of(host.num_blocks)
    sizes[Tier.DRAM] += host.layout.num_blocks * host.beside_bytes
    return sizes


@given(
    SPECS,
    st.sampled_from(KVMapping),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 200),
    st.integers(0, 999),
)
def test_no_budget_is_exceeded(
    spec: KVSpec, mapping: KVMapping, dram_blocks: int, cxl_blocks: int, most: int, beside: int
) -> None:
    assume(mapping is not KVMapping.AUTO)
    dram, cxl = dram_blocks * spec.bytes_per_block // 3, cxl_blocks * spec.bytes_per_block // 3
    try:
        host = divide_host(mapping, spec, dram=dram, cxl=cxl, most_blocks=most, beside=beside)
    except ConfigError:  # not one block: its own test looks at that
        return
    sizes = used(host)
    assert sizes[Tier.DRAM] <= dram
    assert sizes.get(Tier.CXL, 0) <= cxl
    assert 0 <= host.layout.num_blocks <= most
    assert sum(host.num_blocks.values()) == host.layout.num_blocks


@given(SPECS, st.sampled_from(KVMapping), st.integers(0, 200), st.integers(0, 200), st.integers(1, 100))
def test_bytes_of_each_tier_are_those_of_the_layout(
    spec: KVSpec, mapping: KVMapping, dram_blocks: int, cxl_blocks: int, most: int
) -> None:
    assume(mapping is not KVMapping.AUTO)
    dram, cxl = dram_blocks * spec.bytes_per_block // 3, (cxl_blocks + 3) * spec.bytes_per_block // 3
    host = divide_host(mapping, spec, dram=dram, cxl=cxl, most_blocks=most)
    layout, part_bytes = host.layout, {part: spec.part_bytes_per_block(part) for part in KVPart}
    near = sum(
        layout.cxl_share(part, layer) * part_bytes[part] / spec.num_layers
        for part in KVPart
        for layer in range(spec.num_layers)
    )
    far = layout.num_near * near + layout.num_spilled * sum(part_bytes.values())
    sizes = host.bytes_of(host.num_blocks)
    assert sizes.get(Tier.CXL, 0) == pytest.approx(far)
    assert sum(sizes.values()) == layout.num_blocks * spec.bytes_per_block


@given(SPECS, st.integers(1, 50))
def test_v_lies_in_the_cxl_tier_where_there_is_room(spec: KVSpec, most: int) -> None:
    plenty = most * spec.bytes_per_block
    host = divide_host(KVMapping.K_DRAM_V_CXL, spec, dram=plenty, cxl=plenty, most_blocks=most)
    assert (host.layout.num_near, host.layout.num_spilled, host.layout.first_cxl_layer) == (most, 0, 0)


@given(SPECS, st.integers(2, 50))
def test_v_of_first_layers_goes_to_dram_where_the_cxl_tier_is_small(spec: KVSpec, most: int) -> None:
    assume(spec.num_layers > 1)
    cxl = most * spec.part_bytes_per_block(KVPart.V) // spec.num_layers  # V of one layer
    host = divide_host(KVMapping.K_DRAM_V_CXL, spec, dram=most * spec.bytes_per_block, cxl=cxl, most_blocks=most)
    assert (host.layout.num_near, host.layout.first_cxl_layer) == (most, spec.num_layers - 1)


@given(SPECS, st.integers(1, 50), st.integers(0, 9))
def test_v_of_layers_in_which_the_cpu_reads_it_lies_in_dram_where_there_is_room(
    spec: KVSpec, most: int, num_near_v: int
) -> None:
    plenty = most * spec.bytes_per_block
    host = divide_host(KVMapping.K_DRAM_V_CXL, spec, dram=plenty, cxl=plenty, most_blocks=most, num_near_v=num_near_v)
    assert host.layout.first_cxl_layer == min(num_near_v, spec.num_layers - 1)
    k_and_scales = most * (spec.part_bytes_per_block(KVPart.K) + spec.scale_bytes_per_block)
    short = divide_host(
        KVMapping.K_DRAM_V_CXL, spec, dram=k_and_scales, cxl=plenty, most_blocks=most, num_near_v=num_near_v
    )
    assert (short.layout.num_near, short.layout.first_cxl_layer) == (most, 0)


@given(SPECS, st.integers(1, 20))
def test_k_is_spilled_where_dram_is_small_in_whole_pages(spec: KVSpec, units: int) -> None:
    assume(not spec.dtype.has_scales)  # which scales lie in DRAM, also of spilled blocks
    record = spec.part_bytes_per_block(KVPart.K) // (spec.num_layers * spec.num_kv_heads)
    most = 4 * units * (mmap.PAGESIZE // math.gcd(record, mmap.PAGESIZE))
    dram = most // 2 * spec.part_bytes_per_block(KVPart.K)  # K of half of the blocks
    host = divide_host(KVMapping.K_DRAM_V_CXL, spec, dram=dram, cxl=2 * most * spec.bytes_per_block, most_blocks=most)
    assert host.layout.num_blocks == most
    assert host.layout.num_spilled == most // 2
    assert host.layout.num_near * record % mmap.PAGESIZE == 0


def test_tier_that_holds_not_one_block_is_refused_with_its_size() -> None:
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=64, dtype=DType.BF16, block_size=64, order=KVOrder.TILES)
    with pytest.raises(ConfigError, match=r"`cxl_memory` leaves 1\.0 KiB .*hold not one block: 8\.0 KiB"):
        divide_host(KVMapping.INTERLEAVE, spec, dram=1 << 20, cxl=1024, most_blocks=5)


@given(
    SPECS,
    st.sampled_from(KVMapping),
    st.integers(0, 300),
    st.integers(0, 300),
    st.integers(0, 100),
    st.integers(0, 100),
    st.integers(0, 3),
    st.booleans(),
)
def test_rows_that_a_policy_keeps_are_in_the_budgets(
    spec: KVSpec,
    mapping: KVMapping,
    dram_blocks: int,
    cxl_blocks: int,
    most: int,
    num_gpu_blocks: int,
    num_near_v: int,
    has_scores: bool,
) -> None:
    assume(mapping is not KVMapping.AUTO)
    rows = KeptRows(
        num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, number_bytes=2,
        num_q_heads=4 if has_scores else 0,
    )  # fmt: skip
    dram, cxl = dram_blocks * spec.bytes_per_block // 3, cxl_blocks * spec.bytes_per_block // 3
    try:
        host = divide_host(
            mapping, spec, dram=dram, cxl=cxl, most_blocks=most, num_near_v=num_near_v, rows=rows,
            num_gpu_blocks=num_gpu_blocks,
        )  # fmt: skip
    except ConfigError:
        return
    sizes = used(host)
    for tier, size in host.row_bytes.items():
        sizes[tier] += host.num_row_blocks * size
    assert sizes[Tier.DRAM] <= dram
    assert sizes.get(Tier.CXL, 0) <= cxl
    of_block = 2 * spec.num_layers * rows.part_bytes_per_layer * spec.block_size + rows.score_bytes * spec.block_size
    assert sum(host.row_bytes.values()) == of_block
    assert host.layout.num_blocks <= host.num_row_blocks <= host.layout.num_blocks + num_gpu_blocks
    if dram > 2 * (most + num_gpu_blocks + 1) * (spec.bytes_per_block + of_block) and mapping is KVMapping.DRAM:
        assert host.num_row_blocks == most + num_gpu_blocks

"""Attention over two tiers equals attention over the whole context, however the context is cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiered_world import TieredWorld, TierOf, make_model_spec

from ambidex.core.dtypes import DType
from ambidex.core.errors import InternalError, ShapeError
from ambidex.core.ids import BlockId, Lane, RequestId, Tier
from ambidex.core.step import BlockRef, ScheduledRequest
from ambidex.kernels import dispatch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

SPLITS: dict[str, TierOf] = {
    "all_gpu": lambda _request, _block: Tier.GPU,
    "all_dram": lambda _request, _block: Tier.DRAM,
    "first_block_gpu": lambda _request, block: Tier.GPU if block == 0 else Tier.DRAM,
    "first_block_dram": lambda _request, block: Tier.DRAM if block == 0 else Tier.GPU,
    "alternating": lambda request, block: (Tier.GPU, Tier.DRAM)[(request + block) % 2],
}

RAGGED_STEPS = [
    [(0, 9)],  # a first chunk without old keys
    [(0, 5), (1, 1)],
    [(1, 7), (0, 1), (2, 3)],
    [(0, 1), (1, 1), (2, 1)],
    [(2, 1), (0, 1)],
    [(1, 4), (2, 6), (0, 1)],
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP16])
@pytest.mark.parametrize("block_size", [1, 4, 7, 16])
@pytest.mark.parametrize("split", SPLITS)
def test_attend_over_ragged_steps_equals_whole_context(split: str, block_size: int, dtype: DType, device: str) -> None:
    spec = make_model_spec((None, 5))
    world = TieredWorld(spec, SPLITS[split], block_size=block_size, dtype=dtype, device=device)
    for work in RAGGED_STEPS:
        world.step(work)


@pytest.mark.parametrize("kv_dtype", [DType.BF16, DType.FP16, DType.INT8, DType.INT4])
@pytest.mark.parametrize("windows", [(None, 5), (20, 1)])
@pytest.mark.parametrize("split", SPLITS)
def test_attend_over_tiles_narrower_than_the_queries_equals_whole_context_of_rounded_rows(
    split: str, windows: tuple[int | None, ...], kv_dtype: DType
) -> None:
    world = TieredWorld(make_model_spec(windows), SPLITS[split], block_size=16, dtype=DType.FP32, kv_dtype=kv_dtype)
    for work in [*RAGGED_STEPS, [(0, 20), (1, 1)], [(1, 70), (2, 1)], [(0, 1), (1, 1), (2, 1)]]:
        world.step(work)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", dispatch.IMPLEMENTATIONS["attend"])
@pytest.mark.parametrize("windows", [(1,), (2, 1), (3, None, 8, 3), (1000, 6)])
def test_attend_with_sliding_windows_equals_whole_context(
    windows: tuple[int | None, ...], name: str, device: str
) -> None:
    world = TieredWorld(make_model_spec(windows), SPLITS["alternating"], block_size=3, device=device)
    with dispatch.override("attend", name):
        for work in RAGGED_STEPS:
            world.step(work)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(9, 3, 20), (4, 4, 80), (7, 1, 256)])
def test_attend_with_odd_heads_equals_whole_context(
    num_q_heads: int, num_kv_heads: int, head_dim: int, device: str
) -> None:
    spec = make_model_spec((None, 4), num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    world = TieredWorld(spec, SPLITS["alternating"], block_size=4, device=device)
    for work in RAGGED_STEPS:
        world.step(work)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("full", [Tier.GPU, Tier.DRAM])
def test_attend_with_zero_blocks_on_a_tier_equals_whole_context(full: Tier, device: str) -> None:
    num_blocks = {Tier.GPU: 0, Tier.DRAM: 0, full: 64}
    world = TieredWorld(
        make_model_spec((None,)), lambda _request, _block: full, block_size=4, num_blocks=num_blocks, device=device
    )
    for work in RAGGED_STEPS:
        world.step(work)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_attend_over_random_steps_equals_whole_context(data: st.DataObject) -> None:
    windows = tuple(data.draw(st.lists(st.none() | st.integers(1, 12), min_size=1, max_size=3)))
    tiers = data.draw(st.lists(st.sampled_from([Tier.GPU, Tier.DRAM]), min_size=1, max_size=20))
    steps = data.draw(st.lists(st.dictionaries(st.integers(0, 2), st.integers(1, 8), min_size=1), max_size=6))
    world = TieredWorld(
        make_model_spec(windows),
        lambda request, block: tiers[(7 * request + block) % len(tiers)],
        block_size=data.draw(st.integers(1, 6) | st.just(16)),
        num_blocks={Tier.GPU: 160, Tier.DRAM: 160},
        seed=data.draw(st.integers(0, 1000)),
    )
    for work in steps:
        world.step(list(work.items()))


def test_lane_bytes_of_a_decode_step_counts_visible_keys_by_tier() -> None:
    spec = make_model_spec((None, 5), num_q_heads=2, num_kv_heads=1, head_dim=4)
    world = TieredWorld(spec, SPLITS["alternating"], block_size=4)
    world.step([(0, 10)])  # positions 0-3 GPU, 4-7 DRAM, 8-9 GPU
    world.step([(0, 1)])
    token_layer_bytes = 2 * 1 * 4 * 4  # K and V, heads, head_dim, fp32
    # full layer: GPU 6 old and 1 own, DRAM 4; window 5: keys 6-10, of which DRAM 6-7, GPU 8-9 and the own
    assert world.attention.lane_bytes == {
        Lane.GPU: (7 + 3) * token_layer_bytes,
        Lane.CPU: (4 + 2) * token_layer_bytes,
    }


def test_lane_bytes_after_begin_starts_at_zero() -> None:
    world = TieredWorld(make_model_spec(), SPLITS["all_dram"], block_size=4)
    world.step([(0, 10)])
    world.attention.begin([])
    assert world.attention.lane_bytes == {Lane.GPU: 0, Lane.CPU: 0}


def test_attend_when_the_step_has_no_tokens_gives_nothing() -> None:
    world = TieredWorld(make_model_spec(), SPLITS["all_gpu"], block_size=4)
    world.attention.begin([])
    assert world.attention.attend(0, torch.empty(0, 6, 16), torch.empty(0, 2, 16), torch.empty(0, 2, 16)).numel() == 0


def test_attend_with_other_number_of_tokens_than_the_step_raises() -> None:
    world = TieredWorld(make_model_spec(), SPLITS["all_gpu"], block_size=4)
    world.attention.begin([world.schedule(0, 3)])
    with pytest.raises(ShapeError, match="expected T=3 tokens of this step, got 2"):
        world.attention.attend(0, torch.ones(2, 6, 16), torch.ones(2, 2, 16), torch.ones(2, 2, 16))


def test_begin_when_blocks_do_not_cover_the_tokens_raises() -> None:
    world = TieredWorld(make_model_spec(), SPLITS["all_gpu"], block_size=4)
    with pytest.raises(InternalError, match="1 blocks of 4 tokens do not cover its context of 5 tokens"):
        world.attention.begin([scheduled(num_tokens=5, tier=Tier.GPU)])


def test_begin_with_a_block_on_a_tier_without_pool_raises() -> None:
    world = TieredWorld(make_model_spec(), SPLITS["all_gpu"], block_size=4)
    with pytest.raises(InternalError, match="blocks on cxl, which has no pool"):
        world.attention.begin([scheduled(num_tokens=3, tier=Tier.CXL)])


def scheduled(*, num_tokens: int, tier: Tier) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=RequestId("r"),
        token_ids=(0,) * num_tokens,
        start=0,
        blocks=(BlockRef(tier, BlockId(0)),),
        is_sampled=False,
    )

"""The stream lane: keys in host memory, brought to the accelerator in pieces, give what they give in place."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiered_world import TieredWorld, TierOf, make_model_spec

from ambidex.core.dtypes import DType
from ambidex.core.ids import Lane, Tier

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SPLITS: dict[str, TierOf] = {
    "all_dram": lambda _request, _block: Tier.DRAM,
    "middle_dram": lambda _request, block: Tier.DRAM if 0 < block < 6 else Tier.GPU,
    "alternating": lambda request, block: (Tier.GPU, Tier.DRAM)[(request + block) % 2],
}
STEPS = [
    [(0, 40)],
    [(0, 70), (1, 1)],  # pieces of 2 blocks: whole ones, the last half full
    [(1, 33), (0, 1), (2, 50)],
    [(0, 1), (1, 1), (2, 1)],  # decode: the CPU lane reads what the accelerator has written
    [(2, 9), (1, 100)],
    [(0, 2), (1, 1), (2, 64)],
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("windows", [(None,), (None, 20, None), (45, 3)])
@pytest.mark.parametrize("split", SPLITS)
def test_streamed_keys_of_ragged_steps_equal_whole_context(
    split: str, windows: tuple[int | None, ...], device: str
) -> None:
    world = TieredWorld(make_model_spec(windows), SPLITS[split], block_size=16, device=device, min_streamed=2)
    streamed = []
    for work in STEPS:
        world.step(work)
        streamed.append(world.attention.lane_bytes[Lane.STREAM])
    assert streamed[3] == 0, "decode is the CPU lane's"
    assert streamed[5] > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("split", SPLITS)
def test_streamed_keys_of_whole_blocks_equal_whole_context(split: str, device: str) -> None:
    """Whole blocks that all queries see travel in another order than that of their positions."""
    world = TieredWorld(make_model_spec((None, 100)), SPLITS[split], block_size=16, device=device, min_streamed=2)
    for work in [[(0, 64)], [(0, 96), (1, 16)], [(1, 48), (0, 32)], [(0, 16)]]:
        world.step(work)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(DType.FP32, DType.BF16), (DType.FP32, DType.FP16), (DType.FP32, DType.INT8), (DType.FP32, DType.INT4),
     (DType.BF16, DType.BF16), (DType.FP16, DType.FP16)],
)  # fmt: skip
@pytest.mark.parametrize("head_dim", [16, 80])
def test_streamed_keys_in_every_format_equal_whole_context(
    head_dim: int, dtype: DType, kv_dtype: DType, device: str
) -> None:
    if device == "cuda" and kv_dtype is not dtype:
        pytest.skip("on a GPU the accelerator's rows have the format of the queries")
    spec = make_model_spec((None, 30), head_dim=head_dim)
    world = TieredWorld(
        spec, SPLITS["all_dram"], block_size=32, dtype=dtype, kv_dtype=kv_dtype, device=device, min_streamed=2
    )
    for work in STEPS:
        world.step(work)


@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_streamed_keys_of_random_steps_equal_whole_context(data: st.DataObject) -> None:
    windows = tuple(data.draw(st.lists(st.none() | st.integers(1, 60), min_size=1, max_size=3)))
    tiers = data.draw(st.lists(st.sampled_from([Tier.GPU, Tier.DRAM]), min_size=1, max_size=20))
    steps = data.draw(st.lists(st.dictionaries(st.integers(0, 2), st.integers(1, 60), min_size=1), max_size=5))
    world = TieredWorld(
        make_model_spec(windows),
        lambda request, block: tiers[(7 * request + block) % len(tiers)],
        block_size=16,
        num_blocks={Tier.GPU: 80, Tier.DRAM: 80},
        seed=data.draw(st.integers(0, 1000)),
        min_streamed=data.draw(st.integers(1, 40)),
    )
    for work in steps:
        world.step(list(work.items()))


def test_lane_bytes_of_streamed_keys_are_not_the_cpu_lanes() -> None:
    spec = make_model_spec((None, 20), num_q_heads=2, num_kv_heads=1, head_dim=32)
    world = TieredWorld(spec, SPLITS["all_dram"], block_size=16, min_streamed=3)
    world.step([(0, 50), (1, 10)])
    world.step([(0, 3), (1, 1)])
    row_bytes = 2 * 32 * 4  # K and V of a token, layer and head in fp32
    assert world.attention.lane_bytes == {
        Lane.GPU: (3 + 3) * row_bytes,  # own keys of the chunk; the single token's is read from its slot
        Lane.CPU: (11 + 11) * row_bytes,
        Lane.STREAM: (50 + 19) * row_bytes,
    }


def test_a_layer_out_of_turn_gets_its_own_keys() -> None:
    world = TieredWorld(make_model_spec((None, None, None)), SPLITS["all_dram"], block_size=16, min_streamed=2)
    world.step([(0, 90)])
    world.attention.begin([world.schedule(0, 5)])
    q, k = torch.randn(5, 6, 16), torch.randn(5, 2, 16)
    wanted = [world.attention.attend(layer_idx, q, k, k) for layer_idx in range(3)]
    for layer_idx in (2, 2, 0, 1):
        assert torch.equal(world.attention.attend(layer_idx, q, k, k), wanted[layer_idx])

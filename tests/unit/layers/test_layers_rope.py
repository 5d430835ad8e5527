import math

import pytest
import torch
from torch.testing import assert_close

from ambidex.core.model_spec import RopeScaling, RopeScalingKind, RopeSpec
from ambidex.layers.rope import RotaryEmbedding, compute_attention_factor, compute_inv_freq

CPU = torch.device("cpu")
PLAIN = (1.0, 0.1, 0.01, 0.001)  # 10000 ** (-i / 4)


def make_rope(scaling: RopeScaling | None = None, freq_factors: tuple[float, ...] | None = None) -> RopeSpec:
    return RopeSpec(theta=10000.0, dim=8, scaling=scaling, freq_factors=freq_factors)


def test_inv_freq_without_scaling_falls_geometrically() -> None:
    assert_close(compute_inv_freq(make_rope()), torch.tensor(PLAIN))


def test_inv_freq_with_freq_factors_divides_one_by_one() -> None:
    inv_freq = compute_inv_freq(make_rope(freq_factors=(1.0, 2.0, 4.0, 8.0)))
    assert_close(inv_freq, torch.tensor([1.0, 0.05, 0.0025, 0.000125]))


def test_inv_freq_linear_divides_all_by_factor() -> None:
    inv_freq = compute_inv_freq(make_rope(RopeScaling(kind=RopeScalingKind.LINEAR, factor=4.0)))
    assert_close(inv_freq, torch.tensor(PLAIN) / 4)


def test_inv_freq_llama3_keeps_fast_stretches_slow_and_blends_between() -> None:
    # Turns within 160 tokens: 25.5, 2.55, 0.255, 0.0255; kept from 4 on, stretched below 1, blended at 2.55.
    scaling = RopeScaling(
        kind=RopeScalingKind.LLAMA3, factor=8.0, original_context_len=160, low_freq_factor=1.0, high_freq_factor=4.0
    )
    kept = (160 * 0.1 / (2 * math.pi) - 1) / 3
    expected = [1.0, 0.1 * kept + 0.1 / 8 * (1 - kept), 0.01 / 8, 0.001 / 8]
    assert_close(compute_inv_freq(make_rope(scaling)), torch.tensor(expected))


def test_inv_freq_yarn_ramps_over_dimensions() -> None:
    # 32 turns in 2048 tokens lie at pair 1.008, one turn at pair 2.513: the ramp runs from pair 1 to pair 3.
    scaling = RopeScaling(kind=RopeScalingKind.YARN, factor=4.0, original_context_len=2048)
    expected = [1.0, 0.1, 0.01 * 0.5 + 0.01 / 4 * 0.5, 0.001 / 4]
    assert_close(compute_inv_freq(make_rope(scaling)), torch.tensor(expected))


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, 1.0),
        (RopeScaling(kind=RopeScalingKind.LINEAR, factor=4.0), 1.0),
        (RopeScaling(kind=RopeScalingKind.YARN, factor=4.0, original_context_len=32), 0.1 * math.log(4) + 1),
        (RopeScaling(kind=RopeScalingKind.YARN, factor=0.5, original_context_len=32), 1.0),
        (RopeScaling(kind=RopeScalingKind.YARN, factor=4.0, original_context_len=32, attention_factor=0.7), 0.7),
    ],
)
def test_attention_factor_is_one_but_for_yarn(scaling: RopeScaling | None, expected: float) -> None:
    assert compute_attention_factor(scaling) == pytest.approx(expected)


def test_rotary_embedding_gives_cos_and_sin_of_position_times_frequency() -> None:
    cos, sin = RotaryEmbedding(make_rope(), CPU)(torch.tensor([0, 3]))
    angles = torch.tensor([[0.0] * 4, [3 * frequency for frequency in PLAIN]])
    assert_close(cos, angles.cos())
    assert_close(sin, angles.sin())


def test_rotary_embedding_with_yarn_multiplies_both_by_the_attention_factor() -> None:
    scaling = RopeScaling(kind=RopeScalingKind.YARN, factor=4.0, original_context_len=32, attention_factor=0.5)
    cos, sin = RotaryEmbedding(make_rope(scaling), CPU)(torch.tensor([5]))
    assert_close(cos**2 + sin**2, torch.full((1, 4), 0.25))


def test_rotary_embedding_is_fp32_and_no_parameter_of_the_checkpoint() -> None:
    rotary = RotaryEmbedding(make_rope(), CPU)
    assert rotary(torch.tensor([1]))[0].dtype == torch.float32
    assert not rotary.state_dict()

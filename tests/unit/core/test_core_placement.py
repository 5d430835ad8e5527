"""Placements are plain values that cannot be wrong."""

import pytest

from ambidex.core.errors import ConfigError
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit


def test_shares_must_make_one() -> None:
    with pytest.raises(ConfigError, match=r"add up to 0\.9"):
        WeightSplit(on_gpu=0.5, on_cpu=0.4)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_a_fraction(share: float) -> None:
    with pytest.raises(ConfigError, match="fraction from 0 to 1"):
        WeightSplit(on_gpu=share, on_cpu=1.0 - share)


def test_splits_come_in_the_order_of_a_step() -> None:
    half = WeightSplit(on_gpu=0.5, streamed=0.5)
    layers = (LayerPlacement(mlp=half), LayerPlacement())
    assert list(Placement(layers=layers).splits()) == [WeightSplit(), half, WeightSplit(), WeightSplit(), WeightSplit()]
    assert not Placement(layers=layers).is_all_on_gpu
    assert Placement.all_on_gpu(2).is_all_on_gpu

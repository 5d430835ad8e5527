"""`choose` and `override`."""

import pytest

from ambidex.core.errors import InternalError
from ambidex.kernels import dispatch


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_choose_attend_prefers_fused_attention_and_says_why(device_type: str) -> None:
    choice = dispatch.choose("attend", device_type)
    assert choice.name == "torch"
    assert choice.reason


def test_choose_merge_states_on_cuda_is_the_reference() -> None:
    assert dispatch.choose("merge_states", "cuda").name == "reference"


def test_override_when_nested_restores_the_outer_choice() -> None:
    before = dispatch.choose("attend", "cpu")
    with dispatch.override("attend", "reference"):
        with dispatch.override("attend", "torch"):
            assert dispatch.choose("attend", "cpu").name == "torch"
        assert dispatch.choose("attend", "cpu").name == "reference"
    assert dispatch.choose("attend", "cpu") == before


def test_override_with_unknown_implementation_raises() -> None:
    with (
        pytest.raises(InternalError, match="op attend has no implementation magic"),
        dispatch.override("attend", "magic"),
    ):
        pass

"""`choose` and `override`."""

import pytest

from ambidex.core.errors import InternalError
from ambidex.kernels import dispatch


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_choose_attend_prefers_fused_attention_and_says_why(device_type: str) -> None:
    choice = dispatch.choose("attend", device_type)
    assert choice.name == "torch"
    assert choice.reason


@pytest.mark.parametrize(
    ("op", "fallback"),
    [("attend_paged", "reference"), ("merge_states", "reference"), ("rms_norm", "torch"), ("silu_mul", "reference")],
)
def test_choose_on_cuda_prefers_triton_and_without_it_says_why(
    op: str, fallback: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for is_there in (True, False):
        monkeypatch.setattr(dispatch, "find_spec", lambda _, found=is_there: object() if found else None)
        dispatch._decide.cache_clear()
        choice = dispatch.choose(op, "cuda")
        assert choice.name == ("triton" if is_there else fallback)
        assert choice.reason
    assert f"{op} on CUDA falls back" in caplog.text
    dispatch._decide.cache_clear()


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

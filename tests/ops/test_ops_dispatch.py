"""`choose` and `override`."""

from collections.abc import Iterator

import pytest
import torch

from ambidex.core.errors import InternalError
from ambidex.kernels import dispatch


def forget_choices() -> None:
    dispatch._decide.cache_clear()
    dispatch._why_no_triton.cache_clear()


@pytest.fixture
def fresh_choices() -> Iterator[None]:
    """Choices are made anew, also after the test."""
    forget_choices()
    yield
    forget_choices()


@pytest.mark.usefixtures("fresh_choices")
def test_a_gpu_on_which_triton_fails_gets_plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("compute capability 6.1")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GTX 1080")
    monkeypatch.setattr(dispatch, "find_spec", lambda _: object())
    monkeypatch.setattr(dispatch, "run_probe", fail)
    found = dispatch.find_fallbacks("cuda")
    assert set(found) == {op for op, names in dispatch.IMPLEMENTATIONS.items() if "triton" in names}
    assert set(found.values()) == {"Triton does not run on GTX 1080: RuntimeError compute capability 6.1"}
    assert dispatch.choose("silu_mul", "cuda").name == "reference"


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_choices")
def test_triton_runs_on_this_gpu() -> None:
    assert dispatch.find_fallbacks("cuda") == {}


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_choose_attend_prefers_fused_attention_and_says_why(device_type: str) -> None:
    choice = dispatch.choose("attend", device_type)
    assert choice.name == "torch"
    assert choice.reason


@pytest.mark.usefixtures("fresh_choices")
@pytest.mark.parametrize(
    ("op", "fallback"),
    [("attend_paged", "reference"), ("merge_states", "reference"), ("rms_norm", "torch"), ("silu_mul", "reference")],
)
def test_choose_on_cuda_prefers_triton_and_without_it_says_why(
    op: str, fallback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_there in (True, False):
        monkeypatch.setattr(dispatch, "find_spec", lambda _, found=is_there: object() if found else None)
        forget_choices()
        choice = dispatch.choose(op, "cuda")
        assert choice.name == ("triton" if is_there else fallback)
        assert choice.reason
        assert (op in dispatch.find_fallbacks("cuda")) is not is_there


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

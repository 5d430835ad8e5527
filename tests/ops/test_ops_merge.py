"""Every implementation of `merge_states` against one attention over all keys."""

import pytest
import torch

from ambidex.core.errors import NativeModuleError, ShapeError
from ambidex.kernels import api, dispatch
from ambidex.kernels.cpu import native
from triton_device import INTERPRETED
from truth import assert_within_twice_plain

INF = float("inf")


def has_native_module() -> bool:
    try:
        native.isa()
    except NativeModuleError:
        return False
    return True


IMPLEMENTATIONS = ["reference", "native"] if has_native_module() else ["reference"]  # Triton's: test_ops_triton.py
PLACES = [*((name, "cpu") for name in IMPLEMENTATIONS), pytest.param("reference", "cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("name", "device"), PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merge_states_of_two_key_sets_equals_attention_over_both(dtype: torch.dtype, name: str, device: str) -> None:
    torch.manual_seed(0)
    q = torch.randn(5, 6, 20, device=device)
    k, v = torch.randn(2, 30, 20, device=device), torch.randn(2, 30, 20, device=device)
    truth, truth_lse = api.attend(q.double(), k.double(), v.double(), scale=0.2)
    whole, whole_lse = api.attend(q, k, v, scale=0.2)
    parts = [api.attend(q, k[:, cut], v[:, cut], scale=0.2) for cut in (slice(0, 7), slice(7, 30))]
    with dispatch.override("merge_states", name):
        out, lse = api.merge_states(parts[0][0].to(dtype), parts[0][1], parts[1][0].to(dtype), parts[1][1])
    assert_within_twice_plain(out, whole.to(dtype), truth.double(), num_roundings=3)  # two states, result
    assert_within_twice_plain(lse, whole_lse, truth_lse.double(), num_roundings=3)


@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, pytest.param("triton", marks=INTERPRETED)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merge_states_rounds_to_the_dtype_that_is_asked_for(dtype: torch.dtype, name: str) -> None:
    torch.manual_seed(0)
    out_a, out_b = torch.randn(2, 3, 5, 20)
    lse_a, lse_b = torch.randn(2, 3, 5)
    with dispatch.override("merge_states", name):
        whole, whole_lse = api.merge_states(out_a, lse_a, out_b, lse_b)
        out, lse = api.merge_states(out_a, lse_a, out_b, lse_b, out_dtype=dtype)
    assert whole.dtype == torch.float32
    assert out.dtype == dtype
    torch.testing.assert_close(out, whole.to(dtype), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "device"), PLACES)
def test_merge_states_with_one_empty_side_gives_the_other(name: str, device: str) -> None:
    out_a = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]]], device=device)
    out_b = torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]]], device=device)
    lse_a, lse_b = torch.tensor([[5.0], [-INF]], device=device), torch.tensor([[-INF], [-200.0]], device=device)
    with dispatch.override("merge_states", name):
        out, lse = api.merge_states(out_a, lse_a, out_b, lse_b)
    assert out.tolist() == [[[1.0, 2.0]], [[3.0, 4.0]]]
    assert lse.tolist() == [[5.0], [-200.0]]


@pytest.mark.parametrize(("name", "device"), PLACES)
def test_merge_states_of_two_empty_sides_is_empty(name: str, device: str) -> None:
    out, lse = torch.zeros(2, 3, 4, device=device), torch.full((2, 3), -INF, device=device)
    with dispatch.override("merge_states", name):
        merged_out, merged_lse = api.merge_states(out, lse, out, lse)
    assert torch.equal(merged_out, out)
    assert torch.equal(merged_lse, lse)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_merge_states_of_strided_tensors_equals_contiguous_ones(name: str) -> None:
    torch.manual_seed(0)
    out_a, out_b = torch.randn(3, 4, 8).transpose(0, 1), torch.randn(4, 3, 8)
    lse_a, lse_b = torch.randn(3, 4).t(), torch.randn(4, 3)
    with dispatch.override("merge_states", name):
        strided = api.merge_states(out_a, lse_a, out_b, lse_b)
        compact = api.merge_states(out_a.contiguous(), lse_a.contiguous(), out_b, lse_b)
    torch.testing.assert_close(strided, compact)


def test_merge_states_leaves_its_arguments_unchanged() -> None:
    out_a, out_b, lse = torch.ones(2, 3, 4), torch.zeros(2, 3, 4), torch.zeros(2, 3)
    api.merge_states(out_a, lse, out_b, lse)
    assert torch.equal(out_a, torch.ones(2, 3, 4))
    assert torch.equal(lse, torch.zeros(2, 3))


def test_merge_states_of_different_shapes_raises() -> None:
    with pytest.raises(ShapeError, match="out_b: expected D=4"):
        api.merge_states(torch.ones(2, 3, 4), torch.ones(2, 3), torch.ones(2, 3, 5), torch.ones(2, 3))


def test_merge_states_with_low_precision_lse_raises() -> None:
    with pytest.raises(ShapeError, match="lse must be fp32"):
        api.merge_states(torch.ones(2, 3, 4), torch.ones(2, 3), torch.ones(2, 3, 4), torch.ones(2, 3).bfloat16())

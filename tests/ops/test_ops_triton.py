"""The Triton kernels but attention against the formulas: norms, activation, merge, rotation with storing."""

import math

import pytest
import torch

from ambidex.kernels import api, dispatch
from triton_device import DEVICES, DTYPE_CASES
from truth import assert_within_twice_plain

INF = float("inf")
SHAPES = [(1, 8), (5, 77), (3, 2, 64), (2, 4100)]


@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_in_triton_equals_the_formula(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(shape).to(device, dtype), torch.randn(shape[-1]).to(device, dtype)
    exact = x.double()
    truth = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    plain = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    with dispatch.override("rms_norm", "triton"):
        assert_within_twice_plain(api.rms_norm(x, weight, 1e-5), plain, truth)
        strided = torch.stack((x, x), -2).flatten(-2)[..., : shape[-1]]  # rows further apart than they are long
        assert torch.equal(api.rms_norm(strided, weight, 1e-5), api.rms_norm(strided.contiguous(), weight, 1e-5))


@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm_in_triton_equals_sum_and_norm(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, update = torch.randn(shape).to(device, dtype), torch.randn(shape).to(device, dtype)
    weight = torch.randn(shape[-1]).to(device, dtype)
    with dispatch.override("add_rms_norm", "triton"):
        total, out = api.add_rms_norm(x, update, weight, 1e-5)
    assert torch.equal(total, x + update)
    with dispatch.override("rms_norm", "triton"):
        assert torch.equal(out, api.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
@pytest.mark.parametrize("shape", [(1, 8), (3, 77), (2, 1500)])
def test_silu_mul_in_triton_equals_the_formula(shape: tuple[int, ...], device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate, up = (4 * torch.randn(shape)).to(device, dtype), torch.randn(shape).to(device, dtype)
    gate[0, :2] = torch.tensor([-100.0, 100.0])  # exp overflows and underflows
    truth = gate.double() * torch.sigmoid(gate.double()) * up.double()
    plain = gate * torch.sigmoid(gate) * up
    with dispatch.override("silu_mul", "triton"):
        assert_within_twice_plain(api.silu_mul(gate, up), plain, truth)
        both = torch.cat((gate, up), -1)
        halves = api.silu_mul(*both.chunk(2, -1))
        assert torch.equal(halves, api.silu_mul(gate, up))


@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_merge_states_in_triton_equals_attention_over_both(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q = torch.randn(5, 6, 20, device=device)
    k, v = torch.randn(2, 30, 20, device=device), torch.randn(2, 30, 20, device=device)
    truth, truth_lse = api.attend(q.double(), k.double(), v.double(), scale=0.2)
    whole, whole_lse = api.attend(q, k, v, scale=0.2)
    (out_a, lse_a), (out_b, lse_b) = (
        api.attend(q, k[:, cut], v[:, cut], scale=0.2) for cut in (slice(0, 7), slice(7, 30))
    )
    with dispatch.override("merge_states", "triton"):
        out, lse = api.merge_states(out_a.to(dtype), lse_a, out_b, lse_b)
    assert_within_twice_plain(out, whole.to(dtype), truth.double(), num_roundings=3)  # two states, result
    assert_within_twice_plain(lse, whole_lse, truth_lse.double(), num_roundings=3)


@pytest.mark.parametrize("device", DEVICES)
def test_merge_states_in_triton_with_empty_sides(device: str) -> None:
    out_a = torch.tensor([[[1.0, 2.0]], [[0.0, 0.0]], [[0.0, 0.0]]], device=device)
    out_b = torch.tensor([[[0.0, 0.0]], [[3.0, 4.0]], [[0.0, 0.0]]], device=device)
    lse_a = torch.tensor([[5.0], [-INF], [-INF]], device=device)
    lse_b = torch.tensor([[-INF], [-200.0], [-INF]], device=device)
    with dispatch.override("merge_states", "triton"):
        out, lse = api.merge_states(out_a, lse_a, out_b, lse_b)
    assert out.tolist() == [[[1.0, 2.0]], [[3.0, 4.0]], [[0.0, 0.0]]]
    assert lse.tolist() == [[5.0], [-200.0], [-INF]]


@pytest.mark.parametrize("name", ["reference", "triton"])
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
@pytest.mark.parametrize(
    ("num_tokens", "num_q_heads", "num_kv_heads", "head_dim", "dim"),
    [(1, 1, 1, 4, 4), (3, 6, 2, 80, 32), (5, 3, 3, 64, 0), (2, 5, 1, 96, 96)],
)
def test_rotate_and_store_equals_rotate_and_stored_rows(
    num_tokens: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dim: int,
    device: str,
    dtype: torch.dtype,
    name: str,
) -> None:
    torch.manual_seed(0)
    fused = torch.randn(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim).to(device, dtype)
    q, k, v = fused.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)  # strided, as from one matrix
    degrees = (torch.rand(num_tokens, dim // 2) * 2 * math.pi).to(device)
    angles = (degrees.cos(), degrees.sin()) if dim else None
    pools = torch.full((2, num_kv_heads, 4, 3, head_dim), torch.nan, dtype=dtype, device=device)
    slots = torch.tensor([7, -1, 0, 11, 4], device=device)[:num_tokens]
    with dispatch.override("rotate_and_store", name):
        turned = api.rotate_and_store(q, k, v, pools[0], pools[1], slots, angles=angles)
    with dispatch.override("rotate", "reference"):
        wanted_q, wanted_k = (api.rotate(x, *angles) if angles else x for x in (q, k))
    torch.testing.assert_close(turned, wanted_q)
    is_stored = slots >= 0
    for pool, rows in ((pools[0], wanted_k), (pools[1], v)):
        flat = pool.flatten(1, 2)
        torch.testing.assert_close(flat[:, slots[is_stored]], rows[is_stored].transpose(0, 1))
        assert int(flat.isnan().all(-1).sum()) == num_kv_heads * (12 - int(is_stored.sum())), "another row was written"


@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_dim", "dim"), [(1, 1, 4, 4), (3, 9, 80, 32), (5, 8, 64, 64), (2, 17, 96, 96)]
)
def test_rotate_in_triton_equals_the_reference(
    num_tokens: int, num_heads: int, head_dim: int, dim: int, device: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    fused = torch.randn(num_tokens, num_heads + 2, head_dim).to(device, dtype)
    x = fused[:, 1:-1]  # strided, as from one matrix
    degrees = (torch.rand(num_tokens, dim // 2) * 2 * math.pi).to(device)
    with dispatch.override("rotate", "reference"):
        wanted = api.rotate(x, degrees.cos(), degrees.sin())
    with dispatch.override("rotate", "triton"):
        turned = api.rotate(x, degrees.cos(), degrees.sin())
    torch.testing.assert_close(turned, wanted)
    assert torch.equal(turned[..., dim:], x[..., dim:])

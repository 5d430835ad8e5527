"""`attend_chosen`: both implementations against the formula in fp64, beside rows that are NaN where none was chosen."""

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels import api, dispatch
from ambidex.kernels.cuda.pinned_view import view_on_gpu
from triton_device import DTYPE_CASES
from truth import assert_within_twice_plain

SIZES = [  # Hq, Hkv, D, chosen keys, near keys
    (8, 2, 64, 37, 65),
    (4, 4, 80, 1, 3),
    (7, 1, 128, 200, 1),
    (6, 2, 256, 0, 70),
    (12, 3, 20, 64, 64),
]


def make_chosen(
    sizes: tuple[int, int, int, int, int], dtype: torch.dtype, device: str, *, is_pinned: bool = False
) -> dict[str, Tensor]:
    num_q_heads, num_kv_heads, head_dim, num_chosen, num_near = sizes
    generator = torch.Generator().manual_seed(num_chosen)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    places = torch.stack([torch.randperm(300, generator=generator)[:num_chosen] for _ in range(num_kv_heads)])
    v = torch.full((num_kv_heads, 300, head_dim), torch.nan).to(dtype)
    v[torch.arange(num_kv_heads)[:, None], places] = rand(num_kv_heads, num_chosen, head_dim).to(dtype)
    near = torch.full((2, num_kv_heads, num_near + 9, head_dim), torch.nan).to(dtype)
    near[:, :, 4 : 4 + num_near] = rand(2, num_kv_heads, num_near, head_dim).to(dtype)
    near = near.to(device)
    return {
        "q": rand(num_q_heads, head_dim).to(dtype).to(device),
        "near_k": near[0, :, 4 : 4 + num_near],
        "near_v": near[1, :, 4 : 4 + num_near],
        "places": places.to(device),
        "given": rand(num_kv_heads, num_q_heads // num_kv_heads, num_chosen).to(dtype).to(device),
        "v": view_on_gpu(v.pin_memory()) if is_pinned else v.to(device),
    }


def attend(name: str, parts: dict[str, Tensor]) -> Tensor:
    with dispatch.override("attend_chosen", name):
        return api.attend_chosen(**parts, scale=parts["q"].shape[1] ** -0.5)


def naive(parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Key by key, in one format."""
    part = {name: tensor if name == "places" else tensor.cpu().to(dtype) for name, tensor in parts.items()}
    num_heads, group_size, _ = part["given"].shape
    outs = []
    for head in range(num_heads):
        places = part["places"][head].cpu()
        for member in range(group_size):
            q = part["q"][head * group_size + member]
            true = (part["near_k"][head] * q).sum(1) * q.shape[0] ** -0.5
            probs = torch.cat((part["given"][head, member], true)).softmax(0)
            outs.append(probs @ torch.cat((part["v"][head, places], part["near_v"][head])))
    return torch.stack(outs)


def check(name: str, parts: dict[str, Tensor]) -> None:
    q, found = parts["q"], attend(name, parts).cpu()
    plain, truth = naive(parts, q.dtype), naive(parts, torch.float64)
    splits = 5 if q.is_cuda and q.dtype == torch.float32 else 3  # are merged
    assert_within_twice_plain(found, plain, truth, num_roundings=1 if name == "reference" else splits)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_equals_the_formula(dtype: torch.dtype, sizes: tuple[int, int, int, int, int]) -> None:
    check("reference", make_chosen(sizes, dtype, "cpu"))


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_kernel_equals_the_formula(device: str, dtype: torch.dtype, sizes: tuple[int, int, int, int, int]) -> None:
    check("triton", make_chosen(sizes, dtype, device))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_pinned_memory_are_read_where_they_lie(dtype: torch.dtype) -> None:
    check("triton", make_chosen((32, 8, 128, 250, 65), dtype, "cuda", is_pinned=True))


def test_probabilities_are_those_of_the_answer() -> None:
    parts = make_chosen(SIZES[0], torch.float32, "cpu")
    q, places = parts["q"], parts["places"]
    probs = api.chosen_probs(q, parts["near_k"], parts["given"], scale=q.shape[1] ** -0.5)
    torch.testing.assert_close(probs.sum(2), torch.ones(2, 4))
    values = torch.cat((parts["v"][torch.arange(2)[:, None], places], parts["near_v"]), dim=1)
    torch.testing.assert_close((probs @ values).flatten(0, 1), attend("reference", parts))


def test_what_does_not_fit_is_refused() -> None:
    parts = make_chosen(SIZES[0], torch.float32, "cpu")
    with pytest.raises(ShapeError, match="expected 8 query heads"):
        api.attend_chosen(**{**parts, "given": parts["given"][:, :3]}, scale=1.0)
    with pytest.raises(ShapeError):
        api.attend_chosen(**{**parts, "v": parts["v"].half()}, scale=1.0)

"""`sum_prompt_weights`: both implementations against the formula in fp64, with every form of noise."""

import math

import pytest
import torch
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels import api, dispatch
from ambidex.kernels.noise import Noise, gumbel_noise, uniform_noise
from ambidex.kernels.reference import prompt_sums as reference_prompt_sums
from ambidex.kernels.triton import prompt_sums as triton_prompt_sums
from triton_device import DEVICES, DTYPE_CASES
from truth import assert_within_twice_plain

SIZES = [  # queries, keys, Hq, Hkv, D
    (1, 1, 2, 2, 64),
    (1, 301, 4, 1, 64),  # the last token of a prompt
    (130, 130, 2, 2, 80),  # all of a prompt: two tiles of queries
    (140, 210, 8, 2, 128),  # a chunk in the middle of a tile
    (77, 200, 7, 1, 64),
    (128, 256, 2, 2, 64),  # whole tiles
    (40, 90, 3, 1, 20),
]
NOISES = [
    None,
    Noise(seed=0, tau=1.0),
    Noise(seed=3_000_012, tau=0.5),
    Noise(seed=1_000_003 * 977 + 31, tau=6.0),  # whose second word is not 0
]
Sizes = tuple[int, int, int, int, int]
CASES = [
    *((sizes, noise) for sizes in SIZES for noise in (NOISES[0], NOISES[2])),
    *((sizes, noise) for sizes in (SIZES[1], SIZES[6]) for noise in (NOISES[1], NOISES[3])),
]


def rows_of(sizes: Sizes, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """q [n, Hq, D] and k [Hkv, S, D] that lie among other numbers, which are NaN."""
    num_queries, num_keys, num_q_heads, num_kv_heads, head_dim = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    fused = torch.full((num_queries, num_q_heads + 1, head_dim), torch.nan)
    fused[:, 1:] = torch.randn(num_queries, num_q_heads, head_dim, generator=generator) * 2
    longer = torch.full((num_kv_heads, num_keys + 3, head_dim), torch.nan)
    longer[:, :num_keys] = torch.randn(num_kv_heads, num_keys, head_dim, generator=generator)
    return fused.to(device, dtype)[:, 1:], longer.to(device, dtype)[:, :num_keys]


def naive(q: Tensor, k: Tensor, scale: float, noise: Noise | None, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Query by query; and the largest |x|."""
    num_queries, num_q_heads, _ = q.shape
    num_kv_heads, num_keys, _ = k.shape
    q, k = q.cpu().to(dtype), k.cpu().to(dtype)
    sums, largest = torch.zeros(num_kv_heads, num_keys, dtype=dtype), 0.0
    for row in range(num_queries):
        num_seen = num_keys - num_queries + row + 1
        for head in range(num_q_heads):
            kv_head = head // (num_q_heads // num_kv_heads)
            x = k[kv_head, :num_seen] @ q[row, head] * scale
            if noise is not None:
                uniform = uniform_noise(noise.seed, torch.tensor([num_seen - 1]), num_q_heads, num_seen)[head, 0]
                x = (x - (-uniform.to(dtype).log()).log()) / noise.tau
            sums[kv_head, :num_seen] += x.softmax(0)
            largest = max(largest, float(x.abs().max()))
    return sums, largest


def check(name: str, device: str, dtype: torch.dtype, sizes: Sizes, noise: Noise | None) -> None:
    q, k = rows_of(sizes, dtype, device)
    with dispatch.override("sum_prompt_weights", name):
        got = api.sum_prompt_weights(q, k, scale=0.2, noise=noise).cpu()
    (truth, largest), (plain, _) = (naive(q, k, 0.2, noise, kind) for kind in (torch.float64, torch.float32))
    # Beside the result x is rounded; the kernels make it twice, and products may be added up in another order: some eps
    # of its size. Of one query the plain run, which makes it once, may be lucky.
    assert_within_twice_plain(got, plain, truth, num_roundings=1 + math.ceil(2 * largest))
    assert got.sum().item() == pytest.approx(len(q) * q.shape[1], rel=1e-5)  # each query gives 1


@pytest.mark.parametrize(("sizes", "noise"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_reference_adds_up_what_queries_give(dtype: torch.dtype, sizes: Sizes, noise: Noise | None) -> None:
    check("reference", "cpu", dtype, sizes, noise)


@pytest.mark.parametrize(("sizes", "noise"), CASES)
@pytest.mark.parametrize(("device", "dtype"), DTYPE_CASES)
def test_kernels_add_up_what_queries_give(device: str, dtype: torch.dtype, sizes: Sizes, noise: Noise | None) -> None:
    check("triton", device, dtype, sizes, noise)


@pytest.mark.parametrize("noise", [None, NOISES[2]])
def test_reference_in_pieces_gives_the_same(noise: Noise | None, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = rows_of(SIZES[3], torch.float32, "cpu")
    whole = api.sum_prompt_weights(q, k, scale=0.2, noise=noise)
    for constant in ("MAX_SCORES", "MAX_NOISY_SCORES"):
        monkeypatch.setattr(reference_prompt_sums, constant, 7 * 8 * 210 + 5)  # seven queries
    monkeypatch.setattr(torch.Tensor, "softmax", shorter_than(8, torch.Tensor.softmax))
    torch.testing.assert_close(api.sum_prompt_weights(q, k, scale=0.2, noise=noise), whole)


def shorter_than(num_queries: int, softmax: object) -> object:
    def checked(x: Tensor, dim: int) -> Tensor:
        assert x.shape[1] < num_queries
        return softmax(x, dim)  # type: ignore[operator]

    return checked


@pytest.mark.parametrize("noise", [None, NOISES[2]])
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_give_the_same_however_a_prompt_is_cut(device: str, noise: Noise | None) -> None:
    num_keys = 200
    q, k = rows_of((num_keys, num_keys, 2, 1, 64), torch.float32, device)
    with dispatch.override("sum_prompt_weights", "triton"):
        whole = api.sum_prompt_weights(q, k, scale=0.125, noise=noise)
        sums = torch.zeros_like(whole)
        for begin, end in ((0, 1), (1, 65), (65, 150), (150, 200)):
            sums[:, :end] += api.sum_prompt_weights(q[begin:end], k[:, :end], scale=0.125, noise=noise)
    torch.testing.assert_close(sums, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 5, NOISES[3].seed])
@pytest.mark.parametrize("device", DEVICES)
def test_noise_of_the_kernels_is_that_of_the_policy(device: str, seed: int) -> None:
    """Queries of 0 give the softmax of the noise alone; three of them, each alone, far into a prompt."""
    k = torch.randn(8, 150, 16, device=device)
    for num_keys in (150, 149, 66):
        with dispatch.override("sum_prompt_weights", "triton"):
            q = torch.zeros(1, 8, 16, device=device)
            got = api.sum_prompt_weights(q, k[:, :num_keys], scale=1.0, noise=Noise(seed, 0.7))
        noise = gumbel_noise(seed, torch.tensor([num_keys - 1]), 8, num_keys)[:, 0]
        torch.testing.assert_close(got.cpu(), (noise / 0.7).softmax(1), rtol=1e-5, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("noise", [None, NOISES[1]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_on_a_long_chunk_are_as_exact_as_torch(dtype: torch.dtype, noise: Noise | None) -> None:
    """The last 2,048 tokens of 16K with 32 heads on 8, as large as a model has them, held against fp64."""
    q, k = rows_of((2048, 16384, 32, 8, 128), dtype, "cuda")
    with dispatch.override("sum_prompt_weights", "reference"):
        plain = api.sum_prompt_weights(q, k, scale=128**-0.5, noise=noise)
    got = api.sum_prompt_weights(q, k, scale=128**-0.5, noise=noise)
    truth = torch.zeros(8, 16384, dtype=torch.float64, device="cuda")
    positions = torch.arange(16384 - 2048, 16384, device="cuda")
    for begin in range(0, 2048, 64):
        num_seen = int(positions[begin]) + 64
        for kv_head in range(8):
            own = q[begin : begin + 64, 4 * kv_head : 4 * kv_head + 4].double().transpose(0, 1)  # [G, n, D]
            x = own @ k[kv_head, :num_seen].double().T * 128**-0.5
            if noise is not None:
                uniform = uniform_noise(noise.seed, positions[begin : begin + 64], 32, num_seen)
                x = (x - (-uniform[4 * kv_head : 4 * kv_head + 4].double().log()).log()) / noise.tau
            is_later = torch.arange(num_seen, device="cuda") > positions[begin : begin + 64, None]
            truth[kv_head, :num_seen] += x.masked_fill_(is_later, -torch.inf).softmax(-1).sum((0, 1))
    assert_within_twice_plain(got, plain, truth)


def test_what_does_not_fit_is_refused() -> None:
    q, k = rows_of(SIZES[3], torch.float32, "cpu")
    with pytest.raises(ShapeError, match="k: expected D=128"):
        api.sum_prompt_weights(q, k[..., :64], scale=1.0)
    with pytest.raises(ShapeError, match="k is torch"):
        api.sum_prompt_weights(q.half(), k, scale=1.0)
    with pytest.raises(ShapeError, match="q: expected a multiple of 2 heads, got 5"):
        api.sum_prompt_weights(q[:, :5], k, scale=1.0)
    with pytest.raises(ShapeError, match="expected 1 … 100 queries, as many as there are keys at most, got 140"):
        api.sum_prompt_weights(q, k[:, :100], scale=1.0)
    with pytest.raises(ShapeError, match="got 0"):
        api.sum_prompt_weights(q[:0], k, scale=1.0)


def test_tiles_of_all_forms_are_tested_across_their_borders() -> None:
    """The sizes above have keys and queries on both sides of a tile's end."""
    for tiles in (triton_prompt_sums._TILES, triton_prompt_sums._TILES_NOISY, triton_prompt_sums._TILES_FP32):
        for rows in (tiles.own, tiles.others):
            assert any(num_queries > rows and num_queries % rows for num_queries, *_ in SIZES)
            assert any(num_keys > rows and num_keys % rows for _, num_keys, *_ in SIZES)

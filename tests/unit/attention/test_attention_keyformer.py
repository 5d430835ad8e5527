"""Keyformer's noise: Gumbel's distribution, the same numbers on every device and however queries are taken together."""

import math

import pytest
import torch

from ambidex.attention.select.keyformer import noise_seed
from ambidex.kernels.noise import gumbel_noise, hash_

POSITIONS = torch.arange(50, 82)


def test_hash_is_that_of_32_bit_words() -> None:
    words = [0, 1, 2, 12345, 2**31 - 1, 2**31, 2**32 - 1]
    wanted = []
    for word in words:
        word ^= word >> 16
        word = word * 0x21F0AAAD % 2**32
        word ^= word >> 15
        word = word * 0x735A2D97 % 2**32
        wanted.append(word ^ word >> 15)
    assert hash_(torch.tensor(words)).tolist() == wanted


def test_noise_of_a_query_does_not_depend_on_what_is_asked_with_it() -> None:
    noise = gumbel_noise(noise_seed(0, 3), POSITIONS, 8, 100)
    alone = gumbel_noise(noise_seed(0, 3), POSITIONS[7:8], 4, 40)
    assert noise.shape == (8, 32, 100)
    assert torch.equal(noise[:4, 7:8, :40], alone)


def test_noise_is_distributed_as_gumbel_has_it() -> None:
    noise = gumbel_noise(noise_seed(0, 3), POSITIONS, 8, 4000).double().flatten()
    assert noise.mean().item() == pytest.approx(0.577216, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    for bound in (-1.0, 0.0, 1.0, 3.0):
        assert (noise < bound).double().mean().item() == pytest.approx(math.exp(-math.exp(-bound)), abs=2e-3)


def test_noise_of_layers_heads_queries_and_keys_is_not_alike() -> None:
    """No two rows of three layers share a number at any place, nor are they correlated."""
    rows = torch.stack([gumbel_noise(noise_seed(0, layer), POSITIONS, 8, 1000) for layer in range(3)]).flatten(0, 2)
    rows = (rows - rows.mean(1, keepdim=True)) / rows.std(1, keepdim=True)
    correlations = (rows @ rows.T / 1000).fill_diagonal_(0)
    assert correlations.abs().max() < 6 / 1000**0.5  # 295 thousand pairs of a normal distribution: 4.6 at most
    neighbours = (rows[:, 1:] * rows[:, :-1]).mean()
    assert abs(neighbours.item()) < 5 / rows.numel() ** 0.5


@pytest.mark.gpu
def test_noise_on_a_gpu_is_that_on_a_cpu() -> None:
    there = gumbel_noise(noise_seed(0, 3), POSITIONS.cuda(), 8, 4000).cpu()
    torch.testing.assert_close(there, gumbel_noise(noise_seed(0, 3), POSITIONS, 8, 4000))

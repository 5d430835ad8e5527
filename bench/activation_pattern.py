"""Activation patterns as in real OPT models, for models with random weights.

How a pattern is made. Behind the layer norm (weight 1, bias 0) x has length √E; rows of fc1 are normal random numbers
of standard deviation s, so x · w is normal with s √E, and neuron i is above 0 for a share p_i of tokens if its bias is
−s √E · z(p_i), z the normal distribution's upper quantile. All biases but those of fc1 are 0.

    mean of p_i     2 % in the first layer to 4 % in the last: OPT computes 2 to 4 % of its neurons for a token
    hotness         a power law, at most 0.95, in which 26 % of a layer's neurons have 80 % of its activations
    order           random, another in each layer
    tokens          embeddings are large (standard deviation 8), so that x is the token's, and the last projection is a
                    matrix of its own, so that sampled tokens are nearly uniform: beyond hotness, what one token needs
                    says nothing about the next, which is the worst case for whatever follows the traffic
    profile         what an offline profile of another text would say: of the hottest fifth, 10 % are others

Sources: PowerInfer (arXiv:2312.12456): OPT-30B's 26 % and 80 %, a sparsity of 96 to 98 % for a token, and an overlap of
the hottest 20 % above 90 % across tasks. What real models have beyond that (neurons that are active together, weights
with outliers, runs of similar tokens) is not here; measured shares are in the record.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from ambidex.formats.locate import find_model
from ambidex.formats.neuron_profile import SHARES, NeuronProfile, fingerprint
from ambidex.formats.spec import read_spec
from ambidex.models.base import CausalLM

FIRST_SHARE, LAST_SHARE = 0.02, 0.04
HOT_SHARE, HOT_ACTIVATIONS = 0.26, 0.8
MOST: Final = 0.95
PROFILE_MISSES: Final = 0.1
WEIGHT_STD: Final = 0.02
"""Of dummy weights."""

EMBEDDING_STD: Final = 8.0
PATTERN_CONFIG: Final = {"tie_word_embeddings": False}
"""Fields of the model's config.json."""

Shares = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pattern:
    """The share of tokens for which each neuron is active, [L, F]: in the run, and as the profile has it."""

    shares: Shares
    profiled: Shares

    @classmethod
    def of(cls, num_layers: int, num_neurons: int, *, seed: int = 0) -> "Pattern":
        """A pattern; the same seed gives the same."""
        rng = np.random.default_rng(seed)
        shares, profiled = np.empty((2, num_layers, num_neurons))
        for layer, mean in enumerate(np.linspace(FIRST_SHARE, LAST_SHARE, num_layers)):
            ordered = power_law(num_neurons, float(mean))
            order = rng.permutation(num_neurons)
            shares[layer, order] = ordered
            seen = ordered.copy()
            num_hot = num_neurons // 5
            missed = rng.choice(num_hot, int(PROFILE_MISSES * num_hot), replace=False)
            others = num_hot + rng.choice(num_neurons - num_hot, len(missed), replace=False)
            seen[missed], seen[others] = ordered[others], ordered[missed]
            profiled[layer, order] = seen
        return cls(shares, profiled)

    @torch.no_grad()
    def shape_biases(self, model: CausalLM) -> None:
        """Set biases and embeddings of a model with dummy weights, wherever its matrices lie."""
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.zero_()
            elif name.endswith("embed_tokens.weight"):
                parameter.mul_(EMBEDDING_STD / WEIGHT_STD)
        for sites, shares in zip(model.layer_sites(), self.shares, strict=True):
            (first,) = sites.mlp.ins
            assert first.bias is not None, "OPT has biases"
            scale = WEIGHT_STD * float(first.weight.shape[1]) ** 0.5
            first.bias.copy_(torch.from_numpy(-scale * _upper_quantiles(shares)))

    def write_profile(self, folder: Path, path: Path) -> None:
        """The file that engines read, for a model of dummy weights."""
        source = find_model(str(folder))
        none = np.zeros((len(self.profiled), len(SHARES)), dtype=np.float32)
        NeuronProfile(
            model=fingerprint(source, read_spec(source)), num_tokens=1,
            activity=self.profiled.astype(np.float32), gate_sizes=none[:, :0], input_sizes=none,
        ).write(path)  # fmt: skip


def power_law(num: int, mean: float) -> Shares:
    """Shares in falling order, c · rank^-a up to `MOST`, with that mean, of which the hottest have their part."""
    low, high = 0.0, 3.0
    for _ in range(60):  # the part of the hottest grows with a
        middle = (low + high) / 2
        values = _scaled(num, middle, mean)
        if values[: int(HOT_SHARE * num)].sum() < HOT_ACTIVATIONS * values.sum():
            low = middle
        else:
            high = middle
    return _scaled(num, (low + high) / 2, mean)


def _scaled(num: int, exponent: float, mean: float) -> Shares:
    ranks = np.arange(1, num + 1, dtype=np.float64) ** -exponent
    low, high = 0.0, MOST / ranks[-1]
    for _ in range(100):  # the mean grows with the factor
        factor = (low + high) / 2
        if np.minimum(MOST, factor * ranks).mean() < mean:
            low = factor
        else:
            high = factor
    return np.minimum(MOST, (low + high) / 2 * ranks)


def _upper_quantiles(shares: Sequence[float] | Shares) -> Shares:
    normal = NormalDist()
    return np.array([normal.inv_cdf(1.0 - min(MOST, max(1e-9, share))) for share in shares])

"""The activation pattern: its hotness is the published one, and biases make it with random weights."""

import numpy as np
import pytest
import torch

from activation_pattern import FIRST_SHARE, HOT_ACTIVATIONS, HOT_SHARE, LAST_SHARE, Pattern, power_law
from ambidex.core.model_spec import Activation
from ambidex.formats.hf_config import spec_from_hf
from ambidex.models.registry import build_model
from ambidex.models.weights import make_dummy_weights

OPT = {
    "model_type": "opt", "hidden_size": 256, "ffn_dim": 2048, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 64, "max_position_embeddings": 64, "word_embed_proj_dim": 256, "activation_function": "relu",
}  # fmt: skip


@pytest.mark.parametrize("mean", [0.02, 0.04, 0.1])
def test_the_hottest_neurons_have_their_part_of_all_activations(mean: float) -> None:
    shares = power_law(20000, mean)
    assert shares.mean() == pytest.approx(mean, rel=1e-3)
    assert shares[: int(HOT_SHARE * 20000)].sum() / shares.sum() == pytest.approx(HOT_ACTIVATIONS, rel=1e-3)
    assert (np.diff(shares) <= 0).all()


def test_a_profile_of_another_text_is_right_about_most_hot_neurons() -> None:
    pattern = Pattern.of(3, 5000)
    assert pattern.shares.mean(1) == pytest.approx(np.linspace(FIRST_SHARE, LAST_SHARE, 3), rel=1e-3)
    assert pattern.profiled.sum() == pytest.approx(pattern.shares.sum())
    for layer in range(3):
        hot, seen = (set(np.argsort(-values[layer])[:1000]) for values in (pattern.shares, pattern.profiled))
        assert 0.88 <= len(hot & seen) / 1000 <= 0.92


def test_biases_make_the_shares_with_random_weights() -> None:
    spec = spec_from_hf(OPT)
    assert spec.activation is Activation.RELU
    model = build_model(spec, device=torch.device("cpu"), dtype=torch.float32)
    make_dummy_weights(model, spec, seed=0, device=torch.device("cpu"), dtype=torch.float32)
    pattern = Pattern.of(2, 2048)
    pattern.shape_biases(model)
    x = torch.nn.functional.layer_norm(torch.randn(2000, 256), (256,))
    for sites, shares in zip(model.layer_sites(), pattern.shares, strict=True):
        (first,) = sites.mlp.ins
        active = (first(x) > 0).float().mean(0).numpy()
        assert active.mean() == pytest.approx(shares.mean(), rel=0.05)
        assert np.corrcoef(active, shares)[0, 1] > 0.99
        assert not sites.mlp.out.bias.any()

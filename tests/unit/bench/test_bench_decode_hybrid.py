"""`bench/decode_hybrid.py`: scores spread as they are asked to."""

import pytest
import torch

import decode_hybrid
from ambidex.core.ids import Tier
from ambidex.formats.hf_config import spec_from_hf
from ambidex.models.registry import build_model
from ambidex.models.weights import make_dummy_weights

WIDTH = 512
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 64,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
}  # fmt: skip


@pytest.mark.parametrize(("asked", "wanted"), [(None, 4.5), (5.0, 5.0), (1.5, 1.5)])
def test_scores_of_dummy_queries_spread_as_asked(asked: float | None, wanted: float) -> None:
    """Bug: since dummy queries are larger than other dummy numbers, scores spread by 13.7 where 5 was asked for."""
    spec = spec_from_hf(SHAPE)
    model = build_model(spec, device=torch.device("cpu"), dtype=torch.float32)
    make_dummy_weights(model, spec, seed=7, device=torch.device("cpu"), dtype=torch.float32)
    (queries,) = [m for name, m in model.named_modules() if name.endswith("layers.0.self_attn.q_proj")]
    q = queries(torch.randn(200, WIDTH)).view(-1, 8, 64)  # what a norm leaves has a standard deviation of 1
    keys = torch.zeros(3000, 64)
    pool = type("Pool", (), {"tensors": (keys, torch.zeros(1, 1))})
    attention = type("Attention", (), {"pools": {Tier.GPU: pool}})
    decode_hybrid.fill_pools(attention, key_std=decode_hybrid.RandomPrompts(WIDTH, asked)._key_std)  # type: ignore[arg-type]  # all that it looks at
    scores = torch.einsum("thd,sd->ths", q, keys) / 8
    assert float(scores.std()) == pytest.approx(wanted, rel=0.1)

import dataclasses

import pytest
import torch

from ambidex.core.errors import UnsupportedModelError
from ambidex.core.model_spec import Activation, ModelSpec, RopeSpec
from ambidex.models.registry import ARCHITECTURES, build_model

META = torch.device("meta")
SPEC = ModelSpec(
    architecture="llama", num_layers=2, hidden_size=8, intermediate_size=12, num_q_heads=4, num_kv_heads=2, head_dim=2,
    vocab_size=11, max_context_len=16, norm_eps=1e-5, activation=Activation.SILU, rope=RopeSpec(theta=1e4, dim=2),
    windows=(None, None), tie_embeddings=False,
)  # fmt: skip


def test_build_model_of_unknown_architecture_lists_the_known_ones() -> None:
    spec = dataclasses.replace(SPEC, architecture="gpt5")
    with pytest.raises(UnsupportedModelError, match=r"'gpt5'.*falcon, llama, mistral, opt, qwen2, qwen3"):
        build_model(spec, device=META, dtype=torch.float32)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
def test_build_model_allocates_on_the_device_in_the_dtype_without_gradient(architecture: str) -> None:
    model = build_model(dataclasses.replace(SPEC, architecture=architecture), device=META, dtype=torch.bfloat16)
    parameters = list(model.parameters())
    assert {p.dtype for p in parameters} == {torch.bfloat16}
    assert all(p.is_meta and not p.requires_grad for p in parameters)


def test_build_model_with_tied_embeddings_has_one_matrix_under_two_names() -> None:
    model = build_model(dataclasses.replace(SPEC, tie_embeddings=True), device=META, dtype=torch.float32)
    names = dict(model.named_parameters(remove_duplicate=False))
    assert names["lm_head.weight"] is names["model.embed_tokens.weight"]
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_build_model_names_parameters_as_the_checkpoint_does() -> None:
    model = build_model(dataclasses.replace(SPEC, num_layers=1, windows=(None,)), device=META, dtype=torch.float32)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {
        "model.embed_tokens.weight": (11, 8),
        "model.layers.0.input_layernorm.weight": (8,),
        "model.layers.0.self_attn.q_proj.weight": (8, 8),
        "model.layers.0.self_attn.k_proj.weight": (4, 8),
        "model.layers.0.self_attn.v_proj.weight": (4, 8),
        "model.layers.0.self_attn.o_proj.weight": (8, 8),
        "model.layers.0.post_attention_layernorm.weight": (8,),
        "model.layers.0.mlp.gate_proj.weight": (12, 8),
        "model.layers.0.mlp.up_proj.weight": (12, 8),
        "model.layers.0.mlp.down_proj.weight": (8, 12),
        "model.norm.weight": (8,),
        "lm_head.weight": (11, 8),
    }


def test_registry_knows_every_architecture_that_formats_can_read() -> None:
    from ambidex.formats.hf_config import KNOWN_ARCHITECTURES

    assert set(KNOWN_ARCHITECTURES.values()) == set(ARCHITECTURES)

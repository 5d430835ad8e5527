"""Tiny models and checkpoints for the tests of loading."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ambidex.core.model_spec import ModelSpec
from ambidex.formats.hf_config import spec_from_hf
from ambidex.models.base import CausalLM
from ambidex.models.registry import build_model

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64,
}  # fmt: skip
FALCON: dict[str, Any] = {
    "model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61,
    "tie_word_embeddings": False,
}  # fmt: skip
FALCON_40B = {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}
TIED = {**CONFIG, "tie_word_embeddings": True}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def make_model(spec: ModelSpec, dtype: torch.dtype = torch.float32) -> CausalLM:
    """A model whose parameters hold what no test stores."""
    model = build_model(spec, device=CPU, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-777.0)
    return model


def make_checkpoint(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random tensors for every parameter, tied ones once."""
    generator = torch.Generator().manual_seed(3)
    model = build_model(spec_from_hf(config), device=CPU, dtype=dtype)
    return {
        name: torch.randn(parameter.shape, generator=generator).to(dtype)
        for name, parameter in model.named_parameters()
    }  # fmt: skip


def assert_same(model: nn.Module, checkpoint: Mapping[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    assert parameters.keys() == checkpoint.keys()
    for name, values in checkpoint.items():
        assert torch.equal(parameters[name], values), name


class OneMatrix(nn.Module):
    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)

"""Tiny random transformers models of every family, saved as a checkpoint folder: the oracle of the parity tests.

No tokenizer is saved. transformers is imported only when a model is built: it takes seconds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE: Final = 131  # odd, so that nothing rounds up unseen
NUM_LAYERS: Final = 2
MAX_CONTEXT_LEN: Final = 128
WINDOW: Final = 8

_LLAMA_LIKE: Final = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 80,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_CONTEXT_LEN,
    "rms_norm_eps": 0.01,  # so large that a wrong one shows
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_OPT: Final = {
    "model_type": "opt",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "ffn_dim": 72,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_CONTEXT_LEN,
}
_FALCON: Final = {
    "model_type": "falcon",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_CONTEXT_LEN,
    "layer_norm_epsilon": 0.01,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(kind: str, **settings: float) -> dict[str, dict[str, Any]]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


# "Trained for 32 tokens", so that the 8 frequencies of a head meet every branch of the scalings.
_TRAINED: Final = {"original_max_position_embeddings": 32}


VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama": {
        "model_type": "llama", **_LLAMA_LIKE,
        **_rope("llama3", **_TRAINED, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    },
    "llama_tied": {"model_type": "llama", **_LLAMA_LIKE, "tie_word_embeddings": True},
    "llama_biased": {"model_type": "llama", **_LLAMA_LIKE, "attention_bias": True, "mlp_bias": True},
    "llama_relu": {"model_type": "llama", **_LLAMA_LIKE, "hidden_act": "relu"},
    "llama_linear": {"model_type": "llama", **_LLAMA_LIKE, **_rope("linear", factor=4.0)},
    "llama_yarn": {"model_type": "llama", **_LLAMA_LIKE, **_rope("yarn", **_TRAINED, factor=4.0)},
    "llama_yarn_set": {
        "model_type": "llama", **_LLAMA_LIKE,
        **_rope("yarn", **_TRAINED, factor=4.0, attention_factor=0.75, beta_fast=16.0, beta_slow=2.0),
    },
    "mistral": {"model_type": "mistral", **_LLAMA_LIKE, "head_dim": 12, "sliding_window": WINDOW},
    "qwen2": {"model_type": "qwen2", **_LLAMA_LIKE},
    "qwen2_windows": {
        "model_type": "qwen2", **_LLAMA_LIKE,
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **_LLAMA_LIKE, "head_dim": 24},
    "opt": dict(_OPT),
    "opt_350m": {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 24},
    "opt_2_7b": {**_OPT, "hidden_size": 160, "num_attention_heads": 2},  # heads of 80 dims: rows of 96 in tile order
    "falcon_7b": dict(_FALCON),
    "falcon_11b": {
        **_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
        "tie_word_embeddings": False,
    },
    "falcon_40b": {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon_sequential": {**_FALCON, "multi_query": False, "parallel_attn": False, "bias": True},
}  # fmt: skip
ALIBI_VARIANTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "falcon_alibi": {**_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "falcon_alibi_grouped": {
        **_FALCON, "alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2, "num_attention_heads": 8,
    },
    "falcon_alibi_six": {**_FALCON, "alibi": True, "hidden_size": 96, "num_attention_heads": 6},
}  # fmt: skip
"""Models without rotary positions, whose attention has slopes."""
"""Name → the fields of `config.json`."""


def save_tiny_model(
    variant: str, folder: Path, *, seed: int = 0, max_shard_size: str = "1GB", num_layers: int = NUM_LAYERS
) -> tuple[Path, "PreTrainedModel"]:
    """Build a variant with random fp32 weights and save it as a safetensors folder.

    Args:
        variant: a key of `VARIANTS`.
        folder: where to make the model's own folder.
        seed: of the weights.
        max_shard_size: smaller ones cut the checkpoint into several files with an index.
        num_layers: more than `STEP_BUFFERS` where blocks of the stream lane are to wait for each other.
    Returns:
        The folder with `config.json`, and the model in evaluation mode.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict({**VARIANTS, **ALIBI_VARIANTS}[variant]) | {"num_hidden_layers": num_layers}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    # NOTE: in transformers 5.17 the eager form of Falcon adds slopes twice, once in the mask; its fused form does not.
    form = "sdpa" if variant in ALIBI_VARIANTS else "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=form).eval()
    _randomise(model, seed)
    path = folder / variant
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path, model


def _randomise(model: "PreTrainedModel", seed: int) -> None:
    """Weights so large that attention is far from uniform; biases and norm weights away from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm_weight = parameter.ndim == 1 and name.endswith("weight")
            if is_norm_weight:
                parameter.copy_(1 + 0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(1.5 * noise * parameter.shape[-1] ** -0.5)

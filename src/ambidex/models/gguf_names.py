"""How llama.cpp's converter renames a model's tensors and reorders their rows, undone.

Source: llama.cpp, `gguf-py/gguf/tensor_mapping.py` (names) and `convert_hf_to_gguf.py` (row orders).
"""

import re
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ambidex.core.model_spec import ModelSpec

_LAYER_TENSOR: Final = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")
_OTHER_TENSOR: Final = re.compile(r"(\w+)\.(weight|bias)")

_LLAMA_NAMES: Final[Mapping[str, str]] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LLAMA_LAYER: Final = "model.layers"
_LLAMA_LAYER_NAMES: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_FALCON_NAMES: Final[Mapping[str, str]] = {
    "token_embd": "transformer.word_embeddings",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_FALCON_LAYER: Final = "transformer.h"
_FALCON_LAYER_NAMES: Final[Mapping[str, str]] = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON_TWO_NORMS: Final[Mapping[str, str]] = {**_FALCON_LAYER_NAMES, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}


def find_hf_name(name: str, spec: ModelSpec) -> str | None:
    """Name that a tensor of a GGUF file has in the Hugging Face checkpoint; None if it is not one of the model's."""
    names, layer, layer_names = _choose_names(spec)
    if match := _LAYER_TENSOR.fullmatch(name):
        layer_idx, kind, suffix = match.groups()
        return f"{layer}.{layer_idx}.{layer_names[kind]}.{suffix}" if kind in layer_names else None
    if match := _OTHER_TENSOR.fullmatch(name):
        kind, suffix = match.groups()
        return f"{names[kind]}.{suffix}" if kind in names else None
    return None


def find_row_order(name: str, spec: ModelSpec) -> NDArray[np.int64] | None:
    """For a tensor of a GGUF file whose rows were reordered: the row in the file of each row in the checkpoint."""
    match = _LAYER_TENSOR.fullmatch(name)
    match spec.architecture, match and match[2]:
        case "llama", "attn_q":
            return _split_halves(spec.num_q_heads, spec.head_dim)
        case "llama", "attn_k":
            return _split_halves(spec.num_kv_heads, spec.head_dim)
        case "falcon", "attn_qkv":
            return _group_by_kv_head(spec.num_q_heads, spec.num_kv_heads, spec.head_dim)
        case _:
            return None


def _choose_names(spec: ModelSpec) -> tuple[Mapping[str, str], str, Mapping[str, str]]:
    """Names outside the layers, what stands before a layer's number, names inside a layer."""
    if spec.falcon is None:
        return _LLAMA_NAMES, _LLAMA_LAYER, _LLAMA_LAYER_NAMES
    return _FALCON_NAMES, _FALCON_LAYER, _FALCON_TWO_NORMS if spec.falcon.num_norms == 2 else _FALCON_LAYER_NAMES


def _split_halves(num_heads: int, head_dim: int) -> NDArray[np.int64]:
    """llama.cpp turns neighbouring dimensions of a head with each other, the checkpoint i with i + D/2."""
    rows = np.arange(num_heads * head_dim, dtype=np.int64).reshape(num_heads, head_dim // 2, 2)
    return rows.swapaxes(1, 2).ravel()


def _group_by_kv_head(num_q_heads: int, num_kv_heads: int, head_dim: int) -> NDArray[np.int64]:
    """llama.cpp stores all q heads, all k heads, all v heads; the checkpoint for each KV head its q heads, k and v."""
    q = np.arange(num_q_heads, dtype=np.int64).reshape(num_kv_heads, -1)
    k = num_q_heads + np.arange(num_kv_heads, dtype=np.int64)[:, None]
    heads = np.concatenate([q, k, k + num_kv_heads], axis=1).reshape(-1, 1)
    return (heads * head_dim + np.arange(head_dim, dtype=np.int64)).ravel()

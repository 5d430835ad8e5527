"""Filling a model from GGUF: the tests play llama.cpp's converter, the loader undoes it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ambidex.core.errors import WeightsError
from ambidex.core.model_spec import ModelSpec
from ambidex.formats.gguf import GGUFFile
from ambidex.formats.gguf_config import spec_from_gguf
from ambidex.formats.hf_config import spec_from_hf
from ambidex.formats.locate import find_model
from ambidex.models.weights import load_weights
from gguf_writer import Tensor as GGUFTensor
from gguf_writer import llama_metadata, make_gguf, make_random_tensor, quantize
from small_checkpoints import (
    CONFIG,
    CPU,
    FALCON,
    FALCON_40B,
    Q_PROJ,
    TIED,
    OneMatrix,
    assert_same,
    make_checkpoint,
    make_model,
)

LLAMA_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
FALCON_NAMES = {
    "transformer.word_embeddings": "token_embd", "transformer.ln_f": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2",
    "self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
}  # fmt: skip


def interleave_halves(values: Tensor, num_heads: int) -> Tensor:
    """What llama.cpp does to the rows of q and k: dimension i of a head and i + D/2 become neighbours."""
    return values.view(num_heads, 2, -1, *values.shape[1:]).transpose(1, 2).reshape(values.shape)


def ungroup_fused(values: Tensor, num_q_heads: int, num_kv_heads: int) -> Tensor:
    """What llama.cpp does to Falcon's fused rows: all q heads, then all k, then all v."""
    group = num_q_heads // num_kv_heads
    fused = values.view(num_kv_heads, group + 2, -1, *values.shape[1:])
    parts = fused[:, :group], fused[:, group], fused[:, group + 1]
    return torch.cat([part.reshape(-1, *values.shape[1:]) for part in parts])


def convert(checkpoint: Mapping[str, Tensor], spec: ModelSpec) -> dict[str, GGUFTensor]:
    """A Hugging Face checkpoint as llama.cpp's converter writes it, in fp32."""
    tensors = {}
    for name, values in checkpoint.items():
        if spec.architecture == "llama" and ".q_proj." in name:
            values = interleave_halves(values, spec.num_q_heads)
        if spec.architecture == "llama" and ".k_proj." in name:
            values = interleave_halves(values, spec.num_kv_heads)
        if ".query_key_value." in name:
            values = ungroup_fused(values, spec.num_q_heads, spec.num_kv_heads)
        tensors[rename(name, FALCON_NAMES if spec.falcon else LLAMA_NAMES)] = quantize(values.numpy())
    return tensors


def rename(name: str, names: Mapping[str, str]) -> str:
    stem, _, suffix = name.rpartition(".")
    if stem in names:
        return f"{names[stem]}.{suffix}"
    _, _, layer_idx, *rest = stem.split(".")
    return f"blk.{layer_idx}.{names['.'.join(rest)]}.{suffix}"


GGUF_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": CONFIG,
    "llama, tied": TIED,
    "llama, biased": {**CONFIG, "attention_bias": True, "mlp_bias": True},
    "qwen2": {**CONFIG, "model_type": "qwen2"},
    "qwen3": {**CONFIG, "model_type": "qwen3", "head_dim": 12},
    "falcon 7b": FALCON,
    "falcon 40b": FALCON_40B,
    "falcon 11b": {**FALCON_40B, "num_ln_in_parallel_attn": 1, "bias": True},
}


@pytest.mark.parametrize("config", GGUF_CONFIGS.values(), ids=GGUF_CONFIGS)
def test_load_when_gguf_undoes_the_converter(tmp_path: Path, config: dict[str, Any]) -> None:
    spec = spec_from_hf(config)
    checkpoint = make_checkpoint(config)
    path = tmp_path / "m.gguf"
    path.write_bytes(make_gguf({}, convert(checkpoint, spec)))
    model = make_model(spec)
    load_weights(model, spec, find_model(str(path)), device=CPU, dtype=torch.float32)
    assert_same(model, checkpoint)


def test_load_when_gguf_q_has_numbered_rows_puts_halves_of_each_head_together(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(CONFIG)
    tensors = convert(checkpoint, spec_from_hf(CONFIG))
    rows = np.arange(32, dtype=np.float32)[:, None].repeat(32, axis=1)
    tensors["blk.0.attn_q.weight"] = quantize(rows)
    path = tmp_path / "m.gguf"
    path.write_bytes(make_gguf({}, tensors))
    model = make_model(spec_from_hf(CONFIG))
    load_weights(model, spec_from_hf(CONFIG), find_model(str(path)), device=CPU, dtype=torch.float32)
    first_head = model.get_parameter(Q_PROJ)[:8, 0].tolist()
    assert first_head == [0, 2, 4, 6, 1, 3, 5, 7]


def test_load_when_gguf_has_own_metadata_builds_and_fills_the_model(tmp_path: Path) -> None:
    config = {**CONFIG, "intermediate_size": 64}
    tensors = convert(make_checkpoint(config), spec_from_hf(config))
    tensors["rope_freqs.weight"] = quantize(np.array([1, 1, 2, 4], np.float32))
    path = tmp_path / "m.gguf"
    path.write_bytes(make_gguf(llama_metadata(), tensors))
    spec = spec_from_gguf(GGUFFile(path))
    model = make_model(spec)
    load_weights(model, spec, find_model(str(path)), device=CPU, dtype=torch.float32)
    assert not any(bool((parameter == -777).any()) for parameter in model.parameters())


@pytest.mark.parametrize("type_name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K"])
def test_load_when_gguf_is_quantised_takes_its_numbers(tmp_path: Path, type_name: str) -> None:
    tensor = make_random_tensor((6, 256), type_name, seed=5)
    path = tmp_path / "m.gguf"
    path.write_bytes(make_gguf({}, {"weight": tensor}))
    model = OneMatrix(6, 256)
    load_weights(model, spec_from_hf(CONFIG), find_model(str(path)), device=CPU, dtype=torch.float32)
    assert np.array_equal(model.weight.numpy(), GGUFFile(path).dequantize("weight"))


def test_load_when_gguf_tensor_is_large_joins_its_pieces(tmp_path: Path) -> None:
    tensor = make_random_tensor((2100, 4096), "Q8_0", seed=5)  # 33 MiB in fp32: two pieces
    path = tmp_path / "m.gguf"
    path.write_bytes(make_gguf({}, {"weight": tensor}))
    model = OneMatrix(2100, 4096)
    load_weights(model, spec_from_hf(CONFIG), find_model(str(path)), device=CPU, dtype=torch.float32)
    assert np.array_equal(model.weight.numpy(), GGUFFile(path).dequantize("weight"))


def test_load_when_gguf_tensors_do_not_fit_names_them(tmp_path: Path) -> None:
    spec = spec_from_hf(CONFIG)
    tensors = convert(make_checkpoint(CONFIG), spec)
    del tensors["blk.1.ffn_up.weight"]
    tensors["blk.1.ffn_gate_inp.weight"] = quantize(np.ones(4, np.float32))
    tensors["blk.01.ffn_up.weight"] = quantize(np.ones(4, np.float32))
    path = tmp_path / "m.gguf"
    path.write_bytes(make_gguf({}, tensors))
    with pytest.raises(WeightsError) as caught:
        load_weights(make_model(spec), spec, find_model(str(path)), device=CPU, dtype=torch.float32)
    assert "1 missing (model.layers.1.mlp.up_proj.weight)" in str(caught.value)
    assert "2 unexpected ('blk.1.ffn_gate_inp.weight', 'blk.01.ffn_up.weight')" in str(caught.value)

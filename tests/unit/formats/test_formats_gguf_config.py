"""Metadata of a GGUF file → ModelSpec."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ambidex.core.dtypes import DType
from ambidex.core.errors import ModelFileError, UnsupportedModelError
from ambidex.core.model_spec import Activation, FalconSpec, ModelSpec, RopeScaling, RopeScalingKind, RopeSpec
from ambidex.formats.gguf import GGUFFile
from ambidex.formats.gguf_config import spec_from_gguf
from gguf_writer import Tensor, embedding, llama_metadata, make_gguf, quantize

BIAS = quantize(np.zeros(32, np.float32))


def read(tmp_path: Path, metadata: dict[str, object], **tensors: Tensor) -> ModelSpec:
    path = tmp_path / "m.gguf"
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    path.write_bytes(make_gguf(metadata, {"token_embd.weight": embedding(), **named}))
    return spec_from_gguf(GGUFFile(path))


def rename(arch: str, metadata: dict[str, object]) -> dict[str, object]:
    renamed = {key.replace("llama.", f"{arch}."): value for key, value in metadata.items()}
    return {**renamed, "general.architecture": arch}


def test_llama_when_complete_gives_all_fields(tmp_path: Path) -> None:
    spec = read(tmp_path, llama_metadata())
    assert (spec.architecture, spec.num_layers, spec.hidden_size, spec.intermediate_size) == ("llama", 2, 32, 64)
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (4, 2, 8, 64)
    assert (spec.max_context_len, spec.activation) == (256, Activation.SILU)
    assert spec.norm_eps == pytest.approx(1e-5, rel=1e-6)
    assert spec.rope == RopeSpec(theta=50000.0, dim=8)
    assert (spec.windows, spec.tie_embeddings) == ((None, None), True)
    assert (spec.bos_id, spec.eos_ids) == (1, (2,))
    assert (spec.qkv_bias, spec.out_bias, spec.mlp_bias, spec.qk_norm) == (False,) * 4


def test_llama_when_output_is_there_is_not_tied(tmp_path: Path) -> None:
    assert not read(tmp_path, llama_metadata(), output__weight=embedding()).tie_embeddings


def test_llama_when_biases_are_there_has_them(tmp_path: Path) -> None:
    tensors = {"blk__0__attn_q__bias": BIAS, "blk__0__attn_output__bias": BIAS, "blk__0__ffn_down__bias": BIAS}
    spec = read(tmp_path, llama_metadata(), **tensors)
    assert (spec.qkv_bias, spec.out_bias, spec.mlp_bias) == (True, True, True)


def test_llama_when_keys_are_absent_takes_defaults(tmp_path: Path) -> None:
    spec = read(tmp_path, llama_metadata(attention__head_count_kv=None, rope__freq_base=None))
    assert (spec.num_kv_heads, spec.rope) == (4, RopeSpec(theta=10000.0, dim=8))


def test_llama_when_head_length_is_given_takes_it(tmp_path: Path) -> None:
    spec = read(tmp_path, llama_metadata(attention__key_length=16, attention__value_length=16, rope__dimension_count=4))
    assert spec.head_dim == 16
    assert spec.rope is not None
    assert spec.rope.dim == 4


def test_llama_when_window_is_given_has_it_in_all_layers(tmp_path: Path) -> None:
    assert read(tmp_path, llama_metadata(attention__sliding_window=16)).windows == (16, 16)


def test_llama_when_frequency_factors_are_there_reads_them(tmp_path: Path) -> None:
    factors = quantize(np.array([1, 1, 2.5, 8], np.float32))
    spec = read(tmp_path, llama_metadata(), rope_freqs__weight=factors)
    assert spec.rope == RopeSpec(theta=50000.0, dim=8, freq_factors=(1.0, 1.0, 2.5, 8.0))


SCALINGS: dict[str, tuple[dict[str, object], RopeScaling | None]] = {
    "none": ({"rope__scaling__type": "none"}, None),
    "linear": (
        {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0},
        RopeScaling(kind=RopeScalingKind.LINEAR, factor=4.0),
    ),
    "linear, before 2024": ({"rope__scale_linear": 4.0}, RopeScaling(kind=RopeScalingKind.LINEAR, factor=4.0)),
    "yarn": (
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__original_context_length": 128,
         "rope__scaling__yarn_beta_fast": 16.0, "rope__scaling__attn_factor": 0.5},
        RopeScaling(kind=RopeScalingKind.YARN, factor=2.0, original_context_len=128, beta_fast=16.0,
                    attention_factor=0.5 * (0.1 * math.log(2) + 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "scaling"), SCALINGS.values(), ids=SCALINGS)
def test_rope_when_scaled_is_read(tmp_path: Path, changes: dict[str, object], scaling: RopeScaling | None) -> None:
    assert read(tmp_path, llama_metadata(**changes)).rope == RopeSpec(theta=50000.0, dim=8, scaling=scaling)


def test_yarn_when_it_stretches_gives_longer_context(tmp_path: Path) -> None:
    metadata = llama_metadata(rope__scaling__type="yarn", rope__scaling__factor=4.0)
    assert read(tmp_path, metadata).max_context_len == 1024


def test_eos_when_turn_has_its_own_gives_both(tmp_path: Path) -> None:
    metadata = {**llama_metadata(), "tokenizer.ggml.eot_token_id": 5}
    assert read(tmp_path, metadata).eos_ids == (2, 5)


def test_qwen2_when_read_has_qkv_bias(tmp_path: Path) -> None:
    spec = read(tmp_path, rename("qwen2", llama_metadata()))
    assert (spec.architecture, spec.qkv_bias, spec.qk_norm) == ("qwen2", True, False)


def test_qwen3_when_read_has_head_norms(tmp_path: Path) -> None:
    spec = read(tmp_path, rename("qwen3", llama_metadata(attention__key_length=16)))
    assert (spec.architecture, spec.qkv_bias, spec.qk_norm, spec.head_dim) == ("qwen3", False, True, 16)


FALCON = rename("falcon", llama_metadata(attention__layer_norm_rms_epsilon=None, attention__layer_norm_epsilon=1e-3))


def test_falcon_when_7b_form_has_one_norm(tmp_path: Path) -> None:
    spec = read(tmp_path, {**FALCON, "falcon.attention.head_count_kv": 1})
    assert spec.falcon == FalconSpec(parallel=True, num_norms=1, grouped_qkv=False)
    assert spec.norm_eps == pytest.approx(1e-3, rel=1e-6)
    assert (spec.activation, spec.qkv_bias) == (Activation.GELU, False)


def test_falcon_when_40b_form_has_two_norms(tmp_path: Path) -> None:
    spec = read(tmp_path, FALCON, blk__0__attn_norm_2__weight=BIAS, blk__0__attn_qkv__bias=BIAS)
    assert spec.falcon == FalconSpec(parallel=True, num_norms=2, grouped_qkv=True)
    assert spec.qkv_bias


@pytest.mark.parametrize(
    ("type_name", "dtype"),
    [("F32", DType.FP32), ("F16", DType.FP16), ("BF16", DType.BF16), ("Q8_0", DType.BF16)],
)
def test_dtype_when_matrices_are_of_a_type_is_its_16_bit_format(tmp_path: Path, type_name: str, dtype: DType) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(make_gguf(llama_metadata(), {"token_embd.weight": embedding(type_name=type_name), "b": BIAS}))
    assert spec_from_gguf(GGUFFile(path)).dtype is dtype


UNSUPPORTED: dict[str, tuple[dict[str, object], str]] = {
    "architecture": ({"general.architecture": "gemma3"}, "architecture 'gemma3'.*llama, qwen2, qwen3, falcon"),
    "split": ({**llama_metadata(), "split.count": 3}, "split into 3 files.*llama-gguf-split --merge"),
    "experts": (llama_metadata(expert_count=8), "mixture of experts"),
    "window pattern": (llama_metadata(attention__sliding_window_pattern=6), "sliding_window_pattern"),
    "value length": (llama_metadata(attention__key_length=16, attention__value_length=8), "16 dim.* with values of 8"),
    "longrope": (llama_metadata(rope__scaling__type="longrope"), "rope.scaling.type 'longrope'"),
    "yarn extrapolation": (
        llama_metadata(rope__scaling__type="yarn", rope__scaling__yarn_ext_factor=0.5), "yarn_ext_factor",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("metadata", "fault"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_read_when_not_supported_names_what(tmp_path: Path, metadata: dict[str, object], fault: str) -> None:
    with pytest.raises(UnsupportedModelError, match=fault):
        read(tmp_path, metadata)


WRONG: dict[str, tuple[dict[str, object], dict[str, Any], str]] = {
    "no architecture": ({}, {}, "general.architecture is missing"),
    "size missing": (llama_metadata(block_count=None), {}, "llama.block_count is missing"),
    "size huge": (llama_metadata(block_count=2**32 - 1), {}, "llama.block_count is 4294967295"),
    "heads by layer": (llama_metadata(attention__head_count=[4, 4]), {}, "llama.attention.head_count is array"),
    "heads do not divide": (llama_metadata(attention__head_count=3), {}, "attention.head_count is 3: .* multiple of 2"),
    "width does not divide": (
        llama_metadata(attention__head_count=5, attention__head_count_kv=5), {},
        "embedding_length is 32: .* multiple of 5",
    ),
    "rotary odd": (llama_metadata(rope__dimension_count=5), {}, "dimension_count is 5: it must be a multiple of 2"),
    "rotary wider than a head": (llama_metadata(rope__dimension_count=10), {}, "dimension_count is 10: .* from 2 to 8"),
    "factors of other length": (
        llama_metadata(), {"rope_freqs__weight": BIAS}, r"rope_freqs.weight has the shape \(32,\): it must be \(4,\)",
    ),
    "factors 0": (
        llama_metadata(), {"rope_freqs__weight": quantize(np.zeros(4, np.float32))}, "must be finite and above 0",
    ),
    "embedding a vector": (llama_metadata(), {"token_embd__weight": BIAS}, r"token_embd.weight is of shape \(32,\)"),
}  # fmt: skip


@pytest.mark.parametrize(("metadata", "tensors", "fault"), WRONG.values(), ids=WRONG)
def test_read_when_key_is_wrong_names_it(
    tmp_path: Path, metadata: dict[str, object], tensors: dict[str, Tensor], fault: str
) -> None:
    with pytest.raises(ModelFileError, match=fault):
        read(tmp_path, metadata, **tensors)


def test_read_when_embedding_is_missing_names_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(make_gguf(llama_metadata()))
    with pytest.raises(ModelFileError, match=r"token_embd\.weight is missing"):
        spec_from_gguf(GGUFFile(path))

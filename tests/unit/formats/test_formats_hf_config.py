"""config.json of each family → ModelSpec; every wrong value is refused by name."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from ambidex.core.dtypes import DType
from ambidex.core.errors import ModelFileError, UnsupportedModelError
from ambidex.core.model_spec import Activation, FalconSpec, OptSpec, RopeScaling, RopeScalingKind, RopeSpec
from ambidex.formats.hf_config import KNOWN_ARCHITECTURES, spec_from_hf

LLAMA_LIKE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 512,
}


def llama(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["LlamaForCausalLM"], **LLAMA_LIKE, **changes}


def mistral(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["MistralForCausalLM"], **LLAMA_LIKE, **changes}


def qwen2(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["Qwen2ForCausalLM"], **LLAMA_LIKE, **changes}


def qwen3(**changes: Any) -> dict[str, Any]:
    return {"architectures": ["Qwen3ForCausalLM"], **LLAMA_LIKE, "head_dim": 24, **changes}


def opt(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"], "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 3,
        "num_attention_heads": 8, "vocab_size": 131, "max_position_embeddings": 512, **changes,
    }  # fmt: skip


def falcon(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["FalconForCausalLM"], "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8,
        "vocab_size": 131, **changes,
    }  # fmt: skip


def test_llama_when_complete_gives_all_fields() -> None:
    config = llama(rms_norm_eps=1e-5, torch_dtype="float16", bos_token_id=1, eos_token_id=[2, 7], rope_theta=5e5)
    spec = spec_from_hf(config)
    assert (spec.architecture, spec.num_layers, spec.hidden_size, spec.intermediate_size) == ("llama", 4, 64, 96)
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 2, 8, 131)
    assert (spec.max_context_len, spec.norm_eps, spec.activation) == (512, 1e-5, Activation.SILU)
    assert spec.rope == RopeSpec(theta=5e5, dim=8)
    assert spec.windows == (None,) * 4
    assert (spec.dtype, spec.bos_id, spec.eos_ids) == (DType.FP16, 1, (2, 7))
    assert (spec.tie_embeddings, spec.qkv_bias, spec.out_bias, spec.mlp_bias, spec.qk_norm) == (False,) * 5


def test_llama_when_fields_are_absent_takes_the_familys_defaults() -> None:
    config = llama()
    del config["num_key_value_heads"]
    spec = spec_from_hf(config)
    assert (spec.num_kv_heads, spec.norm_eps, spec.dtype) == (8, 1e-6, DType.BF16)
    assert spec.rope == RopeSpec(theta=10000.0, dim=8)
    assert (spec.bos_id, spec.eos_ids) == (None, ())


def test_llama_when_biases_are_on_has_them_everywhere() -> None:
    spec = spec_from_hf(llama(attention_bias=True, mlp_bias=True))
    assert spec.qkv_bias
    assert spec.out_bias
    assert spec.mlp_bias


def test_llama_when_head_dim_is_given_takes_it() -> None:
    spec = spec_from_hf(llama(head_dim=32))
    assert spec.head_dim == 32
    assert spec.rope == RopeSpec(theta=10000.0, dim=32)


def test_llama_when_rotary_part_is_given_turns_only_that() -> None:
    spec = spec_from_hf(llama(head_dim=32, partial_rotary_factor=0.25))
    assert spec.rope == RopeSpec(theta=10000.0, dim=8)


@pytest.mark.parametrize(("name", "activation"), [("relu", Activation.RELU), ("gelu", Activation.GELU)])
def test_llama_when_activation_is_another_takes_it(name: str, activation: Activation) -> None:
    assert spec_from_hf(llama(hidden_act=name)).activation is activation


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"dtype": "float32"}, DType.FP32),
        ({"torch_dtype": "torch.bfloat16"}, DType.BF16),
        ({"dtype": None}, DType.BF16),
    ],
)
def test_dtype_when_spelt_in_any_way_is_read(changes: dict[str, Any], dtype: DType) -> None:
    assert spec_from_hf(llama(**changes)).dtype is dtype


LLAMA3 = {
    "factor": 8, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
SCALINGS = {
    "linear": (
        {"rope_type": "linear", "factor": 4.0},
        RopeScaling(kind=RopeScalingKind.LINEAR, factor=4.0),
    ),
    "llama3": (
        {"rope_type": "llama3", **LLAMA3},
        RopeScaling(kind=RopeScalingKind.LLAMA3, factor=8.0, original_context_len=256),
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256},
        RopeScaling(kind=RopeScalingKind.YARN, factor=2.0, original_context_len=256),
    ),
    "yarn with all": (
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "beta_fast": 16, "beta_slow": 2,
         "attention_factor": 0.5},
        RopeScaling(kind=RopeScalingKind.YARN, factor=2.0, original_context_len=256, beta_fast=16.0, beta_slow=2.0,
                    attention_factor=0.5),
    ),
    "default": ({"rope_type": "default"}, None),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "scaling"), SCALINGS.values(), ids=SCALINGS)
def test_rope_when_spelt_new_is_read(settings: dict[str, Any], scaling: RopeScaling | None) -> None:
    spec = spec_from_hf(llama(rope_parameters={"rope_theta": 123.0, **settings}))
    assert spec.rope == RopeSpec(theta=123.0, dim=8, scaling=scaling)


@pytest.mark.parametrize(("settings", "scaling"), SCALINGS.values(), ids=SCALINGS)
def test_rope_when_spelt_old_is_read(settings: dict[str, Any], scaling: RopeScaling | None) -> None:
    settings = dict(settings)
    old = {"type": settings.pop("rope_type"), **settings}
    spec = spec_from_hf(llama(rope_theta=123.0, rope_scaling=old))
    assert spec.rope == RopeSpec(theta=123.0, dim=8, scaling=scaling)


def test_yarn_when_it_stretches_beyond_max_position_gives_longer_context() -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert spec_from_hf(llama(rope_scaling=yarn)).max_context_len == 2048


def test_linear_when_it_stretches_leaves_context() -> None:
    assert spec_from_hf(llama(rope_scaling={"type": "linear", "factor": 4.0})).max_context_len == 512


def test_yarn_when_factor_is_absent_takes_quotient_of_contexts() -> None:
    spec = spec_from_hf(llama(rope_scaling={"type": "yarn", "original_max_position_embeddings": 128}))
    assert spec.rope is not None
    assert spec.rope.scaling == RopeScaling(kind=RopeScalingKind.YARN, factor=4.0, original_context_len=128)


def test_yarn_when_two_scales_are_given_divides_them() -> None:
    yarn = {
        "type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 128,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    }
    spec = spec_from_hf(llama(rope_scaling=yarn))
    assert spec.rope is not None
    assert spec.rope.scaling is not None
    expected = (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    assert spec.rope.scaling.attention_factor == pytest.approx(expected, rel=1e-12)


def test_mistral_when_window_is_set_has_it_in_all_layers() -> None:
    assert spec_from_hf(mistral(sliding_window=16)).windows == (16,) * 4


def test_mistral_when_window_is_null_has_none() -> None:
    assert spec_from_hf(mistral(sliding_window=None)).windows == (None,) * 4


def test_qwen2_when_read_has_qkv_bias_only() -> None:
    spec = spec_from_hf(qwen2())
    assert (spec.architecture, spec.qkv_bias, spec.out_bias, spec.mlp_bias) == ("qwen2", True, False, False)


def test_qwen2_when_windows_are_on_has_them_from_max_window_layers() -> None:
    spec = spec_from_hf(qwen2(use_sliding_window=True, sliding_window=16, max_window_layers=3))
    assert spec.windows == (None, None, None, 16)


def test_qwen2_when_windows_are_off_ignores_the_window() -> None:
    assert spec_from_hf(qwen2(use_sliding_window=False, sliding_window=16, max_window_layers=0)).windows == (None,) * 4


def test_qwen3_when_layer_types_are_given_follows_them() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    spec = spec_from_hf(qwen3(use_sliding_window=True, sliding_window=16, layer_types=kinds, max_window_layers=4))
    assert spec.windows == (16, None, 16, None)


def test_qwen3_when_read_has_head_norms_and_own_head_dim() -> None:
    spec = spec_from_hf(qwen3(attention_bias=True))
    assert (spec.architecture, spec.qk_norm, spec.head_dim, spec.qkv_bias, spec.out_bias) == (
        "qwen3",
        True,
        24,
        True,
        True,
    )


def test_qwen3_when_head_dim_is_absent_takes_128() -> None:
    assert spec_from_hf(qwen3(head_dim=None)).head_dim == 128


def test_opt_when_usual_form_has_all_fields() -> None:
    spec = spec_from_hf(opt(bos_token_id=2, eos_token_id=2))
    assert (spec.architecture, spec.intermediate_size, spec.num_kv_heads, spec.head_dim) == ("opt", 96, 8, 8)
    assert (spec.norm_eps, spec.activation, spec.rope, spec.tie_embeddings) == (1e-5, Activation.RELU, None, True)
    assert (spec.qkv_bias, spec.out_bias, spec.mlp_bias) == (True, True, True)
    assert spec.opt == OptSpec(word_embed_dim=64, norm_before=True, final_norm=True)
    assert spec.eos_ids == (2,)


def test_opt_when_350m_form_has_narrow_embedding_and_no_final_norm() -> None:
    spec = spec_from_hf(opt(word_embed_proj_dim=32, do_layer_norm_before=False, enable_bias=False))
    assert spec.opt == OptSpec(word_embed_dim=32, norm_before=False, final_norm=False)
    assert not spec.qkv_bias


def test_opt_when_final_norm_is_removed_has_none() -> None:
    spec = spec_from_hf(opt(_remove_final_layer_norm=True, activation_function="gelu"))
    assert spec.opt == OptSpec(word_embed_dim=64, norm_before=True, final_norm=False)
    assert spec.activation is Activation.GELU


FALCONS = {
    "7b": (
        falcon(num_kv_heads=8),  # ignored with multi_query, as transformers writes it
        1, FalconSpec(parallel=True, num_norms=1, grouped_qkv=False),
    ),
    "40b": (
        falcon(new_decoder_architecture=True, num_kv_heads=2, multi_query=True, parallel_attn=False),
        2, FalconSpec(parallel=True, num_norms=2, grouped_qkv=True),
    ),
    "11b": (
        falcon(new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1),
        2, FalconSpec(parallel=True, num_norms=1, grouped_qkv=True),
    ),
    "sequential": (
        falcon(multi_query=False, parallel_attn=False),
        8, FalconSpec(parallel=False, num_norms=1, grouped_qkv=True),
    ),
    "first release, 7b": (
        {"architectures": ["RWForCausalLM"], "hidden_size": 64, "n_layer": 3, "n_head": 8, "vocab_size": 131,
         "multi_query": True, "alibi": False, "parallel_attn": True},
        1, FalconSpec(parallel=True, num_norms=1, grouped_qkv=False),
    ),
    "first release, 40b": (
        {"architectures": ["RWForCausalLM"], "hidden_size": 64, "n_layer": 3, "n_head": 8, "n_head_kv": 2,
         "vocab_size": 131, "alibi": False, "parallel_attn": True},
        2, FalconSpec(parallel=True, num_norms=2, grouped_qkv=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "num_kv_heads", "form"), FALCONS.values(), ids=FALCONS)
def test_falcon_when_of_any_form_has_its_heads_and_norms(
    config: dict[str, Any], num_kv_heads: int, form: FalconSpec
) -> None:
    spec = spec_from_hf(config)
    assert (spec.architecture, spec.num_layers, spec.num_q_heads, spec.head_dim) == ("falcon", 3, 8, 8)
    assert spec.num_kv_heads == num_kv_heads
    assert spec.falcon == form


def test_falcon_when_fields_are_absent_takes_the_familys_defaults() -> None:
    spec = spec_from_hf(falcon())
    assert (spec.intermediate_size, spec.max_context_len, spec.norm_eps) == (256, 2048, 1e-5)
    assert (spec.activation, spec.tie_embeddings, spec.qkv_bias) == (Activation.GELU, True, False)
    assert spec.rope == RopeSpec(theta=10000.0, dim=8)


def test_falcon_when_fields_are_given_takes_them() -> None:
    spec = spec_from_hf(falcon(ffn_hidden_size=100, activation="relu", bias=True, tie_word_embeddings=False))
    assert (spec.intermediate_size, spec.activation, spec.tie_embeddings) == (100, Activation.RELU, False)
    assert (spec.qkv_bias, spec.out_bias, spec.mlp_bias) == (True, True, True)


@pytest.mark.parametrize("model_type", sorted(set(KNOWN_ARCHITECTURES.values())))
def test_architecture_when_only_model_type_is_there_follows_it(model_type: str) -> None:
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3, "opt": opt, "falcon": falcon,
    }  # fmt: skip
    config = {**makers[model_type](), "architectures": None, "model_type": model_type}
    assert spec_from_hf(config).architecture == model_type


UNSUPPORTED = {
    "architecture": ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM, MistralForCausalLM"),
    "known type, other class": (
        llama(architectures=["LlamaForSequenceClassification"], model_type="llama"),
        "LlamaForSeq",
    ),
    "no architecture": ({}, "architecture ''"),
    "quantised": (llama(quantization_config={"quant_method": "gptq"}), "quantised by 'gptq'"),
    "dynamic rope": (llama(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope type 'dynamic'"),
    "longrope": (llama(rope_parameters={"rope_type": "longrope"}), "rope type 'longrope'"),
    "rope by layer": (llama(rope_parameters={"full_attention": {"rope_theta": 1e4}}), "differ between kinds of layers"),
    "yarn not truncated": (llama(rope_scaling={"type": "yarn", "factor": 2.0, "truncate": False}), "truncate false"),
    "activation": (llama(hidden_act="gelu_new"), "hidden_act 'gelu_new'"),
    "dtype": (llama(dtype="float64"), "dtype 'float64'"),
    "layer type": (qwen3(layer_types=["linear_attention"] * 4), "layer type 'linear_attention'"),
    "norm without weights": (opt(layer_norm_elementwise_affine=False), "layer_norm_elementwise_affine"),
}


@pytest.mark.parametrize(("config", "fault"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_read_when_not_supported_names_what(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(UnsupportedModelError, match=fault):
        spec_from_hf(config)


WRONG = {
    "size missing": (llama(hidden_size=None), "hidden_size is missing: it must be an integer from 1 to"),
    "size a string": (llama(hidden_size="64"), "hidden_size is '64': it must be an integer"),
    "size a float": (llama(hidden_size=64.0), "hidden_size is 64.0"),
    "size a bool": (llama(hidden_size=True), "hidden_size is True: it must be an integer"),
    "size 0": (llama(vocab_size=0), "vocab_size is 0"),
    "size negative": (llama(intermediate_size=-1), "intermediate_size is -1"),
    "size huge": (llama(num_hidden_layers=10**9), "num_hidden_layers is 1000000000: .* 1 to 4096"),
    "heads do not divide": (llama(num_attention_heads=7, num_key_value_heads=7), "hidden_size is 64: .* multiple of 7"),
    "kv heads do not divide": (llama(num_key_value_heads=3), "num_attention_heads is 8: it must be a multiple of 3"),
    "head_dim odd": (llama(head_dim=7), "7 of a head's 7 dimensions are rotary"),
    "nothing turns": (llama(partial_rotary_factor=0.0), "0 of a head's 8 dimensions are rotary"),
    "eps infinite": (llama(rms_norm_eps=math.inf), "rms_norm_eps is inf: it must be a number from 0 to 1"),
    "eps a bool": (llama(rms_norm_eps=True), "rms_norm_eps is True: it must be a number"),
    "eps no number": (llama(rms_norm_eps=math.nan), "rms_norm_eps is nan"),
    "flag a number": (llama(attention_bias=1), "attention_bias is 1: it must be true or false"),
    "activation a list": (llama(hidden_act=[]), "hidden_act is .*: it must be a string"),
    "architectures a string": (llama(architectures="LlamaForCausalLM"), "architectures is .*: it must be a list"),
    "eos a string": (llama(eos_token_id="</s>"), "eos_token_id is '</s>': it must be a token id or a list"),
    "eos negative": (llama(eos_token_id=[2, -1]), "eos_token_id is"),
    "bos a list": (llama(bos_token_id=[1]), "bos_token_id is"),
    "rope a string": (llama(rope_scaling="linear"), "rope_scaling is 'linear': it must be an object"),
    "theta a string": (llama(rope_theta="1e4"), "rope_theta is '1e4'"),
    "theta 1": (llama(rope_theta=1), "rope_theta is 1: it must be a number from 1.1"),
    "factor missing": (llama(rope_scaling={"type": "linear"}), "factor is missing: it must be a number from 1 to"),
    "factor 0": (llama(rope_scaling={"type": "linear", "factor": 0}), "factor is 0"),
    "llama3 incomplete": (llama(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor is missing"),
    "llama3 factors equal": (
        llama(rope_scaling={"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4.0}), "above low_freq_factor",
    ),
    "layer_types too short": (qwen3(layer_types=["full_attention"]), "a list of 4 entries"),
    "sliding without window": (qwen2(layer_types=["sliding_attention"] * 4), "sliding_window is missing"),
    "window 0": (mistral(sliding_window=0), "sliding_window is 0"),
    "three norms": (falcon(new_decoder_architecture=True, num_ln_in_parallel_attn=3), "num_ln_in_parallel_attn is 3"),
    "falcon heads": (falcon(num_attention_heads=9), "hidden_size is 64: it must be a multiple of 9"),
    "opt heads": (opt(num_attention_heads=9), "hidden_size is 64: it must be a multiple of 9"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "fault"), WRONG.values(), ids=WRONG)
def test_read_when_field_is_wrong_names_it(config: dict[str, Any], fault: str) -> None:
    with pytest.raises(ModelFileError, match=fault) as caught:
        spec_from_hf(config, where="here.json")
    assert str(caught.value).startswith("here.json: ")

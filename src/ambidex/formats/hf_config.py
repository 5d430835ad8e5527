"""`config.json` of a Hugging Face checkpoint → `ModelSpec`. A new family is one function and one line in `_READERS`.

Both spellings of rotary settings are read: `rope_theta` + `rope_scaling`, and transformers 5's `rope_parameters`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from ambidex.core.dtypes import DType
from ambidex.core.errors import ModelFileError
from ambidex.core.model_spec import (
    Activation,
    FalconSpec,
    ModelSpec,
    OptSpec,
    RopeScaling,
    RopeScalingKind,
    RopeSpec,
)
from ambidex.formats.fields import MAX_CONTEXT, MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields
from ambidex.formats.json_file import show

KNOWN_ARCHITECTURES: Final[Mapping[str, str]] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "OPTForCausalLM": "opt",
    "FalconForCausalLM": "falcon",
    "RWForCausalLM": "falcon",
}
"""Class named in a checkpoint's `architectures` → our name of the family."""

_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": Activation.SILU, "swish": Activation.SILU, "relu": Activation.RELU, "gelu": Activation.GELU,
}  # fmt: skip
_DTYPES: Final[Mapping[str, DType]] = {
    "float32": DType.FP32, "bfloat16": DType.BF16, "float16": DType.FP16,
}  # fmt: skip
# What transformers takes where a config does not say.
_QWEN3_HEAD_DIM: Final = 128
_QWEN_FIRST_WINDOW: Final = 28
_FALCON_CONTEXT: Final = 2048
_DEFAULT_THETA: Final = 10000.0
_OPT_NORM_EPS: Final = 1e-5  # never in a config: torch's default for LayerNorm

_SLIDING: Final = "sliding_attention"
_FULL: Final = "full_attention"


def spec_from_hf(config: Mapping[str, object], *, where: str = "config.json") -> ModelSpec:
    """What a checkpoint's `config.json` says; `where` names it in errors.

    Raises:
        ModelFileError: a field is missing, of another type or outside its limits.
        UnsupportedModelError: the model is of a family, or uses something, that this engine does not run.
    """
    fields = Fields(config, where)
    architecture = _find_architecture(fields)
    if fields.has("quantization_config"):
        method = fields.group("quantization_config").text("quant_method", default="unknown")
        raise fields.refusal(f"weights quantised by {show(method)}", "16-bit or 32-bit safetensors, or a GGUF file")
    return _READERS[architecture](fields)


def _find_architecture(fields: Fields) -> str:
    names = fields.texts("architectures")
    for name in names:
        if name in KNOWN_ARCHITECTURES:
            return KNOWN_ARCHITECTURES[name]
    model_type = fields.text("model_type", default="")  # a config that was saved without a model has only this
    if not names and model_type in _READERS:
        return model_type
    raise fields.refusal(f"architecture {show(names or model_type)}", ", ".join(KNOWN_ARCHITECTURES))


def _read_llama(fields: Fields) -> ModelSpec:
    has_bias = fields.flag("attention_bias", default=False)
    spec = _read_llama_like(fields, "llama")
    return replace(spec, qkv_bias=has_bias, out_bias=has_bias, mlp_bias=fields.flag("mlp_bias", default=False))


def _read_mistral(fields: Fields) -> ModelSpec:
    spec = _read_llama_like(fields, "mistral")
    return replace(spec, windows=_read_windows(fields, spec.num_layers, window=_read_window(fields), first_windowed=0))


def _read_qwen2(fields: Fields) -> ModelSpec:
    spec = _read_llama_like(fields, "qwen2")
    return replace(spec, windows=_read_qwen_windows(fields, spec.num_layers), qkv_bias=True)


def _read_qwen3(fields: Fields) -> ModelSpec:
    has_bias = fields.flag("attention_bias", default=False)
    spec = _read_llama_like(fields, "qwen3", default_head_dim=_QWEN3_HEAD_DIM)
    windows = _read_qwen_windows(fields, spec.num_layers)
    return replace(spec, windows=windows, qkv_bias=has_bias, out_bias=has_bias, qk_norm=True)


def _read_llama_like(fields: Fields, architecture: str, *, default_head_dim: int | None = None) -> ModelSpec:
    """What the Llama line shares; biases, windows and norms of heads are its members' own."""
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    hidden_size = fields.integer("hidden_size", high=MAX_WIDTH)
    num_q_heads = fields.integer("num_attention_heads", high=MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", high=MAX_HEADS, default=num_q_heads)
    fields.divide("num_attention_heads", num_q_heads, num_kv_heads)
    if default_head_dim is None and not fields.has("head_dim"):
        default_head_dim = fields.divide("hidden_size", hidden_size, num_q_heads)
    head_dim = fields.integer("head_dim", high=MAX_WIDTH, default=default_head_dim)
    max_position = fields.integer("max_position_embeddings", high=MAX_CONTEXT)
    rope = _read_rope(fields, head_dim, max_position)
    return ModelSpec(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", high=MAX_WIDTH),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", high=MAX_VOCAB),
        max_context_len=stretch_context(max_position, rope),
        norm_eps=_read_eps(fields, "rms_norm_eps", default=1e-6),
        activation=_read_activation(fields, "hidden_act", default="silu"),
        rope=rope,
        windows=(None,) * num_layers,
        tie_embeddings=fields.flag("tie_word_embeddings", default=False),
        dtype=_read_dtype(fields),
        bos_id=fields.token_id("bos_token_id"),
        eos_ids=fields.token_ids("eos_token_id"),
    )


def _read_opt(fields: Fields) -> ModelSpec:
    if not fields.flag("layer_norm_elementwise_affine", default=True):
        raise fields.refusal("layer_norm_elementwise_affine false", "true")
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    hidden_size = fields.integer("hidden_size", high=MAX_WIDTH)
    num_heads = fields.integer("num_attention_heads", high=MAX_HEADS)
    has_bias = fields.flag("enable_bias", default=True)
    norm_before = fields.flag("do_layer_norm_before", default=True)
    return ModelSpec(
        architecture="opt",
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("ffn_dim", high=MAX_WIDTH),
        num_q_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=fields.divide("hidden_size", hidden_size, num_heads),
        vocab_size=fields.integer("vocab_size", high=MAX_VOCAB),
        max_context_len=fields.integer("max_position_embeddings", high=MAX_CONTEXT),
        norm_eps=_OPT_NORM_EPS,
        activation=_read_activation(fields, "activation_function", default="relu"),
        rope=None,
        windows=(None,) * num_layers,
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=has_bias,
        dtype=_read_dtype(fields),
        bos_id=fields.token_id("bos_token_id"),
        eos_ids=fields.token_ids("eos_token_id"),
        opt=OptSpec(
            word_embed_dim=fields.integer("word_embed_proj_dim", high=MAX_WIDTH, default=hidden_size),
            norm_before=norm_before,
            final_norm=norm_before and not fields.flag("_remove_final_layer_norm", default=False),
        ),
    )


def _read_falcon(fields: Fields) -> ModelSpec:
    """Both spellings: the first releases (RWForCausalLM) say `n_layer`, `n_head` and, in the 40B form, `n_head_kv`."""
    num_layers = fields.integer(fields.first_of("num_hidden_layers", "n_layer"), high=MAX_LAYERS)
    hidden_size = fields.integer(fields.first_of("hidden_size", "n_embed"), high=MAX_WIDTH)
    heads_name = fields.first_of("num_attention_heads", "n_head")
    num_q_heads = fields.integer(heads_name, high=MAX_HEADS)
    head_dim = fields.divide("hidden_size", hidden_size, num_q_heads)
    is_new_form = fields.flag("new_decoder_architecture", default=fields.has("n_head_kv"))
    is_multi_query = fields.flag("multi_query", default=True) and not is_new_form
    num_kv_heads = 1 if is_multi_query else num_q_heads
    if is_new_form:
        num_kv_heads = fields.integer(
            fields.first_of("num_kv_heads", "n_head_kv"), high=MAX_HEADS, default=num_q_heads
        )  # fmt: skip
    fields.divide(heads_name, num_q_heads, num_kv_heads)
    max_position = fields.integer("max_position_embeddings", high=MAX_CONTEXT, default=_FALCON_CONTEXT)
    has_alibi = fields.flag("alibi", default=False)
    rope = None if has_alibi else _read_rope(fields, head_dim, max_position)
    has_bias = fields.flag("bias", default=False)
    return ModelSpec(
        architecture="falcon",
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("ffn_hidden_size", high=MAX_WIDTH, default=4 * hidden_size),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size", high=MAX_VOCAB),
        max_context_len=max_position if rope is None else stretch_context(max_position, rope),
        norm_eps=_read_eps(fields, "layer_norm_epsilon", default=1e-5),
        activation=_read_activation(fields, "activation", default="gelu"),
        rope=rope,
        windows=(None,) * num_layers,
        tie_embeddings=fields.flag("tie_word_embeddings", default=True),
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=has_bias,
        dtype=_read_dtype(fields),
        bos_id=fields.token_id("bos_token_id"),
        eos_ids=fields.token_ids("eos_token_id"),
        # The bias is scaled as scores are: modeling_falcon.py of transformers.
        alibi_slopes=alibi_slopes(num_q_heads, factor=head_dim**-0.5) if has_alibi else None,
        falcon=FalconSpec(
            parallel=is_new_form or fields.flag("parallel_attn", default=True),
            num_norms=fields.integer("num_ln_in_parallel_attn", high=2, default=2) if is_new_form else 1,
            grouped_qkv=not is_multi_query,
        ),
    )


def alibi_slopes(num_heads: int, *, factor: float) -> tuple[float, ...]:
    """Slopes of heads, times a factor: 2^(−8/n) … 2^−8, a geometric series for n heads; where n is no power of 2, that
    of the power below, then every second one of the power above. Rounded to bf16, as models were trained with them.
    Source: arXiv:2108.12409, section 3, and its authors' code.
    """
    below = 1 << num_heads.bit_length() - 1
    slopes = [2.0 ** (-8 * (head + 1) / below) for head in range(below)]
    slopes += [2.0 ** (-4 * (2 * head + 1) / below) for head in range(num_heads - below)]
    return tuple(factor * _round_bf16(slope) for slope in slopes)


def _round_bf16(number: float) -> float:
    """The nearest number with 8 bits of mantissa, ties to even."""
    mantissa, exponent = math.frexp(number)
    return math.ldexp(round(mantissa * 256), exponent - 8)


_READERS: Final[Mapping[str, Callable[[Fields], ModelSpec]]] = {
    "llama": _read_llama,
    "mistral": _read_mistral,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "opt": _read_opt,
    "falcon": _read_falcon,
}


def _read_window(fields: Fields) -> int | None:
    return fields.integer("sliding_window", high=MAX_CONTEXT) if fields.has("sliding_window") else None


def _read_qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = _read_window(fields) if fields.flag("use_sliding_window", default=False) else None
    first_windowed = fields.integer("max_window_layers", low=0, high=MAX_LAYERS, default=_QWEN_FIRST_WINDOW)
    return _read_windows(fields, num_layers, window=window, first_windowed=first_windowed)


def _read_windows(
    fields: Fields, num_layers: int, *, window: int | None, first_windowed: int
) -> tuple[int | None, ...]:
    """The window of each layer: as `layer_types` says, else all layers from `first_windowed` on have one."""
    kinds = fields.texts("layer_types")
    if not kinds:
        return tuple(window if layer_idx >= first_windowed else None for layer_idx in range(num_layers))
    if len(kinds) != num_layers:
        raise fields.error("layer_types", f"a list of {num_layers} entries, one for each layer, not {len(kinds)}")
    for kind in set(kinds) - {_SLIDING, _FULL}:
        raise fields.refusal(f"the layer type {show(kind)}", f"{_FULL}, {_SLIDING}")
    if window is None and _SLIDING in kinds:
        raise fields.error("sliding_window", f"the window of the layers that layer_types calls {_SLIDING}")
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _read_rope(fields: Fields, head_dim: int, max_position: int) -> RopeSpec:
    spelling = fields.first_of("rope_scaling", "rope_parameters")
    outer = {name: fields.values[name] for name in ("rope_theta", "partial_rotary_factor") if fields.has(name)}
    rope = Fields({**outer, **fields.group(spelling).values}, fields.where)
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise fields.refusal(f"{spelling} that differ between kinds of layers", "one setting for all layers")
    dim = int(head_dim * rope.number("partial_rotary_factor", low=0, high=1, default=1.0))
    if dim < 2 or dim % 2:
        raise ModelFileError(
            f"{fields.where}: {dim} of a head's {head_dim} dimensions are rotary: an even number from 2 on must be "
            "(head_dim, partial_rotary_factor)"
        )
    theta = rope.number("rope_theta", low=1.1, high=1e15, default=_DEFAULT_THETA)
    return RopeSpec(theta=theta, dim=dim, scaling=_read_scaling(rope, max_position))


def _read_scaling(rope: Fields, max_position: int) -> RopeScaling | None:
    match rope.text(rope.first_of("rope_type", "type"), default="default"):
        case "default":
            return None
        case "linear":
            return RopeScaling(kind=RopeScalingKind.LINEAR, factor=_read_factor(rope))
        case "llama3":
            return _read_llama3(rope, max_position)
        case "yarn":
            return _read_yarn(rope, max_position)
        case other:
            raise rope.refusal(f"rope type {show(other)}", "default, linear, llama3, yarn")


def _read_llama3(rope: Fields, max_position: int) -> RopeScaling:
    low_freq_factor = rope.number("low_freq_factor", low=1e-6, high=1e6)
    high_freq_factor = rope.number("high_freq_factor", low=1e-6, high=1e6)
    if high_freq_factor <= low_freq_factor:
        raise rope.error("high_freq_factor", f"above low_freq_factor, which is {low_freq_factor:g}")
    return RopeScaling(
        kind=RopeScalingKind.LLAMA3,
        factor=_read_factor(rope),
        original_context_len=_read_original_context(rope, max_position),
        low_freq_factor=low_freq_factor,
        high_freq_factor=high_freq_factor,
    )


def _read_yarn(rope: Fields, max_position: int) -> RopeScaling:
    if not rope.flag("truncate", default=True):
        raise rope.refusal("yarn with truncate false", "true")
    original = _read_original_context(rope, max_position)
    factor = _read_factor(rope, default=max_position / original)
    return RopeScaling(
        kind=RopeScalingKind.YARN,
        factor=factor,
        original_context_len=original,
        beta_fast=rope.number("beta_fast", low=1e-6, high=1e6, default=32.0),
        beta_slow=rope.number("beta_slow", low=1e-6, high=1e6, default=1.0),
        attention_factor=_read_attention_factor(rope, factor),
    )


def _read_attention_factor(rope: Fields, factor: float) -> float | None:
    """DeepSeek's spelling gives two scales whose quotient it is; None is the paper's own."""
    if rope.has("attention_factor"):
        return rope.number("attention_factor", low=1e-6, high=1e6)
    if not (rope.has("mscale") and rope.has("mscale_all_dim")):
        return None
    scales = [rope.number(name, low=0, high=1e6) for name in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return None
    above, below = (0.1 * scale * math.log(factor) + 1.0 for scale in scales)
    return above / below


def _read_factor(rope: Fields, default: float | None = None) -> float:
    return rope.number("factor", low=1, high=1e6, default=default)


def _read_original_context(rope: Fields, max_position: int) -> int:
    return rope.integer("original_max_position_embeddings", high=MAX_CONTEXT, default=max_position)


def stretch_context(max_position: int, rope: RopeSpec) -> int:
    """The longest context that a model's file means: yarn's is the original one times the factor, if that is more."""
    if rope.scaling is None or rope.scaling.kind is not RopeScalingKind.YARN:
        return max_position
    stretched = int(rope.scaling.original_context_len * rope.scaling.factor)
    return min(max(max_position, stretched), MAX_CONTEXT)


def _read_eps(fields: Fields, name: str, *, default: float) -> float:
    return fields.number(name, low=0, high=1, default=default)


def _read_activation(fields: Fields, name: str, *, default: str) -> Activation:
    activation = fields.text(name, default=default)
    if activation not in _ACTIVATIONS:
        raise fields.refusal(f"{name} {show(activation)}", ", ".join(_ACTIVATIONS))
    return _ACTIVATIONS[activation]


def _read_dtype(fields: Fields) -> DType:
    name = fields.text(fields.first_of("dtype", "torch_dtype"), default="bfloat16").removeprefix("torch.")
    if name not in _DTYPES:
        raise fields.refusal(f"dtype {show(name)}", ", ".join(_DTYPES))
    return _DTYPES[name]

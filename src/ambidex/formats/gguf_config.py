"""Metadata of a GGUF file → `ModelSpec`."""

import math
from typing import Final

from ambidex.core.dtypes import DType
from ambidex.core.errors import ModelFileError
from ambidex.core.model_spec import Activation, FalconSpec, ModelSpec, RopeScaling, RopeScalingKind, RopeSpec
from ambidex.formats.fields import (
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
)
from ambidex.formats.gguf import GGUFFile
from ambidex.formats.hf_config import stretch_context
from ambidex.formats.json_file import show

GGUF_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3", "falcon")
"""Values of `general.architecture` that this engine runs; they are also our names (Mistral files say llama)."""

_DEFAULT_THETA: Final = 10000.0
_DEFAULT_EPS: Final = 1e-5
_EMBEDDING: Final = "token_embd.weight"
_FREQ_FACTORS: Final = "rope_freqs.weight"


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """What a GGUF file's metadata, and which tensors it has, say about the model.

    Raises:
        ModelFileError: a key is missing, of another type or outside its limits.
        UnsupportedModelError: the model is of an architecture, or uses something, that this engine does not run.
    """
    fields = Fields(file.metadata, str(file.path))
    arch = fields.text("general.architecture")
    if arch not in GGUF_ARCHITECTURES:
        raise fields.refusal(f"architecture {show(arch)}", ", ".join(GGUF_ARCHITECTURES))
    _refuse_variants(fields, arch)
    num_layers = fields.integer(f"{arch}.block_count", high=MAX_LAYERS)
    hidden_size = fields.integer(f"{arch}.embedding_length", high=MAX_WIDTH)
    num_q_heads = fields.integer(f"{arch}.attention.head_count", high=MAX_HEADS)
    num_kv_heads = fields.integer(f"{arch}.attention.head_count_kv", high=MAX_HEADS, default=num_q_heads)
    fields.divide(f"{arch}.attention.head_count", num_q_heads, num_kv_heads)
    head_dim = _read_head_dim(fields, arch, hidden_size, num_q_heads)
    context_len = fields.integer(f"{arch}.context_length", high=MAX_CONTEXT)
    rope = _read_rope(fields, arch, file, head_dim)
    return ModelSpec(
        architecture=arch,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=fields.integer(f"{arch}.feed_forward_length", high=MAX_WIDTH),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=_read_vocab_size(fields, file),
        max_context_len=stretch_context(context_len, rope),
        norm_eps=_read_eps(fields, arch),
        activation=Activation.GELU if arch == "falcon" else Activation.SILU,
        rope=rope,
        windows=(_read_window(fields, arch),) * num_layers,
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias=arch == "qwen2" or _has_any(file, "attn_q.bias", "attn_qkv.bias"),
        out_bias=_has_any(file, "attn_output.bias"),
        mlp_bias=_has_any(file, "ffn_down.bias"),
        qk_norm=arch == "qwen3",
        dtype=_choose_dtype(file),
        quantized=_find_quantized(file),
        bos_id=fields.token_id("tokenizer.ggml.bos_token_id"),
        eos_ids=_read_eos_ids(fields),
        falcon=_describe_falcon(file, num_kv_heads) if arch == "falcon" else None,
    )


def _refuse_variants(fields: Fields, arch: str) -> None:
    if (num_files := fields.integer("split.count", low=0, high=2**16, default=1)) > 1:
        raise fields.refusal(
            f"a model split into {num_files} files", "one file: join them with llama-gguf-split --merge"
        )
    if fields.integer(f"{arch}.expert_count", low=0, high=2**16, default=0):
        raise fields.refusal("a mixture of experts", "dense models")
    if fields.has(f"{arch}.attention.sliding_window_pattern"):
        raise fields.refusal(f"{arch}.attention.sliding_window_pattern", "one window for all layers")


def _read_head_dim(fields: Fields, arch: str, hidden_size: int, num_q_heads: int) -> int:
    name = f"{arch}.attention.key_length"
    if not fields.has(name):
        return fields.divide(f"{arch}.embedding_length", hidden_size, num_q_heads)
    head_dim = fields.integer(name, high=MAX_WIDTH)
    value_dim = fields.integer(f"{arch}.attention.value_length", high=MAX_WIDTH, default=head_dim)
    if value_dim != head_dim:
        raise fields.refusal(f"heads of {head_dim} dimensions with values of {value_dim}", "equal lengths")
    return head_dim


def _read_rope(fields: Fields, arch: str, file: GGUFFile, head_dim: int) -> RopeSpec:
    name = f"{arch}.rope.dimension_count"
    dim = fields.integer(name, low=2, high=head_dim, default=head_dim)
    fields.divide(name, dim, 2)
    return RopeSpec(
        theta=fields.number(f"{arch}.rope.freq_base", low=1.1, high=1e15, default=_DEFAULT_THETA),
        dim=dim,
        scaling=_read_scaling(fields, arch),
        freq_factors=_read_freq_factors(fields, file, dim),
    )


def _read_scaling(fields: Fields, arch: str) -> RopeScaling | None:
    prefix = f"{arch}.rope.scaling"
    match fields.text(f"{prefix}.type", default="none"):
        case "none":
            return _read_old_scaling(fields, arch)
        case "linear":
            return RopeScaling(kind=RopeScalingKind.LINEAR, factor=fields.number(f"{prefix}.factor", low=1, high=1e6))
        case "yarn":
            return _read_yarn(fields, prefix, fields.integer(f"{arch}.context_length", high=MAX_CONTEXT))
        case other:
            raise fields.refusal(f"{prefix}.type {show(other)}", "none, linear, yarn")


def _read_old_scaling(fields: Fields, arch: str) -> RopeScaling | None:
    """Before `rope.scaling.*` there was one number."""
    factor = fields.number(f"{arch}.rope.scale_linear", low=1, high=1e6, default=1.0)
    return None if factor == 1 else RopeScaling(kind=RopeScalingKind.LINEAR, factor=factor)


def _read_yarn(fields: Fields, prefix: str, context_len: int) -> RopeScaling:
    for name in ("yarn_ext_factor", "yarn_log_multiplier"):
        if fields.has(f"{prefix}.{name}"):
            raise fields.refusal(f"{prefix}.{name}", "yarn without it")
    factor = fields.number(f"{prefix}.factor", low=1, high=1e6)
    extra = fields.number(
        fields.first_of(f"{prefix}.attn_factor", f"{prefix}.yarn_attn_factor"), low=1e-6, high=1e6, default=1.0
    )
    return RopeScaling(
        kind=RopeScalingKind.YARN,
        factor=factor,
        original_context_len=fields.integer(f"{prefix}.original_context_length", high=MAX_CONTEXT, default=context_len),
        beta_fast=fields.number(f"{prefix}.yarn_beta_fast", low=1e-6, high=1e6, default=32.0),
        beta_slow=fields.number(f"{prefix}.yarn_beta_slow", low=1e-6, high=1e6, default=1.0),
        attention_factor=extra * (0.1 * math.log(factor) + 1.0),
    )


def _read_freq_factors(fields: Fields, file: GGUFFile, dim: int) -> tuple[float, ...] | None:
    """Llama 3.1's scaling, worked out by the converter for each pair of dimensions."""
    info = file.tensors.get(_FREQ_FACTORS)
    if info is None:
        return None
    if info.shape != (dim // 2,):
        raise ModelFileError(f"{fields.where}: {_FREQ_FACTORS} has the shape {info.shape}: it must be ({dim // 2},)")
    factors: list[float] = file.dequantize(_FREQ_FACTORS).tolist()
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelFileError(f"{fields.where}: {_FREQ_FACTORS} is {show(factors)}: all must be finite and above 0")
    return tuple(factors)


def _read_vocab_size(fields: Fields, file: GGUFFile) -> int:
    """The embedding's rows: some files have no key for it."""
    info = file.tensors.get(_EMBEDDING)
    if info is None or len(info.shape) != 2 or info.shape[0] > MAX_VOCAB:
        found = "missing" if info is None else f"of shape {info.shape}"
        raise ModelFileError(f"{fields.where}: {_EMBEDDING} is {found}: it must be a matrix of 1 to {MAX_VOCAB} rows")
    return info.shape[0]


def _read_eps(fields: Fields, arch: str) -> float:
    kind = "layer_norm_epsilon" if arch == "falcon" else "layer_norm_rms_epsilon"
    return fields.number(f"{arch}.attention.{kind}", low=0, high=1, default=_DEFAULT_EPS)


def _read_window(fields: Fields, arch: str) -> int | None:
    """0 means none."""
    return fields.integer(f"{arch}.attention.sliding_window", low=0, high=MAX_CONTEXT, default=0) or None


def _read_eos_ids(fields: Fields) -> tuple[int, ...]:
    """End of text, and end of turn where a chat model has its own."""
    ids = [fields.token_id(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _has_any(file: GGUFFile, *suffixes: str) -> bool:
    return any(f"blk.0.{suffix}" in file.tensors for suffix in suffixes)


def _choose_dtype(file: GGUFFile) -> DType:
    """The 16-bit format of the file; BF16, which never overflows, where all is quantised."""
    types = {info.dtype for info in file.tensors.values() if len(info.shape) > 1}
    if types == {"F32"}:
        return DType.FP32
    return DType.FP16 if "F16" in types and "BF16" not in types else DType.BF16


def _find_quantized(file: GGUFFile) -> tuple[tuple[str, str], ...]:
    """Matrices with fewer than 16 bits a number, and their types."""
    return tuple(
        (info.name, info.dtype)
        for info in file.tensors.values()
        if len(info.shape) > 1 and info.dtype not in ("F32", "F16", "BF16")
    )


def _describe_falcon(file: GGUFFile, num_kv_heads: int) -> FalconSpec:
    return FalconSpec(
        parallel=True, num_norms=2 if _has_any(file, "attn_norm_2.weight") else 1, grouped_qkv=num_kv_heads > 1
    )

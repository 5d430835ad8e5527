"""`ModelSpec`: what a model is, as a value; every file format is read into it and every model is built from it."""

from dataclasses import dataclass
from enum import StrEnum

from ambidex.core.dtypes import DType


class RopeScalingKind(StrEnum):
    """How rotary frequencies are stretched beyond the trained context."""

    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Parameters of a rotary scaling; those that a kind does not use keep their defaults.

    `factor` is how many times the context grows; `original_context_len` is in tokens.
    Source: llama3: Llama 3.1 release; yarn: arXiv:2309.00071.
    """

    kind: RopeScalingKind
    factor: float
    original_context_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions: base, how many dimensions of a head turn, and scaling.

    `freq_factors` (length `dim / 2`) divide the frequencies one by one; GGUF files carry them for Llama 3.1.
    """

    theta: float
    dim: int
    scaling: RopeScaling | None = None
    freq_factors: tuple[float, ...] | None = None


class Activation(StrEnum):
    """Non-linearity of the MLP. `GELU` is the exact (erf) form."""

    SILU = "silu"
    RELU = "relu"
    GELU = "gelu"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptSpec:
    """What only OPT has: a narrower embedding (projected in and out) and post-norm layers in the 350M form."""

    word_embed_dim: int
    norm_before: bool
    final_norm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconSpec:
    """What only Falcon has: attention and MLP side by side, under one norm (7B) or one norm each (40B)."""

    parallel: bool
    num_norms: int
    grouped_qkv: bool
    """The 40B form: the fused matrix is laid out per KV head as (group of q, k, v)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer.

    Lengths and sizes are counts of numbers or tokens. `windows[layer_idx]` is the sliding window of a layer in
    tokens (a query at position p sees keys p - window + 1 … p), or None for full attention.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_len: int
    norm_eps: float
    activation: Activation
    rope: RopeSpec | None
    windows: tuple[int | None, ...]
    tie_embeddings: bool
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: DType = DType.BF16
    quantized: tuple[tuple[str, str], ...] = ()
    """The matrices that have fewer than 16 bits a number in a GGUF file: name there and type."""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    alibi_slopes: tuple[float, ...] | None = None
    """By query head: a key's score is less by the slope for each token of its distance. Then there is no `rope`."""
    opt: OptSpec | None = None
    falcon: FalconSpec | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether matrices have fewer than 16 bits a number in the files."""
        return bool(self.quantized)

    @property
    def group_size(self) -> int:
        """Query heads for each KV head."""
        return self.num_q_heads // self.num_kv_heads

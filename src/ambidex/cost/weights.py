"""`ModelWeights`: how many numbers and bytes the matrices of a model are, group by group, from its `ModelSpec` alone.

Groups are what a `Placement` divides: attention and MLP of each layer, and the head. The rest (embedding, positions,
norms, biases) is not divided and lies with the accelerator.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from ambidex.core.dtypes import WEIGHT_BLOCKS, DType, weight_bytes
from ambidex.core.errors import ConfigError
from ambidex.core.model_spec import ModelSpec

GATED: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose MLP has three matrices; the others have two."""
_LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


@dataclass(frozen=True, slots=True)
class Matrices:
    """Matrices of one format: how many numbers, how many bytes."""

    kind: str
    num_numbers: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """What a `WeightSplit` divides, by format."""

    parts: tuple[Matrices, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_numbers(self) -> int:
        """Numbers of all of it."""
        return sum(part.num_numbers for part in self.parts)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer."""

    attention: WeightGroup
    mlp: WeightGroup

    @property
    def num_bytes(self) -> int:
        """Bytes of its matrices."""
        return self.attention.num_bytes + self.mlp.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """A model. `other_bytes` is what is not divided, without the table that is also the head."""

    layers: tuple[LayerWeights, ...]
    head: WeightGroup
    other_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole model."""
        return sum(layer.num_bytes for layer in self.layers) + self.head.num_bytes + self.other_bytes

    @property
    def num_layer_numbers(self) -> int:
        """Numbers of all layers' matrices."""
        return sum(layer.attention.num_numbers + layer.mlp.num_numbers for layer in self.layers)


def count_weights(spec: ModelSpec, *, dtype: DType | None = None, kind: str | None = None) -> ModelWeights:
    """Count a model.

    Args:
        dtype: format of vectors, and of matrices that have no other; None: the model's files'.
        kind: one of `WEIGHT_BLOCKS` for all matrices of layers and head; None: as the files have them.
    Raises:
        ConfigError: rows are no whole blocks of that format.
    """
    plain = dtype or spec.dtype
    stored = dict(spec.quantized)
    width, word_width = spec.hidden_size, spec.opt.word_embed_dim if spec.opt is not None else spec.hidden_size
    q_width, kv_width = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if kind is not None and spec.hidden_size % WEIGHT_BLOCKS[kind][0]:
        raise ConfigError(f"rows of {spec.hidden_size} numbers are no whole blocks of {kind}: choose another format")

    def group(matrices: Iterable[tuple[str, int]]) -> WeightGroup:
        found: dict[str, list[int]] = {}
        for name, num in matrices:
            form = kind or stored.get(name, plain.value)
            counts = found.setdefault(form if form in WEIGHT_BLOCKS else plain.value, [0, 0])
            counts[0] += num
            counts[1] += weight_bytes(form if form in WEIGHT_BLOCKS else plain.value, num)
        return WeightGroup(tuple(Matrices(form, *counts) for form, counts in found.items()))

    def layer(idx: int) -> LayerWeights:
        prefix = f"blk.{idx}."
        fused = f"{prefix}attn_qkv.weight"
        sizes = {"attn_q": q_width * width, "attn_k": kv_width * width, "attn_v": kv_width * width}
        return LayerWeights(
            attention=group(
                [(fused if fused in stored else f"{prefix}{name}.weight", num) for name, num in sizes.items()]
                + [(f"{prefix}attn_output.weight", width * q_width)]
            ),
            mlp=group(
                (f"{prefix}{name}.weight", spec.intermediate_size * width)
                for name in (("ffn_gate",) if spec.architecture in GATED else ()) + ("ffn_up", "ffn_down")
            ),
        )

    table = ("token_embd.weight", spec.vocab_size * word_width)
    head = group([("output.weight" if "output.weight" in stored or not spec.tie_embeddings else table[0], table[1])])
    other = 0 if spec.tie_embeddings else group([(table[0], table[1])]).num_bytes
    if spec.opt is not None:
        projections = 2 * width * word_width if word_width != width else 0
        other += weight_bytes(plain.value, projections + (spec.max_context_len + 2) * width)
    return ModelWeights(
        layers=tuple(layer(idx) for idx in range(spec.num_layers)),
        head=head,
        other_bytes=other + plain.num_bytes * _count_vectors(spec),
    )


def _count_vectors(spec: ModelSpec) -> int:
    """Numbers of norms and biases."""
    width, norm = spec.hidden_size, spec.hidden_size * (1 if spec.architecture in GATED else 2)
    num_norms = 2
    if spec.falcon is not None:
        num_norms = spec.falcon.num_norms if spec.falcon.parallel else 2
    layer = num_norms * norm
    qkv_width = (spec.num_q_heads + 2 * spec.num_kv_heads) * spec.head_dim
    layer += qkv_width * spec.qkv_bias + width * spec.out_bias
    if spec.mlp_bias:
        layer += width + spec.intermediate_size * (2 if spec.architecture in GATED else 1)
    layer += 2 * spec.head_dim * spec.qk_norm
    has_final = spec.opt is None or spec.opt.final_norm
    return spec.num_layers * layer + norm * has_final

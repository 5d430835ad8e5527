"""`ModelWeights`: how many numbers and bytes the matrices of a model are, group by group, from its `ModelSpec` alone.

Groups are what a `Placement` divides: attention and MLP of each layer, and the head. The rest (embedding, positions,
norms, biases) is not divided and lies with the accelerator. `Residence` says which quantised matrices an engine keeps;
the others are plain numbers in its memory, whatever the file has.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ambidex.core.dtypes import GPU_WEIGHT_KINDS, WEIGHT_BLOCKS, DType, matrix_bytes, weight_bytes
from ambidex.core.errors import ConfigError
from ambidex.core.model_spec import ModelSpec

GATED: Final = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose MLP has three matrices; the others have two."""
_QUANTISED: Final = frozenset(kind for kind, (block_len, _) in WEIGHT_BLOCKS.items() if block_len > 1)
_PLAIN: Final = frozenset(WEIGHT_BLOCKS) - _QUANTISED


@dataclass(frozen=True, slots=True, kw_only=True)
class Residence:
    """Which quantised matrices stay in memory as a file has them."""

    kinds: frozenset[str]
    """Types that have a product where the matrices lie."""
    by_place: bool
    """Divided weights: matrices over the same x, and those of an MLP, stay if all are of one type."""
    keeps_table: bool
    """The table of tokens, too."""


WHOLE_ON_CPU: Final = Residence(kinds=_QUANTISED, by_place=False, keeps_table=True)
DIVIDED_ON_CPU: Final = Residence(kinds=_QUANTISED, by_place=True, keeps_table=True)
DIVIDED_ON_GPU: Final = Residence(kinds=frozenset(GPU_WEIGHT_KINDS), by_place=True, keeps_table=False)
PLAIN: Final = Residence(kinds=frozenset(), by_place=False, keeps_table=False)
"""All numbers are dequantised."""


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

    @property
    def is_plain(self) -> bool:
        """Whether none of it is quantised."""
        return all(part.kind in _PLAIN for part in self.parts)


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
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of what can be divided by format, the largest first."""
        groups = [group for layer in self.layers for group in (layer.attention, layer.mlp)]
        found: dict[str, int] = {}
        for part in (part for group in [*groups, self.head] for part in group.parts):
            found[part.kind] = found.get(part.kind, 0) + part.num_bytes
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def num_layer_numbers(self) -> int:
        """Numbers of all layers' matrices."""
        return sum(layer.attention.num_numbers + layer.mlp.num_numbers for layer in self.layers)


def count_weights(
    spec: ModelSpec, *, residence: Residence, dtype: DType | None = None, kind: str | None = None
) -> ModelWeights:
    """Count a model as it lies in memory.

    Args:
        residence: which quantised matrices stay what they are.
        dtype: format of vectors, and of matrices that have no other; None: the model's files'.
        kind: one of `WEIGHT_BLOCKS` that all matrices of layers and head are stored in; None: as the files have them.
    Raises:
        ConfigError: rows are no whole blocks of that format.
    """
    plain = dtype or spec.dtype
    stored = dict(spec.quantized)
    width, word_width = spec.hidden_size, spec.opt.word_embed_dim if spec.opt is not None else spec.hidden_size
    inner, vocab = spec.intermediate_size, spec.vocab_size
    q_width, kv_width = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if kind is not None and any(size % WEIGHT_BLOCKS[kind][0] for size in (width, inner, q_width)):
        raise ConfigError(f"rows of {width} and {inner} numbers are no whole blocks of {kind}: choose another format")

    def form_of(name: str) -> str:
        form = kind or stored.get(name, plain.value)
        return form if form in residence.kinds or form in _PLAIN else plain.value

    def place(*matrices: tuple[str, int, int]) -> list[tuple[str, int, int]]:
        """(format, rows, width) of matrices (name, rows, width) that are divided together."""
        forms = [form_of(name) for name, _, _ in matrices]
        if residence.by_place and len(set(forms)) > 1:
            forms = [form if form in _PLAIN else plain.value for form in forms]
        return [(form, rows, numbers) for form, (_, rows, numbers) in zip(forms, matrices, strict=True)]

    def layer(idx: int) -> LayerWeights:
        prefix = f"blk.{idx}."
        fused = f"{prefix}attn_qkv.weight"
        rows = {"attn_q": q_width, "attn_k": kv_width, "attn_v": kv_width}
        ins = [(fused if fused in stored else f"{prefix}{name}.weight", num, width) for name, num in rows.items()]
        gate = [(f"{prefix}ffn_gate.weight", inner, width)] if spec.architecture in GATED else []
        return LayerWeights(
            attention=_group(place(*ins) + place((f"{prefix}attn_output.weight", width, q_width))),
            mlp=_group(
                place(*gate, (f"{prefix}ffn_up.weight", inner, width), (f"{prefix}ffn_down.weight", width, inner))
            ),
        )

    table_kind = stored.get("token_embd.weight", plain.value)
    is_kept = residence.keeps_table and table_kind in residence.kinds
    table = [(table_kind if is_kept else plain.value, vocab, word_width)]
    head = table if spec.tie_embeddings else place(("output.weight", vocab, word_width))
    other = 0 if spec.tie_embeddings else _group(table).num_bytes
    if spec.opt is not None:
        projections = 2 * width * word_width if word_width != width else 0
        other += weight_bytes(plain.value, projections + (spec.max_context_len + 2) * width)
    return ModelWeights(
        layers=tuple(layer(idx) for idx in range(spec.num_layers)),
        head=_group(head),
        other_bytes=other + plain.num_bytes * _count_vectors(spec),
    )


def _group(matrices: Sequence[tuple[str, int, int]]) -> WeightGroup:
    found: dict[str, list[int]] = {}
    for form, rows, width in matrices:
        counts = found.setdefault(form, [0, 0])
        counts[0] += rows * width
        counts[1] += matrix_bytes(form, rows, width)
    return WeightGroup(tuple(Matrices(form, *counts) for form, counts in found.items()))


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

"""Falcon: attention and MLP side by side under one layer norm (7B, 11B) or one each (40B, 180B), or one after the other
(the first small ones, whose positions are biases of attention); q, k and v come from one fused matrix."""

from collections.abc import Callable

from torch import Tensor, nn

from ambidex.core.model_spec import FalconSpec, ModelSpec
from ambidex.layers.embedding import Embedding
from ambidex.layers.linear import Linear
from ambidex.layers.mlp import Neurons
from ambidex.layers.norm import LayerNorm
from ambidex.layers.parameter import ParameterFactory
from ambidex.layers.rope import RotaryEmbedding
from ambidex.models.base import Angles, AttentionOp, CausalLM, LayerSites


class FalconForCausalLM(CausalLM):
    def __init__(self, spec: ModelSpec, factory: ParameterFactory) -> None:
        super().__init__()
        self.transformer = FalconModel(spec, factory)
        shared = self.transformer.word_embeddings.weight if spec.tie_embeddings else None
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size, factory, bias=False, weight=shared)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionOp) -> Tensor:
        return self.transformer(token_ids, positions, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden).float()  # [B, V] fp32


class FalconModel(nn.Module):
    __call__: Callable[..., Tensor]

    def __init__(self, spec: ModelSpec, factory: ParameterFactory) -> None:
        super().__init__()
        assert (spec.rope is None) != (spec.alibi_slopes is None), "a Falcon model has positions of one kind"
        assert spec.falcon is not None, "a Falcon spec says which form of Falcon it is"
        layer_class = _choose_layer(spec.falcon)
        self.word_embeddings = Embedding(spec.vocab_size, spec.hidden_size, factory)
        self.rotary_emb = RotaryEmbedding(spec.rope, factory.device) if spec.rope is not None else None
        self.h = nn.ModuleList(layer_class(spec, layer_idx, factory) for layer_idx in range(spec.num_layers))
        self.ln_f = LayerNorm(spec.hidden_size, spec.norm_eps, factory)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionOp) -> Tensor:
        hidden = self.word_embeddings(token_ids)  # [T, E]
        angles = self.rotary_emb(positions) if self.rotary_emb is not None else None  # two of [T, D/2] fp32
        for layer in self.h:
            hidden = layer(hidden, angles, attention)
        return self.ln_f(hidden)


class FalconLayer(nn.Module):
    """What the layers of all forms have."""

    self_attention: "FalconAttention"
    mlp: "FalconMLP"

    def sites(self) -> LayerSites:
        attention = self.self_attention
        return LayerSites(attention=(attention.query_key_value, attention.dense), mlp=self.mlp.neurons)


class FalconOneNormLayer(FalconLayer):
    """7B and 11B."""

    def __init__(self, spec: ModelSpec, layer_idx: int, factory: ParameterFactory) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(spec.hidden_size, spec.norm_eps, factory)
        self.self_attention = FalconAttention(spec, layer_idx, factory)
        self.mlp = FalconMLP(spec, factory)

    def forward(self, hidden: Tensor, angles: Angles | None, attention: AttentionOp) -> Tensor:
        normed = self.input_layernorm(hidden)
        return hidden + self.self_attention(normed, angles, attention) + self.mlp(normed)  # [T, E]


class FalconTwoNormLayer(FalconLayer):
    """40B and 180B."""

    def __init__(self, spec: ModelSpec, layer_idx: int, factory: ParameterFactory) -> None:
        super().__init__()
        self.ln_attn = LayerNorm(spec.hidden_size, spec.norm_eps, factory)
        self.ln_mlp = LayerNorm(spec.hidden_size, spec.norm_eps, factory)
        self.self_attention = FalconAttention(spec, layer_idx, factory)
        self.mlp = FalconMLP(spec, factory)

    def forward(self, hidden: Tensor, angles: Angles | None, attention: AttentionOp) -> Tensor:
        attended = self.self_attention(self.ln_attn(hidden), angles, attention)
        return hidden + attended + self.mlp(self.ln_mlp(hidden))  # [T, E]


class FalconSequentialLayer(FalconLayer):
    """The MLP after the attention, as in other families."""

    def __init__(self, spec: ModelSpec, layer_idx: int, factory: ParameterFactory) -> None:
        super().__init__()
        self.input_layernorm = LayerNorm(spec.hidden_size, spec.norm_eps, factory)
        self.self_attention = FalconAttention(spec, layer_idx, factory)
        self.post_attention_layernorm = LayerNorm(spec.hidden_size, spec.norm_eps, factory)
        self.mlp = FalconMLP(spec, factory)

    def forward(self, hidden: Tensor, angles: Angles | None, attention: AttentionOp) -> Tensor:
        hidden = hidden + self.self_attention(self.input_layernorm(hidden), angles, attention)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # [T, E]


def _choose_layer(
    falcon: FalconSpec,
) -> type[FalconOneNormLayer] | type[FalconTwoNormLayer] | type[FalconSequentialLayer]:
    if not falcon.parallel:
        return FalconSequentialLayer
    return FalconOneNormLayer if falcon.num_norms == 1 else FalconTwoNormLayer


class FalconAttention(nn.Module):
    """Attention from one fused matrix, whose rows are for each KV head: its group of q heads, then k, then v.

    The 7B form (all q heads, then k, then v) is the same with one KV head; the form without shared heads (q, k, v
    for each head) is the same with groups of one.
    """

    __call__: Callable[..., Tensor]

    def __init__(self, spec: ModelSpec, layer_idx: int, factory: ParameterFactory) -> None:
        super().__init__()
        fused_width = (spec.num_q_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.query_key_value = Linear(spec.hidden_size, fused_width, factory, bias=spec.qkv_bias)
        self.dense = Linear(spec.hidden_size, spec.hidden_size, factory, bias=spec.out_bias)
        self.layer_idx = layer_idx
        self.fused_shape = (-1, spec.num_kv_heads, spec.group_size + 2, spec.head_dim)

    def forward(self, x: Tensor, angles: Angles | None, attention: AttentionOp) -> Tensor:
        fused = self.query_key_value(x).view(self.fused_shape)  # [T, Hkv, G + 2, D]
        q = fused[:, :, :-2].flatten(1, 2)  # [T, Hq, D]
        k, v = fused[:, :, -2], fused[:, :, -1]  # [T, Hkv, D]
        out = attention.attend(self.layer_idx, q, k, v, angles=angles)  # [T, Hq, D]
        return self.dense(out.flatten(1))

    def query(self, x: Tensor) -> Tensor:
        """The queries [T, Hq, D] of an input [T, E], not rotated."""
        return self.query_key_value(x).view(self.fused_shape)[:, :, :-2].flatten(1, 2)


class FalconMLP(nn.Module):
    __call__: Callable[..., Tensor]

    def __init__(self, spec: ModelSpec, factory: ParameterFactory) -> None:
        super().__init__()
        self.dense_h_to_4h = Linear(spec.hidden_size, spec.intermediate_size, factory, bias=spec.mlp_bias)
        self.dense_4h_to_h = Linear(spec.intermediate_size, spec.hidden_size, factory, bias=spec.mlp_bias)
        self.neurons = Neurons(self.dense_h_to_4h, out=self.dense_4h_to_h, activation=spec.activation, factory=factory)

    def forward(self, x: Tensor) -> Tensor:
        return self.neurons(x)  # [T, E]

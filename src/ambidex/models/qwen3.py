"""Qwen3: the Llama form with an RMS norm over each head of q and k, and head_dim apart from hidden_size / heads."""

from collections.abc import Callable

from torch import Tensor, nn

from ambidex.core.model_spec import ModelSpec
from ambidex.layers.embedding import Embedding
from ambidex.layers.linear import Linear, LinearGroup
from ambidex.layers.mlp import GatedMLP
from ambidex.layers.norm import RMSNorm
from ambidex.layers.parameter import ParameterFactory
from ambidex.layers.rope import RotaryEmbedding
from ambidex.models.base import Angles, AttentionOp, CausalLM, LayerSites


class Qwen3ForCausalLM(CausalLM):
    def __init__(self, spec: ModelSpec, factory: ParameterFactory) -> None:
        super().__init__()
        self.model = Qwen3Model(spec, factory)
        shared = self.model.embed_tokens.weight if spec.tie_embeddings else None
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size, factory, bias=False, weight=shared)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionOp) -> Tensor:
        return self.model(token_ids, positions, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden).float()  # [B, V] fp32


class Qwen3Model(nn.Module):
    __call__: Callable[..., Tensor]

    def __init__(self, spec: ModelSpec, factory: ParameterFactory) -> None:
        super().__init__()
        assert spec.rope is not None, "a Qwen3 model has rotary positions"
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, factory)
        self.rotary_emb = RotaryEmbedding(spec.rope, factory.device)
        self.layers = nn.ModuleList(Qwen3Layer(spec, layer_idx, factory) for layer_idx in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_eps, factory)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionOp) -> Tensor:
        hidden, update = self.embed_tokens(token_ids), None  # [T, E]
        angles = self.rotary_emb(positions)  # cos and sin, each [T, D/2] fp32
        for layer in self.layers:
            hidden, update = layer(hidden, update, angles, attention)
        return self.norm.of_sum(hidden, update)[1]


class Qwen3Layer(nn.Module):
    __call__: Callable[..., tuple[Tensor, Tensor]]

    def __init__(self, spec: ModelSpec, layer_idx: int, factory: ParameterFactory) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, factory)
        self.self_attn = Qwen3Attention(spec, layer_idx, factory)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.norm_eps, factory)
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, factory, activation=spec.activation, bias=False)

    def forward(
        self, hidden: Tensor, update: Tensor | None, angles: Angles, attention: AttentionOp
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and what is still to be added to it, both [T, E], before and after the layer."""
        hidden, normed = self.input_layernorm.of_sum(hidden, update)
        hidden, normed = self.post_attention_layernorm.of_sum(hidden, self.self_attn(normed, angles, attention))
        return hidden, self.mlp(normed)

    def sites(self) -> LayerSites:
        return LayerSites(attention=(self.self_attn.qkv, self.self_attn.o_proj), mlp=self.mlp.neurons)


class Qwen3Attention(nn.Module):
    __call__: Callable[..., Tensor]

    def __init__(self, spec: ModelSpec, layer_idx: int, factory: ParameterFactory) -> None:
        super().__init__()
        q_width, kv_width = spec.num_q_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = Linear(spec.hidden_size, q_width, factory, bias=spec.qkv_bias)
        self.k_proj = Linear(spec.hidden_size, kv_width, factory, bias=spec.qkv_bias)
        self.v_proj = Linear(spec.hidden_size, kv_width, factory, bias=spec.qkv_bias)
        self.o_proj = Linear(q_width, spec.hidden_size, factory, bias=spec.out_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps, factory)
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps, factory)
        self.qkv = LinearGroup(self.q_proj, self.k_proj, self.v_proj, factory=factory)
        self.layer_idx = layer_idx
        self.q_shape = (-1, spec.num_q_heads, spec.head_dim)
        self.kv_shape = (-1, spec.num_kv_heads, spec.head_dim)

    def forward(self, x: Tensor, angles: Angles, attention: AttentionOp) -> Tensor:
        q, k, v = self.qkv(x)
        q = self.q_norm(q.view(self.q_shape))  # [T, Hq, D]
        k = self.k_norm(k.view(self.kv_shape))  # [T, Hkv, D]
        out = attention.attend(self.layer_idx, q, k, v.view(self.kv_shape), angles=angles)  # [T, Hq, D]
        return self.o_proj(out.flatten(1))

    def query(self, x: Tensor) -> Tensor:
        """The queries [T, Hq, D] of an input [T, E], not rotated."""
        return self.q_norm(self.q_proj(x).view(self.q_shape))

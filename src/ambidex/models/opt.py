"""OPT: layer norm, learned positions, ReLU. The 350M form normalises after each block instead of before it, and its
word embeddings are narrower than its hidden states (projected in and out)."""

from collections.abc import Callable
from typing import Final

from torch import Tensor, nn

from ambidex.core.model_spec import ModelSpec
from ambidex.layers.embedding import Embedding
from ambidex.layers.linear import Linear, LinearGroup
from ambidex.layers.mlp import Neurons
from ambidex.layers.norm import LayerNorm
from ambidex.layers.parameter import ParameterFactory
from ambidex.models.base import AttentionOp, CausalLM, LayerSites

POSITION_OFFSET: Final = 2
"""Row of the position table that belongs to position 0: the checkpoints keep two rows for padding before it."""


class OPTForCausalLM(CausalLM):
    def __init__(self, spec: ModelSpec, factory: ParameterFactory) -> None:
        super().__init__()
        assert spec.opt is not None, "an OPT spec says which form of OPT it is"
        self.model = OPTModel(spec, factory)
        shared = self.model.decoder.embed_tokens.weight if spec.tie_embeddings else None
        self.lm_head = Linear(spec.opt.word_embed_dim, spec.vocab_size, factory, bias=False, weight=shared)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionOp) -> Tensor:
        return self.model.decoder(token_ids, positions, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        project_out = self.model.decoder.project_out
        return self.lm_head(hidden if project_out is None else project_out(hidden)).float()  # [B, V] fp32


class OPTModel(nn.Module):
    """Only a step in the checkpoint's names: `model.decoder.…`."""

    def __init__(self, spec: ModelSpec, factory: ParameterFactory) -> None:
        super().__init__()
        self.decoder = OPTDecoder(spec, factory)


class OPTDecoder(nn.Module):
    """Embeddings, layers and final norm; `project_out` is applied in `OPTForCausalLM.logits`, to fewer rows."""

    __call__: Callable[..., Tensor]

    def __init__(self, spec: ModelSpec, factory: ParameterFactory) -> None:
        super().__init__()
        assert spec.opt is not None, "an OPT spec says which form of OPT it is"
        width, word_width = spec.hidden_size, spec.opt.word_embed_dim
        is_projected = word_width != width
        layer_class = OPTPreNormLayer if spec.opt.norm_before else OPTPostNormLayer
        self.embed_tokens = Embedding(spec.vocab_size, word_width, factory)
        self.embed_positions = Embedding(spec.max_context_len + POSITION_OFFSET, width, factory)
        self.project_in = Linear(word_width, width, factory, bias=False) if is_projected else None
        self.layers = nn.ModuleList(layer_class(spec, layer_idx, factory) for layer_idx in range(spec.num_layers))
        self.final_layer_norm = LayerNorm(width, spec.norm_eps, factory) if spec.opt.final_norm else None
        self.project_out = Linear(width, word_width, factory, bias=False) if is_projected else None

    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionOp) -> Tensor:
        hidden = self.embed_tokens(token_ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        hidden = hidden + self.embed_positions(positions + POSITION_OFFSET)  # [T, E]
        for layer in self.layers:
            hidden = layer(hidden, attention)
        return hidden if self.final_layer_norm is None else self.final_layer_norm(hidden)


class OPTLayer(nn.Module):
    """The parts of a layer; where the norms stand is the matter of the two forms below."""

    __call__: Callable[..., Tensor]

    def __init__(self, spec: ModelSpec, layer_idx: int, factory: ParameterFactory) -> None:
        super().__init__()
        self.self_attn = OPTAttention(spec, layer_idx, factory)
        self.self_attn_layer_norm = LayerNorm(spec.hidden_size, spec.norm_eps, factory)
        self.fc1 = Linear(spec.hidden_size, spec.intermediate_size, factory, bias=spec.mlp_bias)
        self.fc2 = Linear(spec.intermediate_size, spec.hidden_size, factory, bias=spec.mlp_bias)
        self.final_layer_norm = LayerNorm(spec.hidden_size, spec.norm_eps, factory)
        self.mlp = Neurons(self.fc1, out=self.fc2, activation=spec.activation, factory=factory)

    def sites(self) -> LayerSites:
        return LayerSites(attention=(self.self_attn.qkv, self.self_attn.out_proj), mlp=self.mlp)


class OPTPreNormLayer(OPTLayer):
    """All sizes but 350M."""

    def forward(self, hidden: Tensor, attention: AttentionOp) -> Tensor:
        hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden), attention)
        return hidden + self.mlp(self.final_layer_norm(hidden))


class OPTPostNormLayer(OPTLayer):
    """350M."""

    def forward(self, hidden: Tensor, attention: AttentionOp) -> Tensor:
        hidden = self.self_attn_layer_norm(hidden + self.self_attn(hidden, attention))
        return self.final_layer_norm(hidden + self.mlp(hidden))


class OPTAttention(nn.Module):
    __call__: Callable[..., Tensor]

    def __init__(self, spec: ModelSpec, layer_idx: int, factory: ParameterFactory) -> None:
        super().__init__()
        self.q_proj = Linear(spec.hidden_size, spec.hidden_size, factory, bias=spec.qkv_bias)
        self.k_proj = Linear(spec.hidden_size, spec.hidden_size, factory, bias=spec.qkv_bias)
        self.v_proj = Linear(spec.hidden_size, spec.hidden_size, factory, bias=spec.qkv_bias)
        self.out_proj = Linear(spec.hidden_size, spec.hidden_size, factory, bias=spec.out_bias)
        self.qkv = LinearGroup(self.q_proj, self.k_proj, self.v_proj, factory=factory)
        self.layer_idx = layer_idx
        self.heads_shape = (-1, spec.num_q_heads, spec.head_dim)

    def forward(self, x: Tensor, attention: AttentionOp) -> Tensor:
        q, k, v = self.qkv(x)
        q, k, v = q.view(self.heads_shape), k.view(self.heads_shape), v.view(self.heads_shape)  # [T, Hq, D] each
        out = attention.attend(self.layer_idx, q, k, v)  # [T, Hq, D]
        return self.out_proj(out.flatten(1))

    def query(self, x: Tensor) -> Tensor:
        """The queries [T, Hq, D] of an input [T, E]."""
        return self.q_proj(x).view(self.heads_shape)

"""What every model is to the rest of the engine, and what attention is to every model."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from ambidex.layers.linear import Linear, LinearGroup
from ambidex.layers.mlp import Neurons

Angles = tuple[Tensor, Tensor]
"""cos and sin of a step's tokens, each [T, dim/2] fp32 (`layers.rope`)."""


class AttentionOp(Protocol):
    """Attention over the whole context of each request of a step.

    Where keys and values lie, how long each request's context is, the sliding windows and the scale
    (`head_dim ** -0.5`) are known to the implementation; a model only hands over what is new.
    """

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: Angles | None = None) -> Tensor:
        """Rotate the step's queries and keys, attend, and keep its keys and values for later steps.

        Args:
            q: [T, Hq, D].
            k, v: [T, Hkv, D].
            angles: what q and k are rotated by; None: the model has no rotary positions.
        Returns:
            [T, Hq, D] in the dtype of q.
        """
        ...


LinearSite = Linear | LinearGroup
"""A place of a model where matrices are multiplied with the same x, so that their rows may be divided as one."""


@dataclass(frozen=True, slots=True)
class LayerSites:
    """The places of a layer whose weights may be divided over tiers."""

    attention: tuple[LinearSite, ...]
    """In the order of their use."""
    mlp: Neurons


@runtime_checkable
class Layer(Protocol):
    """What a model's layers offer."""

    def sites(self) -> LayerSites:
        """The places whose weights may be divided."""
        ...


class CausalLM(nn.Module, ABC):
    """A decoder-only language model over the flattened tokens of a ragged batch.

    The parameters' names are those of the Hugging Face checkpoint, so loading is the identity.

    Attributes:
        lm_head: the last projection; with tied embeddings its weight is the table of tokens.
    """

    __call__: Callable[..., Tensor]
    lm_head: Linear

    def layer_sites(self) -> list[LayerSites]:
        """The places of all layers whose weights may be divided."""
        return [module.sites() for module in self.modules() if isinstance(module, Layer)]

    @abstractmethod
    def forward(self, token_ids: Tensor, positions: Tensor, attention: AttentionOp) -> Tensor:
        """Run all layers.

        Args:
            token_ids: [T] int64.
            positions: [T] int64, each token's place in its own request.
            attention: knows the cut of T into requests.
        Returns:
            Hidden states after the final norm, [T, E].
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, E] → logits [B, V] fp32."""

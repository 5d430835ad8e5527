"""Which neurons of an MLP a step may leave out, as plain values.

relu              those whose activation is 0: exact, for models that have a ReLU
relu-screened     the same, and rows that an 8-bit copy proves to be inactive are not multiplied either: exact
cats:0.5          gated MLPs: those with the smallest |activation(gate)|, half of them. Source: arXiv:2404.08763
teal:0.4          those with the smallest |input of the last matrix|, 40 % of them. Source: arXiv:2408.14690
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ambidex.core.errors import ConfigError
from ambidex.core.model_spec import Activation

OFF: Final = "off"
LEAST_SHARE, MOST_SHARE = 0.05, 0.95
"""What a profile of neurons has thresholds for."""


class SparsityKind(StrEnum):
    """How neurons are chosen."""

    RELU = "relu"
    RELU_SCREENED = "relu-screened"
    CATS = "cats"
    TEAL = "teal"

    @property
    def is_exact(self) -> bool:
        """Whether nothing changes but roundings."""
        return self in (SparsityKind.RELU, SparsityKind.RELU_SCREENED)


ASSUMED_ACTIVE: Final = 0.1
"""Of the neurons behind a ReLU, where no profile says it: between OPT's 2 to 4 % and the 10 to 30 % of models that were
given a ReLU later (arXiv:2312.12456). It only divides DRAM's weights between CPU and link."""
DEFAULT_SHARES: Final = {SparsityKind.CATS: 0.2, SparsityKind.TEAL: 0.4}
"""The largest, in steps of 0.1, that raise SmolLM2's perplexity by no more than 2 % (docs/qinfer.md)."""


class NeuronCache(StrEnum):
    """Which neurons of a divided MLP lie on the accelerator. `off`: the first ones, as they are numbered."""

    OFF = "off"
    STATIC = "static"
    DYNAMIC = "dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFigures:
    """What a cache of neurons did. `num_active` counts a neuron once a token, `num_hits` those on the accelerator."""

    num_active: int
    num_hits: int
    num_moves: int
    num_moved: int
    num_failed_moves: int
    moved_bytes: int

    @property
    def hit_rate(self) -> float:
        """Share of active neurons that lay on the accelerator."""
        return self.num_hits / max(1, self.num_active)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronFigures:
    """What the CPU left out of its parts of MLPs.

    A neuron counts once a token in `num_neurons` and `num_active`, once a step in `num_rows` and `num_rows_read`, which
    are those that some token needed, or all where the dense form was the faster one. `num_screened` are rows whose
    8-bit copy was read, once a step, and `num_candidates` those that it could not rule out. `num_checked` neurons were
    active in steps where a trained predictor was checked, and it had found `num_found` of them. `cache` None: nothing
    is counted.
    """

    num_neurons: int
    num_active: int
    num_rows: int
    num_rows_read: int
    num_screened: int = 0
    num_candidates: int = 0
    num_checked: int = 0
    num_found: int = 0
    cache: CacheFigures | None = None

    @property
    def active_share(self) -> float:
        """Of the neurons, for a token."""
        return self.num_active / max(1, self.num_neurons)

    @property
    def read_share(self) -> float:
        """Of the columns, in a step."""
        return self.num_rows_read / max(1, self.num_rows)

    @property
    def candidate_share(self) -> float:
        """Of the screened rows."""
        return self.num_candidates / max(1, self.num_screened)

    @property
    def recall(self) -> float:
        """Of active neurons, found by the predictor; 1 before anything was checked."""
        return self.num_found / self.num_checked if self.num_checked else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSparsity:
    """What is asked for. `share`: of the neurons, left out of a token on the text of the calibration; None: exact."""

    kind: SparsityKind
    share: float | None = None

    def __str__(self) -> str:
        return self.kind.value if self.share is None else f"{self.kind}:{self.share:g}"

    def refusal(self, activation: Activation, *, is_gated: bool) -> str | None:
        """Why it is not for a model; None: it is."""
        if self.kind.is_exact and activation is not Activation.RELU:
            return (
                f"`mlp_sparsity` {self.kind} skips neurons that are exactly 0, which needs a ReLU, and this model's "
                f"activation is {activation}: use cats:SHARE or teal:SHARE, or off"
            )
        if self.kind is SparsityKind.CATS and not is_gated:
            return "`mlp_sparsity` cats looks at the gate of an MLP, and this model's has none: use teal:SHARE, or off"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronMask:
    """What sets neurons of a layer to 0, wherever they are computed.

    Args:
        kind: cats: where |activation(gate)| is below the threshold; teal: where |input of the last matrix| is.
        threshold: 0 or more.
    """

    kind: SparsityKind
    threshold: float


def parse_sparsity(text: str) -> MLPSparsity | None:
    """Read `mlp_sparsity`; None: off.

    Raises:
        ConfigError: it is none of what the module's docstring lists.
    """
    name, colon, value = text.partition(":")
    forms = "off, relu, relu-screened, cats, cats:SHARE, teal or teal:SHARE"
    if name == OFF and not colon:
        return None
    if name not in list(SparsityKind):
        raise ConfigError(f"`mlp_sparsity` is {text!r}: it must be {forms}, such as cats:0.5")
    kind = SparsityKind(name)
    if kind.is_exact:
        if colon:
            raise ConfigError(f"`mlp_sparsity` is {text!r}: {kind} is exact and has no share, use {kind}")
        return MLPSparsity(kind=kind)
    if not colon:
        return MLPSparsity(kind=kind, share=DEFAULT_SHARES[kind])
    try:
        share = float(value)
    except ValueError:
        raise ConfigError(f"`mlp_sparsity` is {text!r}: give the share to skip, such as {kind}:0.5") from None
    if not LEAST_SHARE <= share <= MOST_SHARE:
        raise ConfigError(f"`mlp_sparsity` is {text!r}: the share must be from {LEAST_SHARE} to {MOST_SHARE}")
    return MLPSparsity(kind=kind, share=share)

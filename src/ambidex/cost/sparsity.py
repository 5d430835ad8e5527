"""What the CPU reads of its part of an MLP where neurons are left out: a share of the bytes, by tokens of a step.

    first matrix    all rows; with a screen its 8-bit copy and the rows that are candidates
    up              neurons that some token of the step needs, where the gate tells which; else all
    last matrix     neurons that some token needs

The three are of one size. How many neurons some token needs (the union) a profile of neurons says, or tokens are taken
to be independent.
"""

from collections.abc import Mapping
from typing import Final

from ambidex.core.model_spec import ModelSpec
from ambidex.core.sparsity import ASSUMED_ACTIVE, MLPSparsity, SparsityKind
from ambidex.cost.weights import GATED
from ambidex.formats.neuron_profile import NeuronProfile
from ambidex.hw.profile import Curve

TOKENS: Final = (1, 2, 4, 8, 16, 32, 64, 128)
SCREEN_BYTES: Final = 34 / 32
"""Of a number's 8-bit copy, with its part of the scale (mlp/screen.py)."""
CANDIDATES: Final = 2.0
"""Rows that a screen lets through, times those that are needed: 4 to 9 % of which 3 are (docs/weights.md)."""


def expected_reads(
    spec: ModelSpec, sparsity: MLPSparsity, profile: NeuronProfile | None, *, number_bytes: int
) -> Curve:
    """Shares of an MLP's bytes that the CPU reads, by tokens of a step.

    Args:
        profile: of the neurons; None: `ASSUMED_ACTIVE` of them are active behind a ReLU. Of forms that are not exact
            the share that is asked for says it.
        number_bytes: of a number of the matrices, which are not quantised.
    """
    if sparsity.share is not None:
        unions = independent_unions(1.0 - sparsity.share)
    elif profile is not None:
        unions = profile.unions(TOKENS)
    else:
        unions = independent_unions(ASSUMED_ACTIVE)
    return mlp_reads(spec, sparsity, unions, number_bytes=number_bytes)


def independent_unions(active_share: float) -> dict[int, float]:
    """Shares of neurons that some token needs, by tokens, if each token needs a share of its own."""
    return {num: 1.0 - (1.0 - active_share) ** num for num in TOKENS}


def mlp_reads(spec: ModelSpec, sparsity: MLPSparsity, unions: Mapping[int, float], *, number_bytes: int) -> Curve:
    """Shares of an MLP's bytes that the CPU reads, by tokens.

    Args:
        unions: shares of neurons that some token needs, by tokens, each above 0.
        number_bytes: of a number of the matrices, which are not quantised.
    """
    kind, num_ins = sparsity.kind, 2 if spec.architecture in GATED else 1
    is_early = num_ins > 1 and kind is not SparsityKind.TEAL
    points = []
    for num_tokens, union in sorted(unions.items()):
        first = 1.0
        if kind is SparsityKind.RELU_SCREENED:
            first = min(1.0, SCREEN_BYTES / number_bytes + min(1.0, CANDIDATES * union))
        others = (num_ins - 1) * (union if is_early else 1.0)
        points.append((num_tokens, (first + others + union) / (num_ins + 1)))
    return Curve(tuple(points))

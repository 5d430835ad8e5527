"""What the forms of a sparse MLP cost a row, and which of them is the cheapest for what a step has found.

Figures alone: `sparse_rates.py` measures them, `sparse_side.py` computes in the form that is chosen.
"""

from dataclasses import dataclass
from enum import StrEnum


class Form(StrEnum):
    """How the sums of a step are computed."""

    BAGS = "token by token"
    UNION = "union"
    DENSE = "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormCosts:
    """Seconds a row by tokens of a step: for each token's own rows, for rows of the union, for all rows.

    A step of a size in between has the costs of the next larger one, and beyond the last the dense form.
    """

    bags: dict[int, float]
    union: dict[int, float]
    dense: dict[int, float]

    def choose(self, num_tokens: int, *, num_own: int, num_union: int, num_all: int) -> Form:
        """The cheapest form.

        Args:
            num_own: numbers other than 0 of all tokens; num_union: neurons that some token needs; num_all: neurons.
        """
        size = next((size for size in sorted(self.dense) if num_tokens <= size), None)
        if size is None:
            return Form.DENSE
        costs = {
            Form.BAGS: self.bags[size] * num_own,
            Form.UNION: self.union[size] * num_union,
            Form.DENSE: self.dense[size] * num_all,
        }
        return min(costs, key=lambda form: costs[form])

    def gathers(self, num_tokens: int, *, num_union: int, num_all: int) -> bool:
        """Whether rows of the union, gathered, are cheaper than all rows."""
        size = next((size for size in sorted(self.dense) if num_tokens <= size), None)
        return size is not None and self.union[size] * num_union < self.dense[size] * num_all

    def crossovers(self) -> dict[int, float]:
        """Up to which share of active neurons (of the union) a step of each size is not dense."""
        return {
            size: min(1.0, max(dense / self.union[size], dense / (self.bags[size] * size)))
            for size, dense in self.dense.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenCosts:
    """Seconds a row by tokens of a step: of a product with all rows, with all of the copy, with one candidate."""

    plain: dict[int, float]
    screen: dict[int, float]
    candidate: dict[int, float]

    def most_candidates(self, num_tokens: int) -> float:
        """Up to which share of candidates it pays to look at the copy; 0: never."""
        size = next((size for size in sorted(self.plain) if num_tokens <= size), None)
        if size is None:
            return 0.0
        return max(0.0, (self.plain[size] - self.screen[size]) / self.candidate[size])

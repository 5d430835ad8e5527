"""`bounded`: the least likely rows are dropped, and the error that this makes is known. Ours; see docs/bounded.md.

For each query head, rows are dropped in ascending order of score as long as the softmax mass of all that are dropped
cannot exceed ε = `max_dropped_mass`. With scores known only up to ±δ a row counts with its upper score against a
normaliser of lower scores, so that ε holds for the true scores. Each step knows the mass it dropped, at most m, and

    ‖out_all − out‖ ≤ m · max ‖v_j − out‖            m ≤ ε̃ · e^(2δ), ε̃ the mass by the approximate scores

where the distance to values that are not read is bounded by the box that holds all values of the head.

This is the reference form, in fp64, so that no rounding of its own blurs the bound. `bounded_scores`: `exact` reads K
of all rows (δ = 0) and V of those kept; `int8` reads an 8-bit copy of K (a scale a row), then K and V of those kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.attention.select.policy import (
    DecodeRow,
    Need,
    Policy,
    PolicyRequest,
    RowMeasure,
    Rows,
    Selection,
    Selector,
    group_scores,
)
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import BoundedScores, PolicySettings
from ambidex.kernels import api


class Bounded(Policy):
    """All but the least likely keys, up to a known mass."""

    needs = frozenset({Need.ROWS})
    dtype = torch.float64

    def __init__(self, settings: PolicySettings, spec: ModelSpec) -> None:
        super().__init__(settings, spec)
        assert settings.max_dropped_mass is not None, "settings of bounded"
        self._max_mass = settings.max_dropped_mass
        self._is_low_bit = settings.bounded_scores is BoundedScores.INT8

    def open(self, request: PolicyRequest, layer_idx: int) -> Selector:
        del request, layer_idx
        return _LeastLikely(self._max_mass, is_low_bit=self._is_low_bit)


@dataclass(frozen=True, slots=True)
class LowBitKeys:
    """An 8-bit copy of K: `numbers` [Hkv, n, D] int8, `scales` [Hkv, n], and `residuals` [Hkv, n], the norm of what
    each row lost by rounding."""

    numbers: Rows
    scales: Rows
    residuals: Rows

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        parts = (self.numbers.values, self.scales.values, self.residuals.values)
        return sum(part.numel() * part.element_size() for part in parts)

    @classmethod
    def of(cls, k: Tensor) -> "LowBitKeys":
        """The copy of K [Hkv, n, D]."""
        return cls(*(Rows.of(part) for part in _round_rows(k)))

    def append(self, k: Tensor) -> "LowBitKeys":
        """With the copy of more rows behind."""
        numbers, scales, residuals = _round_rows(k)
        return LowBitKeys(self.numbers.append(numbers), self.scales.append(scales), self.residuals.append(residuals))

    def scores(self, q: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Scores of a query [Hq, D] fp64, and how far each may be from the true one: [Hq, S] twice.

        |q·k − q·k̃| ≤ ‖q‖ · ‖k − k̃‖ (Cauchy-Schwarz), with room for the rounding of norms and scales to fp32.
        """
        rows = self.numbers.values.double() * self.scales.values.double()[..., None]
        near = group_scores(q[None], rows, scale)[:, 0]
        group_size = len(q) // rows.shape[0]
        residuals = self.residuals.values.double().repeat_interleave(group_size, 0)  # [Hq, S]
        return near, torch.linalg.vector_norm(q, dim=1, keepdim=True) * residuals * abs(scale)


@dataclass(frozen=True, slots=True)
class ValueBox:
    """The smallest box that holds all values of each KV head: `low`, `high` [Hkv, D] fp64."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, v: Tensor) -> "ValueBox":
        """The box of V [Hkv, n, D]."""
        return cls(v.double().amin(1), v.double().amax(1))

    def join(self, other: "ValueBox") -> "ValueBox":
        """The box of both."""
        return ValueBox(torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))

    def farthest(self, out: Tensor) -> Tensor:
        """How far from `out` [Hq, D] a value can be, at most: [Hq]."""
        group_size = len(out) // len(self.low)
        low, high = (side.repeat_interleave(group_size, 0) for side in (self.low, self.high))
        distance: Tensor = torch.linalg.vector_norm(torch.maximum((low - out).abs(), (high - out).abs()), dim=1)
        return distance


class _LeastLikely(Selector):
    def __init__(self, max_mass: float, *, is_low_bit: bool) -> None:
        self._max_mass = max_mass
        self._is_low_bit = is_low_bit
        self._keys: LowBitKeys | None = None
        self._box: ValueBox | None = None
        self._dropped_lse: Tensor | None = None  # [Hq] fp64, of the last selection, at most

    def add_rows(self, k: Tensor, v: Tensor) -> None:
        box = ValueBox.of(v)
        self._box = box if self._box is None else self._box.join(box)
        if self._is_low_bit:
            self._keys = LowBitKeys.of(k) if self._keys is None else self._keys.append(k)

    def select(self, row: DecodeRow) -> Selection:
        if self._keys is not None:
            row.note_bytes(self._keys.num_bytes)
            near, error = self._keys.scores(row.q, row.scale)
            upper, lower = near + error, near - error
        else:
            upper = lower = group_scores(row.q[None], row.read_keys(row.num_keys), row.scale)[:, 0]  # [Hq, S]
        mask = keep_likely(upper, lower, self._max_mass)
        self._dropped_lse = upper.masked_fill(mask, -torch.inf).logsumexp(1)
        if self._keys is not None:
            return Selection(mask=mask)
        return Selection(mask=mask, scores=upper)

    def measure(self, out: Tensor, lse: Tensor) -> RowMeasure:
        assert self._dropped_lse is not None, "select comes first"
        assert self._box is not None, "add_rows comes first"
        mass = dropped_mass(self._dropped_lse, lse)
        return RowMeasure(dropped_mass=mass, error_bound=mass * self._box.farthest(out))


def keep_likely(upper: Tensor, lower: Tensor, max_mass: float) -> Tensor:
    """Which rows to keep so that those left out hold at most `max_mass` of the softmax, whatever the true scores.

    Args:
        upper, lower: [H, S] fp64; the true scores lie between; −inf is a row that cannot be seen.
        max_mass: in [0, 1).
    Returns:
        [H, S] bool; the last row is always kept. Rows are left out in ascending order of `upper`.
    """
    norm = lower.logsumexp(1, keepdim=True)  # [H, 1]: at most the true one
    values, order = upper[:, :-1].sort(dim=1, stable=True)
    mass = (values - norm).exp().cumsum(1)
    # A sum of S fp64 numbers is off by S · 2⁻⁵³ at most; a billion rows stay far below this.
    is_dropped = mass <= max_mass * (1 - 1e-6)
    keep = torch.ones_like(upper, dtype=torch.bool)
    keep[:, :-1] = torch.zeros_like(is_dropped).scatter_(1, order, ~is_dropped)
    return keep


def dropped_mass(dropped_lse: Tensor, kept_lse: Tensor) -> Tensor:
    """N / (Z + N) from log N and log Z: the share of rows left out, in [0, 1]."""
    mass = torch.sigmoid(dropped_lse - kept_lse)
    return torch.where(dropped_lse == -torch.inf, torch.zeros_like(mass), mass)


def _round_rows(k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    numbers, scales = api.quantize_rows(k)
    lost = k.double() - numbers.double() * scales.double()[..., None]
    # 1e-6: what fp32 may take from a norm; the sums themselves are exact to 1e-15
    return numbers, scales, (torch.linalg.vector_norm(lost, dim=-1) * (1 + 1e-6)).float()

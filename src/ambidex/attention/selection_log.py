"""`SelectionLog`: sums and maxima of what a policy chose in a step, and the check of its bounds."""

from typing import Final

import torch
from torch import Tensor

from ambidex.attention.select.policy import RowMeasure
from ambidex.core.errors import BoundError
from ambidex.core.step import SelectionFigures

ROUNDING: Final = 1e-9
"""Of the size of the output: what fp64 takes from a softmax over millions of keys, with room."""


class SelectionLog:
    """Adds up choices on the device, so that nothing waits before `figures`.

    Args:
        verify_every: each so many-th choice is to be computed again; 0: none.
    """

    def __init__(self, device: torch.device, *, verify_every: int) -> None:
        self._device = device
        self._verify_every = verify_every
        self._num_seen = 0
        self.begin()

    def begin(self) -> None:
        """Start anew with a step; the count that samples are drawn by goes on."""
        self._num_choices = self._num_visible = self._num_bounded = self._num_verified = 0
        self._num_attended = torch.zeros((), dtype=torch.int64, device=self._device)
        self._mass = torch.zeros(2, dtype=torch.float64, device=self._device)  # sum, largest
        self._largest = torch.zeros(2, dtype=torch.float64, device=self._device)  # bound, error

    def add(self, mask: Tensor, measure: RowMeasure | None) -> None:
        """One choice: mask [Hkv, G, S] of the keys attended."""
        num_heads, num_keys = mask.shape[0] * mask.shape[1], mask.shape[2]
        self._num_choices += num_heads
        self._num_visible += num_heads * num_keys
        self._num_attended += mask.sum()
        if measure is not None:
            self._num_seen += 1
            self._num_bounded += num_heads
            self._mass[0] += measure.dropped_mass.sum()
            self._mass[1] = torch.maximum(self._mass[1], measure.dropped_mass.max().double())
            self._largest[0] = torch.maximum(self._largest[0], measure.error_bound.max().double())

    def is_verified(self) -> bool:
        """The choice added last is one of the sample."""
        return self._verify_every > 0 and self._num_seen % self._verify_every == 0

    def verify(self, out: Tensor, truth: Tensor, measure: RowMeasure, *, place: str) -> None:
        """Hold an output [Hq, D] against the exact one.

        Raises:
            BoundError: a head's error is above its bound.
        Cost: waits for the device.
        """
        errors = (out.double() - truth).norm(dim=1)
        allowed = measure.error_bound + ROUNDING * (1 + truth.norm(dim=1))
        self._num_verified += len(errors)
        self._largest[1] = torch.maximum(self._largest[1], errors.max())
        if bool((errors <= allowed).all()):  # NaN is none
            return
        head = int((errors - allowed).nan_to_num(nan=torch.inf).argmax())
        raise BoundError(
            f"{place}, head {head}: the output differs from the exact one by {float(errors[head]):.6g}, the stated "
            f"bound is {float(measure.error_bound[head]):.6g}"
        )

    def figures(self) -> SelectionFigures:
        """All of the step; waits for the device."""
        (sum_mass, max_mass), (max_bound, max_error) = self._mass.tolist(), self._largest.tolist()
        return SelectionFigures(
            num_choices=self._num_choices,
            num_visible=self._num_visible,
            num_attended=int(self._num_attended),
            num_bounded=self._num_bounded,
            sum_dropped_mass=sum_mass,
            max_dropped_mass=max_mass,
            max_error_bound=max_bound,
            num_verified=self._num_verified,
            max_error=max_error,
        )

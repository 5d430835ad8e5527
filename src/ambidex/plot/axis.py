"""Where numbers stand on an axis, and which are written there."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_TICKS: Final = 7
_STEPS: Final = (1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Maps `low` … `high` to pixels `start` … `end`; by factors if `is_log`."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool

    @classmethod
    def over(
        cls, values: Sequence[float], *, start: float, end: float, is_log: bool, from_zero: bool = False
    ) -> "Axis":
        """An axis that holds all values, with a little room; `from_zero` begins a linear one at 0.

        Raises:
            ValueError: there is no value, or one of a logarithmic axis is not above 0.
        """
        low, high = min(values), max(values)
        if is_log:
            if low <= 0:
                raise ValueError(f"a logarithmic axis cannot hold {low}")
            room = (high / low) ** 0.06 if high > low else 2.0
            return cls(low=low / room, high=high * room, start=start, end=end, is_log=True)
        low = min(low, 0.0) if from_zero else low
        room = 0.06 * (high - low) or abs(high) or 1.0
        bottom = low if from_zero and low == 0 else low - room
        return cls(low=bottom, high=high + room, start=start, end=end, is_log=False)

    def place(self, value: float) -> float:
        """The pixel of a value."""
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round numbers on the axis, few enough to be read."""
        if not self.is_log:
            return self._linear_ticks()
        decades = math.log10(self.high / self.low)
        base: tuple[float, ...] = (1.0, 2.0, 5.0) if decades < 2.5 else (1.0,)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        ticks = [
            factor * 10.0**power
            for power in range(first, last + 1)
            for factor in base
            if self.low <= factor * 10.0**power <= self.high
        ]
        every = -(-len(ticks) // MAX_TICKS)
        return ticks[::every] if len(ticks) > 1 else self._linear_ticks()

    def _linear_ticks(self) -> list[float]:
        rough = (self.high - self.low) / (MAX_TICKS - 2)
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(factor for factor in _STEPS if factor * power >= rough * 0.999) * power
        first = math.ceil(self.low / step)
        return [number * step for number in range(first, math.floor(self.high / step) + 1)]


def number_text(value: float) -> str:
    """A number as it stands at a tick: `2`, `0.05`, `32K`."""
    if value >= 1024 and value == int(value) and int(value) % 1024 == 0:
        return f"{int(value) // 1024}K"
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{float(f'{value:.4g}'):g}"

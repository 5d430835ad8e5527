"""Timing a call, and the median and quantiles that a figure is given by."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantiles:
    """Median and the 20 % and 80 % quantiles of `num` samples, in the samples' unit."""

    median: float
    q20: float
    q80: float
    num: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Quantiles":
        """Quantiles by linear interpolation between the nearest samples.

        Raises:
            ValueError: there is no sample.
        """
        if not samples:
            raise ValueError("no samples: a quantile needs at least one")
        if len(samples) == 1:
            return cls(median=samples[0], q20=samples[0], q80=samples[0], num=1)
        fifths = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(median=statistics.median(samples), q20=fifths[0], q80=fifths[3], num=len(samples))

    def record(self, *, digits: int = 4) -> dict[str, float | int]:
        """The quantiles with `digits` significant digits, for a JSON record."""
        return {name: significant(getattr(self, name), digits) for name in ("median", "q20", "q80")} | {"num": self.num}


def significant(value: float, digits: int = 4) -> float:
    """Round to a number of significant digits."""
    return float(f"{value:.{digits}g}")


def measure_seconds(run: Callable[[], object], *, num_warmups: int, num_runs: int) -> list[float]:
    """Wall seconds of each of `num_runs` calls, after `num_warmups` calls that are not counted."""
    for _ in range(num_warmups):
        run()
    seconds = []
    for _ in range(num_runs):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return seconds

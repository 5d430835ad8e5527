"""Timing a call and its quantiles, as `calibrate` has them."""

from ambidex.calibrate.figures import Quantiles, measure_seconds, significant

__all__ = ["Quantiles", "measure_seconds", "significant"]

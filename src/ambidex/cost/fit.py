"""Corrects the model's coefficients by steps that were measured: one gradient step on the error of each lane's seconds.

A lane's seconds are a sum of terms, each with a coefficient θ (cost/units.py):

    gpu    θ_gpu_weights · a + θ_gpu_attention · b + θ_fixed · c
    cpu    θ_cpu_weights · d + θ_cpu_attention · e
    link   θ_link · f

With x the terms of a lane at θ = 1 and e = θ · x − measured, the gradient of e²/2 is e · x; the step is divided by
|x|², so that a rate of 1 would meet this measurement exactly (normalised least mean squares, Widrow and Hoff).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Final

from ambidex.core.placement import Placement
from ambidex.cost.step import ATTENTION, ATTENTION_WEIGHTS, FIXED, HEAD, MLP_WEIGHTS, predict_step
from ambidex.cost.units import Coefficients, StepUnits
from ambidex.cost.workload import KVShares

RATE: Final = 0.25
"""Of a gradient step: after 10 steps 6 % of an error are left, and noise of 5 % a step moves coefficients by 2 %."""
SMALLEST: Final = 0.05
LARGEST: Final = 20.0
"""Bounds of coefficients: what a lane's rates may differ from the profile before measuring anew is the better way."""

LaneTerms = Mapping[str, Mapping[str, float]]
"""Lane → coefficient's name → seconds at 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneSeconds:
    """How long each lane was busy in a step; None: nobody knows."""

    gpu: float | None
    cpu: float | None
    link: float | None


def lane_terms(units: StepUnits, placement: Placement, kv: KVShares) -> LaneTerms:
    """The terms of each lane.

    Args:
        units: made with coefficients of 1.
    """
    found = dict(predict_step(units, placement, kv).terms)
    near = units.accelerator

    def total(side: str, *names: str) -> float:
        return sum(found.get(f"{side}: {name}", 0.0) for name in names)

    weights = (ATTENTION_WEIGHTS, MLP_WEIGHTS, HEAD)
    terms = {
        "gpu": {
            "gpu_weights": total(near, *weights), "gpu_attention": total(near, ATTENTION), "fixed": total(near, FIXED),
        },
        "cpu": {"cpu_weights": total("CPU", *weights), "cpu_attention": total("CPU", ATTENTION)},
        "link": {"link": total("link", "weights", "keys and values")},
    }  # fmt: skip
    return terms if units.has_link else {"gpu": terms["gpu"]}


def predict_lanes(terms: LaneTerms, coefficients: Coefficients) -> dict[str, float]:
    """Seconds of each lane."""
    return {
        lane: sum(getattr(coefficients, name) * seconds for name, seconds in parts.items())
        for lane, parts in terms.items()
    }


def find_surprises(
    terms: LaneTerms, coefficients: Coefficients, measured: LaneSeconds, *, least: float
) -> dict[str, int]:
    """Lanes whose seconds are predicted wrong by more than the share `least`: 1 if they took longer, −1 if less."""
    found = {}
    for lane, predicted in predict_lanes(terms, coefficients).items():
        took = getattr(measured, lane)
        if took is not None and predicted > 0.0 and abs(took - predicted) > least * max(took, predicted):
            found[lane] = 1 if took > predicted else -1
    return found


def correct(
    coefficients: Coefficients,
    terms: LaneTerms,
    measured: LaneSeconds,
    *,
    rates: Mapping[str, float] = MappingProxyType({}),
) -> Coefficients:
    """Coefficients after one gradient step on each lane that had work and was measured; others keep theirs.

    Args:
        rates: of lanes that are followed faster or slower than at `RATE`.
    """
    changed: dict[str, float] = {}
    for lane, parts in terms.items():
        norm = sum(seconds * seconds for seconds in parts.values())
        took = getattr(measured, lane)
        if norm == 0.0 or took is None:
            continue
        error = sum(getattr(coefficients, name) * s for name, s in parts.items()) - took
        for name, seconds in parts.items():
            value = getattr(coefficients, name) - rates.get(lane, RATE) * error * seconds / norm
            changed[name] = min(LARGEST, max(SMALLEST, value))
    return replace(coefficients, **changed)


def distance(one: Coefficients, other: Coefficients) -> float:
    """The largest relative difference of two sets."""
    pairs = [sorted((getattr(one, item.name), getattr(other, item.name))) for item in fields(Coefficients)]
    largest: float = max(high / low for low, high in pairs)
    return largest - 1.0

"""`RunPlan`: what lies where, who reads it and how long a decode step should take, said when an engine starts; and
`DecodeOutcome`: how long its steps took. Plain values, which also travel from the engine's process to a server's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ambidex.core.ids import Tier
from ambidex.cost.step import StepPrediction

CONTEXT: Final = 2048
"""Tokens of each request that a step is predicted for, if nothing was solved for others: those of `ambidex plan`."""

Forecast = Callable[[int, int], StepPrediction | None]
"""A decode step by requests and tokens of each; None: such traffic does not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlanRow:
    """One way to what lies on a tier: bytes of weights and, at most, of keys and values; seconds that whoever reads
    them works in the first of the predicted steps, None: not predicted."""

    tier: Tier
    read_by: str
    weights_bytes: int
    kv_bytes: int
    busy_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedStep:
    """Seconds of a decode step of `batch` requests with `context` tokens each, and what it waits for."""

    batch: int
    context: int
    step_s: float
    binds: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What is shown at start; `why_not` says why no step is predicted, and what helps."""

    rows: tuple[RunPlanRow, ...]
    steps: tuple[PredictedStep, ...] = ()
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutcome:
    """Decode steps so far: their number, mean seconds, batch and context, and what was predicted for that batch and
    context; None: nobody predicts."""

    num_steps: int
    measured_s: float
    batch: float
    context: int
    predicted_s: float | None


def make_run_plan(
    *,
    weights: Mapping[str, int],
    kv: Mapping[Tier, int],
    accelerator: str,
    stream_share: float,
    forecast: Forecast | str,
    batches: Sequence[int],
    context: int,
) -> RunPlan:
    """The plan of an engine.

    Args:
        weights: bytes on the GPU (`gpu`), of those in DRAM that the CPU multiplies (`cpu`) and that travel (`link`).
        kv: bytes of K and V that each tier holds.
        accelerator: GPU, or CPU where that is the accelerator.
        stream_share: of the keys in DRAM, that the accelerator reads over the link.
        forecast: of steps, or why there is none.
        batches: to predict steps for; busy times are those of the first.
    """
    found = [] if isinstance(forecast, str) else [(batch, forecast(batch, context)) for batch in dict.fromkeys(batches)]
    steps = [(batch, step) for batch, step in found if step is not None]
    first = steps[0][1] if steps else None
    streamed = round(stream_share * kv.get(Tier.DRAM, 0))
    rows = [
        RunPlanRow(tier=Tier.GPU, read_by=accelerator, weights_bytes=weights["gpu"], kv_bytes=kv.get(Tier.GPU, 0),
                   busy_s=None if first is None else first.gpu_s),
        RunPlanRow(tier=Tier.DRAM, read_by="CPU", weights_bytes=weights["cpu"],
                   kv_bytes=kv.get(Tier.DRAM, 0) - streamed, busy_s=None if first is None else first.cpu_s),
        RunPlanRow(tier=Tier.DRAM, read_by="link", weights_bytes=weights["link"], kv_bytes=streamed,
                   busy_s=None if first is None else first.link_s),
        RunPlanRow(tier=Tier.CXL, read_by="CPU", weights_bytes=0, kv_bytes=kv.get(Tier.CXL, 0), busy_s=None),
    ]  # fmt: skip
    why_not = forecast if isinstance(forecast, str) else "" if steps else "not even one request fits beside the weights"
    return RunPlan(
        rows=tuple(row for row in rows if row.weights_bytes or row.kv_bytes),
        steps=tuple(
            PredictedStep(batch=batch, context=context, step_s=step.step_s, binds=step.binds) for batch, step in steps
        ),
        why_not=why_not,
    )

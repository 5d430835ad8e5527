"""What lies where and how long steps should take, on stderr when an engine starts, and at its end what came of it."""

from typing import TYPE_CHECKING

from ambidex.cli.settings import as_flags
from ambidex.cli.show import print_table, say
from ambidex.core.units import format_size

if TYPE_CHECKING:
    from ambidex.engine.run_plan import DecodeOutcome, RunPlan


def show_run_plan(plan: "RunPlan") -> None:
    """The table, and a line with the predicted steps or why there are none."""
    columns = ["tier", "read by", "weights", "keys and values, up to", *(["busy in a step"] if plan.steps else [])]
    rows = [
        [row.tier.value, row.read_by, _size(row.weights_bytes), _size(row.kv_bytes)]
        + ([_ms(row.busy_s) if row.busy_s else ""] if plan.steps else [])
        for row in plan.rows
    ]
    print_table(columns, rows, err=True)
    if not plan.steps:
        say(f"decode: not predicted: {as_flags(plan.why_not)}")
        return
    say("decode: " + "; ".join(
        f"{_ms(step.step_s)} a step predicted for {step.batch} x {step.context} tokens "
        f"({step.batch / step.step_s:.1f} tokens/s, waits for {step.binds})"
        for step in plan.steps
    ))  # fmt: skip


def show_outcome(outcome: "DecodeOutcome | None") -> None:
    """A line with the mean step, predicted against measured, if there was one."""
    if outcome is None:
        return
    error = ""
    if outcome.predicted_s is not None:
        error = f", {_ms(outcome.predicted_s)} predicted ({outcome.measured_s / outcome.predicted_s - 1:+.0%})"
    say(
        f"decode: {_ms(outcome.measured_s)} a step measured{error}, mean of {outcome.num_steps} steps of "
        f"{outcome.batch:.3g} x {outcome.context} tokens"
    )


def _size(num_bytes: int) -> str:
    return format_size(num_bytes) if num_bytes else ""


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"

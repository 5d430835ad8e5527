"""`Executor`: the one-method seam between the planes. What a step costs and gives is behind it."""

from typing import Protocol

from ambidex.core.step import StepPlan, StepResult


class Executor(Protocol):
    """Carries out steps. The runner is one; tests and the simulator bring others."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens and carry out its moves."""
        ...

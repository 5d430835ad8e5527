"""`Executor`: the seam between the planes. What a step costs and gives is behind it."""

from collections.abc import Callable
from typing import Protocol

from ambidex.core.step import StepPlan, StepResult


class Executor(Protocol):
    """Carries out steps. The runner is one; tests and the simulator bring others."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens and carry out its moves."""
        ...


class LaunchedStep(Protocol):
    """A step that was sent to the accelerator."""

    def wait(self) -> StepResult:
        """What it gave, once it has ended."""
        ...


Launch = Callable[[StepPlan], LaunchedStep | None]
"""Send a step to the accelerator behind those that are under way, without the tokens of the last of them; None: this
one must be executed, and nothing was done. Steps are waited for in their order."""

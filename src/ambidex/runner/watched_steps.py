"""`WatchedSteps`: decode steps of a form of their own whose logits somebody reads."""

from collections.abc import Callable, Sequence

from ambidex.core.step import ScheduledRequest
from ambidex.runner.decode import DecodeOutput, FixedSteps


class WatchedSteps:
    """Other steps; see `FixedSteps`. None is sent ahead of the one before: its logits would be overwritten unseen.

    Args:
        watch: is told what each step gave, which is valid until the next one.
    """

    def __init__(self, steps: FixedSteps, watch: Callable[[DecodeOutput], None]) -> None:
        self._steps = steps
        self._watch = watch
        self.num_failures = steps.num_failures
        """Times that a step could not be captured."""

    def close(self) -> None:
        """Wait for the end of what was sent."""
        self._steps.close()

    def forget(self) -> None:
        """Weights were bound anew."""
        self._steps.forget()

    def try_run(self, requests: Sequence[ScheduledRequest]) -> DecodeOutput | None:
        """Run a step and tell of it."""
        output = self._steps.try_run(requests)
        self.num_failures = self._steps.num_failures
        if output is not None:
            self._watch(output)
        return output

    def try_launch(self, requests: Sequence[ScheduledRequest]) -> None:
        """None: each is run."""

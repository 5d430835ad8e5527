"""What the forms of decode steps have in common: `DecodeSteps` (CUDA graphs) and `ProgramSteps` (native programs)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from torch import Tensor

from ambidex.core.ids import Lane
from ambidex.core.step import ScheduledRequest, SelectionFigures


class DecodeForm(StrEnum):
    """How decode steps run: as all others, in fixed sizes, captured as CUDA graphs, recorded as native programs."""

    ORDINARY = "ordinary"
    FIXED = "fixed"
    CAPTURED = "captured"
    PROGRAM = "program"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOutput:
    """What a decode step gave; row i belongs to the step's request i. Valid until the next step."""

    logits: Tensor
    """[n, V] fp32, on the device."""
    chosen: Tensor
    """[n] int64, on the device: the likeliest token, −1 where logits are not finite."""
    lane_bytes: Callable[[], Mapping[Lane, int]]
    """To be called once the step's tokens are there."""
    is_replayed: bool
    selection: Callable[[], SelectionFigures] | None = None
    """What a policy chose, likewise; None: all keys were attended."""
    lane_seconds: Callable[[], Mapping[Lane, float]] | None = None
    """For how long each lane was busy, likewise; None: nobody timed them."""


class LaunchedDecode(Protocol):
    """A decode step that was sent to the accelerator."""

    lane_bytes: Mapping[Lane, int]
    selection: SelectionFigures | None
    """What a policy chose; None: all keys were attended."""

    def wait(self) -> list[int]:
        """The likeliest token of each request, −1 where logits are not finite, once the step has ended.

        Raises:
            LaneError: lanes lost each other; the step gave nothing.
        """
        ...


class FixedSteps(Protocol):
    """Runs decode steps in a form of their own."""

    num_failures: int
    """Times that a step could not be captured."""

    def close(self) -> None:
        """Wait for the end of what was sent to the accelerator: its memory may go then. No step may follow."""
        ...

    def forget(self) -> None:
        """Weights were bound anew: what was captured or recorded is made again at its next step.

        No step is under way.
        """
        ...

    def try_run(self, requests: Sequence[ScheduledRequest]) -> DecodeOutput | None:
        """Run a step if it has the form of a decode step, else return None and leave everything as it was.

        Must be called within `torch.inference_mode`.
        """
        ...

    def try_launch(self, requests: Sequence[ScheduledRequest]) -> LaunchedDecode | None:
        """Send a step behind the last one that was sent, without the tokens of that; None if it must be run. Pending
        requests take those tokens. Returns at once, or, where other lanes have a part in both, when that has ended.

        Must be called within `torch.inference_mode`; at most one other step may wait to be waited for.
        """
        ...

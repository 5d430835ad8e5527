"""`Pulse`: where the engine's thread is, and since when; so that a stall can be named from outside."""

import time
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """What the engine's thread does."""

    IDLE = "idle"
    MESSAGES = "taking in requests"
    SCHEDULE = "scheduling"
    EXECUTE = "computing and copying"
    UPDATE = "taking in the step's result"
    DELIVER = "handing out answers"


@dataclass(frozen=True, slots=True)
class Beat:
    """A stage and the time at which it began, in seconds of `time.monotonic`."""

    stage: Stage
    since_s: float


class Pulse:
    """Written by the engine's thread alone; whole values are replaced, so that any thread may read."""

    def __init__(self) -> None:
        self.now = Beat(Stage.IDLE, time.monotonic())
        self.last_token_s: float | None = None

    def enter(self, stage: Stage) -> None:
        """A stage begins."""
        self.now = Beat(stage, time.monotonic())

    def note_token(self) -> None:
        """A token was produced."""
        self.last_token_s = time.monotonic()

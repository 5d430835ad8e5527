"""`ControlTrace`: what controllers decided, a JSON line each (`formats/control_trace.py`); `replay` decides once more
and says where it differs.

HybridGen's feedback (`sched.feedback`), the balance of lanes (`attention.lane_share`) and the choice of hot blocks
(`sched.hot`) are pure functions of what a line holds.
"""

import json
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ambidex.attention.lane_share import next_share
from ambidex.core.errors import ConfigError
from ambidex.core.hot import HotDecision, HotState
from ambidex.core.selection import SelectionDecision, SelectionSetting, ShareDecision, ShareState
from ambidex.formats.control_trace import MAX_LINE_BYTES, Decision, decision_json, parse_decision
from ambidex.sched.feedback import next_setting
from ambidex.sched.hot import next_hot

logger = logging.getLogger(__name__)

Outcome = SelectionSetting | ShareState | HotState


class ControlTrace:
    """Writes decisions to a file, in place of an earlier trace there; closed when nobody tells it any more.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, name: str) -> None:
        try:
            self._file = Path(name).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115  # closed below
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"`control_trace` {name} cannot be written: {reason}") from error
        self._has_ended = False
        weakref.finalize(self, self._file.close)

    def __call__(self, decision: Decision) -> None:
        """Write one. The trace ends, and a warning says so, where it cannot be written or would not be read again."""
        if self._has_ended:
            return
        line = json.dumps(decision_json(decision), allow_nan=False) + "\n"
        try:
            if len(line) > MAX_LINE_BYTES:
                raise OSError(f"a decision takes {len(line)} bytes, more than the {MAX_LINE_BYTES} of a line")
            self._file.write(line)
        except OSError as error:
            self._has_ended = True
            logger.warning("the control trace ends here: %s", error.strerror or error)
            with suppress(OSError):  # of what it still holds
                self._file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A line whose decision comes out otherwise now."""

    line: int
    recorded: Outcome
    decided: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A trace decided once more: how many decisions there are of HybridGen's feedback, of the balance of lanes and of
    hot blocks, and where it comes out otherwise: how often, and the first time."""

    num_selections: int
    num_shares: int
    num_hot: int = 0
    num_different: int = 0
    first: Difference | None = None

    @property
    def num_decisions(self) -> int:
        """Of all kinds."""
        return self.num_selections + self.num_shares + self.num_hot


def open_control_trace(name: str | None) -> ControlTrace | None:
    """The trace of a setting, if there is one.

    Raises:
        ConfigError: it cannot be written.
    """
    return None if name is None else ControlTrace(name)


def replay_file(name: str | Path) -> Replay:
    """Decide each line of a file once more.

    Raises:
        ConfigError: it cannot be read, holds no decision, or a line is none of a control trace.
    """
    try:
        with Path(name).open("rb") as file:
            found = replay(_read_lines(file))
    except OSError as error:
        raise ConfigError(f"control trace {name} cannot be read: {error.strerror or error}") from error
    except ConfigError as error:
        raise ConfigError(f"control trace {name}, {error}") from error
    if not found.num_decisions:
        raise ConfigError(
            f"control trace {name} holds no decision: `control_trace` writes those of hybridgen with "
            f"`hybridgen_feedback`, of a GPU's stream lane beside the CPU, and of hot blocks under bounded"
        )
    return found


def replay(lines: Iterable[bytes]) -> Replay:
    """Decide each line of a trace once more.

    Raises:
        ConfigError: a line is none of a control trace.
    """
    num_of_kind = Counter[type[Decision]]()
    num_different, first = 0, None
    for number, line in enumerate(lines, 1):
        try:
            decision = parse_decision(line)
        except ConfigError as error:
            raise ConfigError(f"line {number} is none of a control trace: {error}") from error
        decided = _decide(decision)
        num_of_kind[type(decision)] += 1
        if decided != decision.after:
            num_different += 1
            first = first or Difference(line=number, recorded=decision.after, decided=decided)
    return Replay(
        num_selections=num_of_kind[SelectionDecision],
        num_shares=num_of_kind[ShareDecision],
        num_hot=num_of_kind[HotDecision],
        num_different=num_different,
        first=first,
    )


def _read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of a file, none read further than is needed to see that it is too long."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line


def _decide(decision: Decision) -> Outcome:
    """What is decided now."""
    if isinstance(decision, HotDecision):
        return next_hot(decision.before, decision.look)
    if isinstance(decision, SelectionDecision):
        return next_setting(decision.before, decision.times, decision.limits)
    return next_share(decision.before, decision.seen)

"""`ControlTrace`: what controllers decided, a JSON line each; `replay` decides once more and says where it differs.

    {"kind": "selection", "before": …, "times": …, "limits": …, "after": …}      HybridGen's feedback (`sched.feedback`)
    {"kind": "share", "before": …, "cpu_last": …, "achieved": …, "after": …}     stream lane (`attention.streamed`)
    {"kind": "hot", "before": …, "look": …, "after": …}                          hot blocks (`sched.hot`)

All are pure functions of what the line holds. There a block is "dram 7", by its tier and its id.
"""

import json
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ambidex.attention.streamed import next_share
from ambidex.core.errors import ConfigError
from ambidex.core.hot import BlockScore, HotDecision, HotLook, HotState
from ambidex.core.ids import BlockId, Tier
from ambidex.core.policy import HybridGenMode
from ambidex.core.selection import (
    SelectionDecision,
    SelectionLimits,
    SelectionSetting,
    ShareDecision,
    ShareState,
    StageTimes,
)
from ambidex.core.step import BlockRef
from ambidex.sched.feedback import next_setting
from ambidex.sched.hot import next_hot

Decision = SelectionDecision | ShareDecision | HotDecision
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
        weakref.finalize(self, self._file.close)

    def __call__(self, decision: Decision) -> None:
        """Write one."""
        self._file.write(json.dumps(decision_json(decision), allow_nan=False) + "\n")


def open_control_trace(name: str | None) -> ControlTrace | None:
    """The trace of a setting, if there is one.

    Raises:
        ConfigError: it cannot be written.
    """
    return None if name is None else ControlTrace(name)


def decision_json(decision: Decision) -> dict[str, Any]:
    """A decision as JSON has it."""
    if isinstance(decision, HotDecision):
        return _hot_json(decision)
    return {"kind": "selection" if isinstance(decision, SelectionDecision) else "share", **asdict(decision)}


def replay(lines: Iterable[str]) -> tuple[int, list[str]]:
    """Decide each line of a trace once more.

    Returns:
        How many lines there are, and for each that comes out otherwise a sentence.
    Raises:
        ConfigError: a line is none of a control trace.
    """
    number, differing = 0, []
    for number, line in enumerate(lines, 1):
        try:
            recorded, decided = _decide(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"line {number} is none of a control trace: {type(error).__name__} {error}") from None
        if recorded != decided:
            differing.append(f"line {number}: recorded {recorded}, decided now {decided}")
    return number, differing


def _decide(line: Mapping[str, Any]) -> tuple[Outcome, Outcome]:
    """What a line says was decided, and what is decided now."""
    if line["kind"] == "hot":
        look = {**line["look"], "kept": tuple((_block(name), num) for name, num in line["look"]["kept"].items())}
        return _hot_state(line["after"]), next_hot(_hot_state(line["before"]), HotLook(**look))
    if line["kind"] == "share":
        state = next_share(ShareState(**line["before"]), line["cpu_last"], line["achieved"])
        return ShareState(**line["after"]), state
    if line["kind"] != "selection":
        raise ValueError(f"its kind is {line['kind']!r}")
    decided = next_setting(
        _setting(line["before"]), StageTimes(**line["times"]), SelectionLimits(**line["limits"])
    )  # fmt: skip
    return _setting(line["after"]), decided


def _setting(value: Mapping[str, Any]) -> SelectionSetting:
    times = value["times"]
    return SelectionSetting(
        **{**value, "mode": HybridGenMode(value["mode"]), "times": None if times is None else StageTimes(**times)}
    )


def _hot_json(decision: HotDecision) -> dict[str, Any]:
    look = asdict(decision.look)
    look["kept"] = {_name(block): num for block, num in decision.look.kept}
    before, after = (
        {
            **asdict(state),
            "scores": [[_name(item.block), item.score, item.num_looks] for item in state.scores],
            "wanted": [_name(block) for block in state.wanted],
        }
        for state in (decision.before, decision.after)
    )
    return {"kind": "hot", "before": before, "look": look, "after": after}


def _hot_state(value: Mapping[str, Any]) -> HotState:
    scores = tuple(BlockScore(block=_block(name), score=score, num_looks=num) for name, score, num in value["scores"])
    return HotState(**{**value, "scores": scores, "wanted": tuple(map(_block, value["wanted"]))})


def _name(block: BlockRef) -> str:
    return f"{block.tier} {block.block_id}"


def _block(name: str) -> BlockRef:
    tier, block_id = name.split()
    return BlockRef(Tier(tier), BlockId(int(block_id)))

"""A line of a control trace (`--control-trace`): what a controller decided, from what. Read strictly: nothing but what
is written by `decision_json` is taken, and what is wrong is named with its place, its value and its limit.

    {"kind": "selection", "before": …, "times": …, "limits": …, "after": …}      HybridGen's feedback
    {"kind": "share", "before": …, "seen": …, "after": …}                        the balance of the lanes
    {"kind": "hot", "before": …, "look": …, "after": …}                          copies of hot blocks

Blocks are named by tier and id: "dram 7".
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from ambidex.core.errors import ConfigError
from ambidex.core.hot import BlockScore, HotDecision, HotLook, HotState
from ambidex.core.ids import BlockId, Tier
from ambidex.core.policy import HybridGenMode
from ambidex.core.selection import (
    LaneTimes,
    SelectionDecision,
    SelectionLimits,
    SelectionSetting,
    ShareDecision,
    ShareSeen,
    ShareState,
    StageTimes,
)
from ambidex.core.step import BlockRef
from ambidex.formats.json_file import show

Decision = SelectionDecision | ShareDecision | HotDecision

MAX_LINE_BYTES: Final = 8 * 1024 * 1024
"""A line has some 800, one of hot blocks 80 more for each block of which keys were kept; what has more is no trace, and
is not read whole."""
MAX_COUNT: Final = 2**31 - 1
MAX_SECONDS: Final = 1e6
"""Of one stage of one step."""
MIN_SECONDS: Final = 1e-12
"""Of what is divided by."""
_SELECTION: Final = ("kind", "before", "times", "limits", "after")
_SHARE: Final = ("kind", "before", "seen", "after")
_HOT: Final = ("kind", "before", "look", "after")
_TIMES: Final = ("gpu_s", "cpu_s", "transfer_s")
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,8}")
_COUNTS: Final = ("num_roomy_steps", "num_steps", "num_returns")


def decision_json(decision: Decision) -> dict[str, Any]:
    """A decision as JSON has it."""
    if isinstance(decision, HotDecision):
        look = asdict(decision.look) | {"kept": {_name(block): num for block, num in decision.look.kept}}
        return {"kind": "hot", "before": _hot_json(decision.before), "look": look, "after": _hot_json(decision.after)}
    return {"kind": "selection" if isinstance(decision, SelectionDecision) else "share", **asdict(decision)}


def parse_decision(line: bytes) -> Decision:
    """The decision of a line.

    Raises:
        ConfigError: the line is none of a control trace; says what is wrong with it, but not where it stands.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ConfigError(f"it has more than {MAX_LINE_BYTES} bytes, the most that a line of a control trace has")
    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=_reject_repeated_keys)
    except (ValueError, RecursionError) as error:  # ValueError: bad UTF-8, too, and numbers of thousands of digits
        raise ConfigError(f"it is not valid JSON ({error}): a run that was killed leaves its last line cut") from error
    whole = _Fields.of(value, "the line")
    match whole.values.get("kind"):
        case "selection":
            whole.check_names(_SELECTION)
            return SelectionDecision(
                before=_setting(whole.group("before")),
                times=_times(whole.group("times")),
                limits=_limits(whole.group("limits")),
                after=_setting(whole.group("after")),
            )
        case "share":
            whole.check_names(_SHARE)
            return ShareDecision(
                before=_state(whole.group("before")),
                seen=_seen(whole.group("seen")),
                after=_state(whole.group("after")),
            )
        case "hot":
            whole.check_names(_HOT)
            return HotDecision(
                before=_hot_state(whole.group("before")),
                look=_hot_look(whole.group("look")),
                after=_hot_state(whole.group("after")),
            )
        case kind:
            raise ConfigError(f"its `kind` is {show(kind)}: it must be 'selection', 'share' or 'hot'")


@dataclass(frozen=True, slots=True)
class _Fields:
    """An object within a line, and its name in errors. Every method raises ConfigError."""

    values: Mapping[str, Any]
    where: str

    @classmethod
    def of(cls, value: object, where: str) -> "_Fields":
        if not isinstance(value, dict):
            raise ConfigError(f"{where} is {show(value)}: it must be a JSON object")
        return cls(value, where)

    def check_names(self, names: tuple[str, ...]) -> None:
        """There is nothing else, and nothing is missing."""
        if missing := [name for name in names if name not in self.values]:
            raise ConfigError(f"{self.where} lacks {', '.join(missing)}: it must have {', '.join(names)}")
        if unknown := [name for name in self.values if name not in names]:
            raise ConfigError(f"{self.where} has {show(unknown[0])}: it has {', '.join(names)} and nothing else")

    def group(self, name: str) -> "_Fields":
        return _Fields.of(self.values[name], f"`{name}`" if self.where == "the line" else f"{self.where}, `{name}`")

    def number(self, name: str, *, low: float = 0.0, high: float) -> float:
        value = self.values[name]
        if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
            raise self._error(name, f"a number from {low:g} to {high:g}")
        return value

    def count(self, name: str, *, low: int = 0, high: int = MAX_COUNT) -> int:
        value = self.values[name]
        if type(value) is not int or not low <= value <= high:
            raise self._error(name, f"a whole number from {low} to {high}")
        return value

    def flag(self, name: str) -> bool:
        value = self.values[name]
        if not isinstance(value, bool):
            raise self._error(name, "true or false")
        return value

    def _error(self, name: str, limit: str) -> ConfigError:
        within = "" if self.where == "the line" else f" in {self.where}"
        return ConfigError(f"`{name}`{within} is {show(self.values[name])}: it must be {limit}")


def _setting(fields: _Fields) -> SelectionSetting:
    fields.check_names(("num_selected", "mode", "times", *_COUNTS))
    modes = [mode.value for mode in (HybridGenMode.POST, HybridGenMode.PRE)]
    if fields.values["mode"] not in modes:
        raise fields._error("mode", " or ".join(map(repr, modes)))
    return SelectionSetting(
        num_selected=fields.count("num_selected"),
        mode=HybridGenMode(fields.values["mode"]),
        times=None if fields.values["times"] is None else _times(fields.group("times")),
        num_roomy_steps=fields.count("num_roomy_steps"),
        num_steps=fields.count("num_steps"),
        num_returns=fields.count("num_returns"),
    )


def _times(fields: _Fields) -> StageTimes:
    fields.check_names(_TIMES)
    gpu_s, cpu_s, transfer_s = (fields.number(name, high=MAX_SECONDS) for name in _TIMES)
    return StageTimes(gpu_s=gpu_s, cpu_s=cpu_s, transfer_s=transfer_s)


def _limits(fields: _Fields) -> SelectionLimits:
    fields.check_names(("floor", "ceiling", "may_resize", "may_switch"))
    return SelectionLimits(
        floor=fields.count("floor"),
        ceiling=fields.count("ceiling"),
        may_resize=fields.flag("may_resize"),
        may_switch=fields.flag("may_switch"),
    )


def _seen(fields: _Fields) -> ShareSeen:
    fields.check_names(("cpu_last", "asked", "achieved", "times"))
    cpu_last = None if fields.values["cpu_last"] is None else fields.number("cpu_last", high=1.0)
    times = None if fields.values["times"] is None else _lane_times(fields.group("times"))
    if cpu_last is None and times is None:
        raise ConfigError("`cpu_last` and `times` in `seen` are both null: a step without a CPU lane is timed")
    asked, achieved = (fields.number(name, high=1.0) for name in ("asked", "achieved"))
    return ShareSeen(cpu_last=cpu_last, asked=asked, achieved=achieved, times=times)


def _lane_times(fields: _Fields) -> LaneTimes:
    fields.check_names(("step_s", "link_s", "dram_s"))
    return LaneTimes(
        step_s=fields.number("step_s", high=MAX_SECONDS),
        link_s=fields.number("link_s", low=MIN_SECONDS, high=MAX_SECONDS),
        dram_s=fields.number("dram_s", high=MAX_SECONDS),
    )


def _state(fields: _Fields) -> ShareState:
    optional = ("link_s", "mixed_s", "alone_s")
    fields.check_names(("share", "step", "direction", *optional, "num_steps", "mixed_share", "may_be_alone"))
    link_s, mixed_s, alone_s = (
        None if fields.values[name] is None else fields.number(name, low=low, high=MAX_SECONDS)
        for name, low in zip(optional, (MIN_SECONDS, 0.0, 0.0), strict=True)
    )
    return ShareState(
        share=fields.number("share", high=1.0),
        step=fields.number("step", high=1.0),
        direction=fields.count("direction", low=-1, high=1),
        link_s=link_s,
        mixed_s=mixed_s,
        alone_s=alone_s,
        num_steps=fields.count("num_steps"),
        mixed_share=fields.number("mixed_share", high=1.0),
        may_be_alone=fields.flag("may_be_alone"),
    )


def _hot_json(state: HotState) -> dict[str, Any]:
    scores = {_name(item.block): [item.score, item.num_looks] for item in state.scores}
    return asdict(state) | {"scores": scores, "wanted": list(map(_name, state.wanted))}


def _hot_state(fields: _Fields) -> HotState:
    fields.check_names(("scores", "wanted", "most", "num_slow", "interval"))
    scores = fields.group("scores")
    wanted = fields.values["wanted"]
    if not isinstance(wanted, list) or len(set(map(str, wanted))) < len(wanted):
        raise fields._error("wanted", "a list of blocks, each once")
    return HotState(
        scores=tuple(_score(scores, name) for name in scores.values),
        wanted=tuple(_block(name) for name in wanted),
        most=fields.count("most", high=MAX_COUNT + 1),
        num_slow=fields.count("num_slow"),
        interval=fields.count("interval", low=1),
    )


def _score(fields: _Fields, name: str) -> BlockScore:
    pair = fields.values[name]
    if not isinstance(pair, list) or [type(number) for number in pair] != [int, int]:
        raise fields._error(name, "two whole numbers")
    for number in pair:
        if not 1 <= number <= MAX_COUNT:
            raise fields._error(name, f"two whole numbers from 1 to {MAX_COUNT}")
    return BlockScore(block=_block(name), score=pair[0], num_looks=pair[1])


def _hot_look(fields: _Fields) -> HotLook:
    fields.check_names(("kept", "room", "look_s", "step_s"))
    kept = fields.group("kept")
    return HotLook(
        kept=tuple((_block(name), kept.count(name, low=1)) for name in kept.values),
        room=fields.count("room"),
        look_s=fields.number("look_s", high=MAX_SECONDS),
        step_s=None if fields.values["step_s"] is None else fields.number("step_s", high=MAX_SECONDS),
    )


def _name(block: BlockRef) -> str:
    return f"{block.tier} {block.block_id}"


def _block(name: object) -> BlockRef:
    tier, _, number = name.partition(" ") if isinstance(name, str) else ("", "", "")
    if tier not in (Tier.DRAM.value, Tier.CXL.value) or not _NUMBER.fullmatch(number):
        raise ConfigError(f"a block is named {show(name)}: it must be like 'dram 7'")
    return BlockRef(Tier(tier), BlockId(int(number)))


def _reject_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {show(key)} is there twice")
        values[key] = value
    return values

"""`AccuracyProfile`: what HybridGen costs a model in accuracy, by `ambidex calibrate accuracy`; a JSON file.

look_ahead           per layer, how well the query that is made one layer early stands in for the true one
trials               what tasks lose with the largest number of keys, at each number of exact layers that was tried
exact_layers         first layers that do not look ahead: the fewest tried with which tasks lose no more than is allowed
min_selected_tokens  K_min: from so many selected keys on, with these layers, they lose no more in the mean
points               what was measured with these layers at each number of keys and in each mode
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ambidex.core.errors import ConfigError, ModelFileError
from ambidex.core.policy import HybridGenMode
from ambidex.formats.fields import Fields
from ambidex.formats.json_file import parse_json_object

VERSION: Final = 2
"""Of the form that is read and written here; a change that an older reader would get wrong adds 1."""
MAX_BYTES: Final = 1 << 22
"""A profile has some 10 KiB."""
MAX_SELECTED: Final = 1 << 30
MAX_POINTS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLookAhead:
    """How well a layer's early query, made from the input of the layer before, stands in for the true one; means over
    queries and heads, over keys that are not near.

    `input_cosine`: of the inputs of both layers. `correlation`: of early and true scores (Pearson). `recall`: the
    softmax mass of the keys that the early query scores highest, over that of as many that the true one does.
    `weight_distance`: the share of the weight that lies on other keys than it should (total variation), over all keys
    with early scores of those that are not near.
    """

    input_cosine: float
    correlation: float
    recall: float
    weight_distance: float


Tasks = Mapping[str, tuple[float, float]]
"""By task, the share answered rightly under the policy and with all keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyTrial:
    """What tasks gave with a number of exact layers and of selected keys, in mode post. `drop_error`: the standard
    error of `mean_drop`, None where a task has one sample; `attended_share`: of the keys, in tasks on long texts."""

    exact_layers: int
    num_selected: int
    tasks: Tasks
    drop_error: float | None
    attended_share: float

    @property
    def mean_drop(self) -> float:
        """What the tasks lose against all keys, in the mean; negative where they gain."""
        return find_mean_drop(self.tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyPoint:
    """What one number of selected keys gave in one mode, with the exact layers of the profile. Perplexity and needle
    (share of digits found), each under the policy and with all keys, do not count in `mean_drop`, whose standard error
    is `drop_error`, None where a task has one sample."""

    num_selected: int
    mode: HybridGenMode
    tasks: Tasks
    drop_error: float | None
    perplexity: tuple[float, float]
    needle: tuple[float, float]
    attended_share: float

    @property
    def mean_drop(self) -> float:
        """What the tasks lose against all keys, in the mean; negative where they gain."""
        return find_mean_drop(self.tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyProfile:
    """See above. `fingerprint` names the model's weights, `model` what the user called it; `settings` are what was
    measured with. `min_selected_tokens` None: no number of keys met the criterion with any number of exact layers that
    was tried; then `exact_layers` is the first of them."""

    model: str
    fingerprint: str
    date: str
    settings: Mapping[str, Any]
    max_drop: float
    look_ahead: tuple[LayerLookAhead, ...]
    trials: tuple[AccuracyTrial, ...]
    exact_layers: int
    min_selected_tokens: int | None
    points: tuple[AccuracyPoint, ...]

    def record(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "version": VERSION,
            **asdict(self),
            "trials": [{**asdict(trial), "mean_drop": trial.mean_drop} for trial in self.trials],
            "points": [{**asdict(point), "mean_drop": point.mean_drop} for point in self.points],
        }


def find_mean_drop(tasks: Tasks) -> float:
    """What tasks lose against all keys, in the mean; negative where they gain."""
    return math.fsum(exact - got for got, exact in tasks.values()) / len(tasks)


def find_min_selected(points: tuple[AccuracyPoint, ...], *, max_drop: float) -> int | None:
    """K_min: the fewest keys from which on no measured number, after all scores, loses more than `max_drop` in the
    mean; None: the largest one does."""
    found = None
    for point in sorted(points, key=lambda point: point.num_selected, reverse=True):
        if point.mode is not HybridGenMode.POST:
            continue
        if point.mean_drop > max_drop:
            break
        found = point.num_selected
    return found


def calibrate_command(model: str) -> str:
    """What makes a profile."""
    return f"make one with `ambidex calibrate accuracy {model} --text FILE`"


def default_accuracy_path(environ: Mapping[str, str], fingerprint: str) -> Path:
    """Where a model's profile lies: `ambidex/accuracy/` in the user's cache (XDG_CACHE_HOME, or ~/.cache)."""
    cache = environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if cache.startswith("/") else Path(environ.get("HOME") or "~").expanduser() / ".cache"
    return folder / "ambidex" / "accuracy" / f"{fingerprint}.json"


def write_accuracy_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object so that a reader finds the former one or the whole new one.

    Raises:
        ConfigError: it cannot be written.
    """
    text = json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"accuracy profile {path} cannot be written: {reason}: name another file") from error


def read_accuracy_profile(path: Path, *, model: str, fingerprint: str, num_layers: int) -> AccuracyProfile:
    """The profile in a file.

    Args:
        model: what the user calls the model, for errors; fingerprint: of its weights.
    Raises:
        ConfigError: there is none, what is there is no profile, or it belongs to another model.
    """
    again = calibrate_command(model)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no accuracy profile {path}: {again}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"accuracy profile {path} cannot be read: {reason}: {again}") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{path} has more than {MAX_BYTES} bytes: it is no accuracy profile: {again}")
    try:
        fields = Fields(parse_json_object(text, where=str(path)), str(path))
        version = fields.integer("version", low=0, high=MAX_SELECTED)
        if version != VERSION:
            raise ConfigError(f"accuracy profile {path} has version {version}, version {VERSION} is read here: {again}")
        profile = _parse(fields)
    except ModelFileError as error:
        raise ConfigError(f"this is no accuracy profile: {error}: {again}") from error
    if profile.fingerprint != fingerprint:
        raise ConfigError(
            f"accuracy profile {path} belongs to another model ({profile.model}), or to other weights of it: {again}"
        )
    if len(profile.look_ahead) != num_layers or not 1 <= profile.exact_layers <= num_layers:
        raise ConfigError(
            f"accuracy profile {path} has {len(profile.look_ahead)} layers of which {profile.exact_layers} do not look "
            f"ahead, the model has {num_layers}: {again}"
        )
    return profile


def _parse(fields: Fields) -> AccuracyProfile:
    """Raises: ModelFileError: a value is missing or wrong."""
    floor = None
    if fields.has("min_selected_tokens"):
        floor = fields.integer("min_selected_tokens", low=1, high=MAX_SELECTED)
    return AccuracyProfile(
        model=fields.text("model"),
        fingerprint=fields.text("fingerprint"),
        date=fields.text("date"),
        settings=fields.group("settings").values,
        max_drop=fields.number("max_drop", low=0, high=1),
        look_ahead=tuple(
            LayerLookAhead(
                input_cosine=layer.number("input_cosine", low=-1.01, high=1.01),
                correlation=layer.number("correlation", low=-1.01, high=1.01),
                recall=layer.number("recall", low=0, high=1.01),
                weight_distance=layer.number("weight_distance", low=0, high=1.01),
            )
            for layer in _list(fields, "look_ahead")
        ),
        trials=tuple(_parse_trial(trial) for trial in _list(fields, "trials")),
        exact_layers=fields.integer("exact_layers", high=MAX_POINTS),
        min_selected_tokens=floor,
        points=tuple(_parse_point(point) for point in _list(fields, "points")),
    )


def _parse_trial(fields: Fields) -> AccuracyTrial:
    return AccuracyTrial(
        exact_layers=fields.integer("exact_layers", high=MAX_POINTS),
        num_selected=fields.integer("num_selected", high=MAX_SELECTED),
        tasks=_parse_tasks(fields),
        drop_error=_parse_error(fields),
        attended_share=fields.number("attended_share", low=0, high=1),
    )


def _parse_tasks(fields: Fields) -> Tasks:
    tasks = fields.group("tasks")
    if not tasks.values:
        raise fields.error("tasks", "an object with tasks")
    return {name: _pair(tasks, name, high=1.0) for name in tasks.values}


def _parse_error(fields: Fields) -> float | None:
    return fields.number("drop_error", low=0, high=1) if fields.has("drop_error") else None


def _parse_point(fields: Fields) -> AccuracyPoint:
    mode = fields.text("mode")
    if mode not in (HybridGenMode.POST, HybridGenMode.PRE):
        raise fields.error("mode", "post or pre")
    return AccuracyPoint(
        num_selected=fields.integer("num_selected", high=MAX_SELECTED),
        mode=HybridGenMode(mode),
        tasks=_parse_tasks(fields),
        drop_error=_parse_error(fields),
        perplexity=_pair(fields, "perplexity", high=math.inf),
        needle=_pair(fields, "needle", high=1.0),
        attended_share=fields.number("attended_share", low=0, high=1),
    )


def _list(fields: Fields, name: str) -> list[Fields]:
    value = fields.values.get(name)
    if not isinstance(value, list) or len(value) > MAX_POINTS or not all(isinstance(item, dict) for item in value):
        raise fields.error(name, "a list of objects")
    return [Fields(item, f"{fields.where}: {name}[{place}]") for place, item in enumerate(value)]


def _pair(fields: Fields, name: str, *, high: float) -> tuple[float, float]:
    """Under the policy, with all keys."""
    value = fields.values.get(name)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(isinstance(number, int | float) and not isinstance(number, bool) for number in value)
        or not all(0 <= number <= high for number in value)
    ):
        raise fields.error(name, f"two numbers from 0 to {high:g}")
    return float(value[0]), float(value[1])

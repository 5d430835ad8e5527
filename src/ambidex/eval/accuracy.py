"""`calibrate accuracy`: with which first layers exact, and with how many selected keys, HybridGen costs a model little.

The criterion is the paper's (arXiv:2604.18529): tasks lose at most 0.02 in the mean (`eval.accuracy_meter`).

    look-ahead   how well each layer's early query stands in for the true one; from its recall, where to begin
    trials       the largest K, mode post, with more and more exact layers, until the criterion is met (`exact_layers`)
    points       with these layers, each K in both modes: K_min is the fewest from which on it is met

Exact layers come first since a larger K does not mend weights: where tasks lose with the largest K, early scores are
too far from the true ones in some layer. Perplexity and needle are measured beside the points.

Each part that is done is kept in a file beside the profile; a run that was interrupted goes on with what is missing if
it is of the same model and settings.
"""

import gc
import hashlib
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.policy import HybridGenFeedback, HybridGenMode, PolicyName, resolve_policy
from ambidex.core.selection import SelectionSetting
from ambidex.eval.accuracy_meter import COUNTED, NEEDLE, PERPLEXITY, AccuracyMeter, AccuracyPlan, Measured
from ambidex.eval.exact_layers import find_fewest, list_candidates, next_candidate
from ambidex.eval.long_context import TASKS
from ambidex.eval.look_ahead import find_exact_layers, measure_look_ahead
from ambidex.eval.teacher import Progress
from ambidex.formats.accuracy_profile import (
    AccuracyPoint,
    AccuracyProfile,
    AccuracyTrial,
    LayerLookAhead,
    find_min_selected,
    write_accuracy_json,
)
from ambidex.formats.locate import find_model
from ambidex.formats.neuron_profile import fingerprint
from ambidex.formats.spec import read_spec

PART_VERSION: Final = 2
LOOK_AHEAD: Final = "look-ahead"
MODES: Final = (HybridGenMode.POST, HybridGenMode.PRE)
Scores = Mapping[str, tuple[Sequence[float], Sequence[float]]]
"""By task, the value of each sample under a setting and with all keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the calibration: how long it took, and whether that was in an earlier run."""

    name: str
    seconds: float
    is_kept: bool


def run_accuracy(
    config: EngineConfig,
    plan: AccuracyPlan,
    path: Callable[[str], Path],
    *,
    anew: bool = False,
    progress: Progress | None = None,
) -> Iterator[Part]:
    """Measure all parts and write the profile; yields each part when it is there.

    Args:
        config: of hybridgen, or with no policy named. `exact_layers`: these are kept, whatever tasks lose with them.
        path: the profile's, by the fingerprint of the model.
        anew: do not take over parts of an interrupted run.
        progress: called with (bytes read, bytes in all) while weights load.
    Raises:
        ConfigError, ModelError: settings, model, text or questions cannot be used, or a file cannot be written.
        MachineError, RequestFailedError: a part could not be measured.
    """
    config = _prepare(config)
    source = find_model(config.model)
    spec = read_spec(source)
    name = fingerprint(source, spec)
    file, settings = path(name), _settings(config, plan)
    partial = file.with_name(f"{file.name}.partial")
    head = {"version": PART_VERSION, "fingerprint": name, "settings": settings}
    if config.exact_layers is not None and config.exact_layers > spec.num_layers:
        raise ConfigError(f"`exact_layers` is {config.exact_layers}: the model has {spec.num_layers} layers: lower it")
    parts = _Parts(partial, head, {} if anew else read_parts(partial, head))
    meters = _Meters(config, plan, progress)
    near = resolve_policy(config).near_tokens or 0
    yield parts.have(LOOK_AHEAD, lambda: [
        asdict(layer) for layer in measure_look_ahead(
            replace(config, exact_layers=1), plan.text, context=plan.context, num_near=near, progress=progress
        )
    ])  # fmt: skip
    layers = tuple(LayerLookAhead(**layer) for layer in parts.value(LOOK_AHEAD))

    first = config.exact_layers
    candidates = list_candidates(find_exact_layers(layers), len(layers)) if first is None else [max(1, first)]
    trials: dict[int, AccuracyTrial] = {}
    tried: dict[int, bool] = {}
    measured: dict[int, dict[str, Measured]] = {}
    most = _largest(plan)
    while (num := next_candidate(tried, candidates)) is not None:
        measured[num] = {}
        for task in COUNTED:
            known = measured[candidates[0]].get(task)
            measure = meters.measuring(num, task, [most], exact=None if known is None else known.exact)
            part = f"{task}, {num} exact layers"
            yield parts.have(part, measure)
            measured[num][task] = Measured(**parts.value(part))
        trials[num] = make_trial(measured[num], exact_layers=num, num_selected=most.num_selected)
        tried[num] = trials[num].mean_drop <= plan.max_drop
    chosen = find_fewest(tried) or candidates[0]

    grid: dict[str, Measured] = {}
    for task in (*COUNTED, NEEDLE, PERPLEXITY):
        wanted, exact = _grid(plan), None
        if task in COUNTED:  # the trial has the largest K
            wanted, exact = _others(plan), measured[chosen][task].exact
        yield parts.have(task, meters.measuring(chosen, task, wanted, exact=exact))
        grid[task] = Measured(**parts.value(task))
    meters.close()
    points = make_points(plan, at_most=measured[chosen], others=grid)
    profile = AccuracyProfile(
        model=config.model,
        fingerprint=name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=settings,
        max_drop=plan.max_drop,
        look_ahead=layers,
        trials=tuple(trials[num] for num in sorted(trials)),
        exact_layers=chosen,
        min_selected_tokens=find_min_selected(points, max_drop=plan.max_drop),
        points=points,
    )
    write_accuracy_json(file, profile.record())
    partial.unlink(missing_ok=True)


class _Parts:
    """Parts that are done, and the file that keeps them."""

    def __init__(self, path: Path, head: Mapping[str, Any], done: dict[str, Any]) -> None:
        self._path = path
        self._head = head
        self._done = done

    def have(self, name: str, measure: Callable[[], Any]) -> Part:
        """Measure a part, unless it is there."""
        is_kept = name in self._done
        if not is_kept:
            start = time.perf_counter()
            value = measure()
            self._done[name] = {"value": value, "seconds": time.perf_counter() - start}
            write_accuracy_json(self._path, {**self._head, "parts": self._done})
        return Part(name=name, seconds=self._done[name]["seconds"], is_kept=is_kept)

    def value(self, name: str) -> Any:
        """What was measured."""
        return self._done[name]["value"]


class _Meters:
    """A meter for a number of exact layers, made when it is needed; one at a time, since each holds a model."""

    def __init__(self, config: EngineConfig, plan: AccuracyPlan, progress: Progress | None) -> None:
        self._config = config
        self._plan = plan
        self._progress = progress
        self._held: tuple[int, AccuracyMeter] | None = None

    def measuring(
        self, exact_layers: int, task: str, settings: Sequence[SelectionSetting], *, exact: Sequence[float] | None
    ) -> Callable[[], dict[str, Any]]:
        """What measures a task, for a file."""
        return lambda: asdict(self._of(exact_layers).measure(task, settings, exact=exact))

    def close(self) -> None:
        """Give back what the meter holds."""
        if self._held is not None:
            self._held[1].close()
            self._held = None
            gc.collect()  # engine and runner hold each other; the next one needs the memory

    def _of(self, exact_layers: int) -> AccuracyMeter:
        if self._held is None or self._held[0] != exact_layers:
            self.close()
            config = replace(self._config, exact_layers=exact_layers)
            self._held = (exact_layers, AccuracyMeter(config, self._plan, self._progress))
        return self._held[1]


def read_parts(path: Path, head: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of an interrupted run with the same model and settings; none if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if any(value[name] != wanted for name, wanted in head.items()):
            return {}
        return {
            part: {"value": kept["value"], "seconds": float(kept["seconds"])} for part, kept in value["parts"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # whatever it is, measuring anew mends it
        return {}


def make_trial(measured: Mapping[str, Measured], *, exact_layers: int, num_selected: int) -> AccuracyTrial:
    """What the tasks of one setting give together."""
    scores = {task: (found.got[0], found.exact) for task, found in measured.items()}
    keys = [measured[task].keys[0] for task in TASKS]  # in those of `choice` nearly all keys are near
    return AccuracyTrial(
        exact_layers=exact_layers,
        num_selected=num_selected,
        tasks=_shares(scores),
        drop_error=find_drop_error(scores),
        attended_share=sum(attended for attended, _ in keys) / max(1, sum(visible for _, visible in keys)),
    )


def make_points(
    plan: AccuracyPlan, *, at_most: Mapping[str, Measured], others: Mapping[str, Measured]
) -> tuple[AccuracyPoint, ...]:
    """Each setting of the grid.

    Args:
        at_most: counted tasks with the largest K in mode post; others: in all other settings, and the other tasks in
            all.
    """
    got = {task: dict(zip(_others(plan), others[task].got, strict=True)) for task in COUNTED}
    for task in COUNTED:
        got[task][_largest(plan)] = at_most[task].got[0]
    points = []
    for place, setting in enumerate(_grid(plan)):
        scores = {task: (got[task][setting], at_most[task].exact) for task in COUNTED}
        needle, loss = others[NEEDLE], others[PERPLEXITY]
        attended, visible = loss.keys[place]
        points.append(
            AccuracyPoint(
                num_selected=setting.num_selected,
                mode=setting.mode,
                tasks=_shares(scores),
                drop_error=find_drop_error(scores),
                perplexity=(math.exp(statistics.fmean(loss.got[place])), math.exp(statistics.fmean(loss.exact))),
                needle=(statistics.fmean(needle.got[place]), statistics.fmean(needle.exact)),
                attended_share=attended / max(1, visible),
            )
        )
    return tuple(points)


def find_drop_error(scores: Scores) -> float | None:
    """The standard error of the mean drop, from what each sample loses against itself with all keys; None: a task has
    one sample, which does not tell."""
    if any(len(got) < 2 for got, _ in scores.values()):
        return None
    variances = [
        statistics.variance([truth - value for value, truth in zip(got, exact, strict=True)]) / len(got)
        for got, exact in scores.values()
    ]
    return math.sqrt(math.fsum(variances)) / len(scores)


def _prepare(config: EngineConfig) -> EngineConfig:
    """The same, with K and mode set from step to step."""
    if config.policy not in (PolicyName.EXACT, PolicyName.HYBRIDGEN):
        raise ConfigError(f"`policy` is {config.policy}: accuracy is calibrated for hybridgen, leave it out")
    for name in ("accuracy_profile", "min_selected_tokens", "policy_tokens", "policy_percent"):
        if getattr(config, name) is not None:
            raise ConfigError(f"`{name}` is what is measured here or follows from it: leave it out")
    return replace(
        config,
        policy=PolicyName.HYBRIDGEN,
        hybridgen_feedback=HybridGenFeedback.FULL,
        hybridgen_mode=HybridGenMode.AUTO,
        min_selected_tokens=2,  # beside `exact_layers`: no earlier profile is asked
    )


def _grid(plan: AccuracyPlan) -> list[SelectionSetting]:
    return [SelectionSetting(num_selected=num, mode=mode) for mode in MODES for num in sorted(plan.keys)]


def _settings(config: EngineConfig, plan: AccuracyPlan) -> dict[str, Any]:
    """What figures depend on besides the model."""
    policy = resolve_policy(config)
    return {
        **{name: value for name, value in asdict(plan).items() if name != "text"},
        "keys": sorted(plan.keys), "questions": plan.questions.name,
        "text_sha256": hashlib.sha256(plan.text.encode()).hexdigest()[:16],
        "near_tokens": policy.near_tokens, "partial_percent": policy.partial_percent,
        "exact_layers": config.exact_layers, "dtype": config.dtype.value,
    }  # fmt: skip


def _largest(plan: AccuracyPlan) -> SelectionSetting:
    """What exact layers are tried with."""
    return SelectionSetting(num_selected=max(plan.keys), mode=HybridGenMode.POST)


def _others(plan: AccuracyPlan) -> list[SelectionSetting]:
    """The rest of the grid."""
    return [setting for setting in _grid(plan) if setting != _largest(plan)]


def _shares(scores: Scores) -> dict[str, tuple[float, float]]:
    return {task: (statistics.fmean(got), statistics.fmean(exact)) for task, (got, exact) in scores.items()}

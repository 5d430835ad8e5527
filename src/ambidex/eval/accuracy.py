"""`calibrate accuracy`: what HybridGen costs a model at several numbers of selected keys, in both modes.

Tasks are multiple choice: questions with their choices, and things hidden in a text and asked for among others
(`eval.long_context`). For each sample the prompt is computed once, and what follows it as decode queries once for
every setting. K_min is the paper's criterion (arXiv:2604.18529: a mean loss of 0.02): the fewest keys from which on
tasks lose no more than that in the mean. Perplexity and needle are measured beside it.

Each part that is done is kept in a file beside the profile; a run that was interrupted goes on with what is missing if
it is of the same model and settings.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.policy import HybridGenFeedback, HybridGenMode, PolicyName, resolve_policy
from ambidex.core.selection import SelectionSetting
from ambidex.core.step import SelectionFigures
from ambidex.eval.agreement import Text
from ambidex.eval.choice import cut_shots
from ambidex.eval.continuation import split_ids
from ambidex.eval.items import read_items
from ambidex.eval.long_context import TASK_DEFAULTS, TASKS
from ambidex.eval.look_ahead import find_exact_layers, measure_look_ahead
from ambidex.eval.needle import Haystack, digit_odds, make_haystack
from ambidex.eval.probe import Probe, found_share
from ambidex.eval.teacher import Progress, Teacher
from ambidex.eval.words import Hay
from ambidex.formats.accuracy_profile import (
    AccuracyPoint,
    AccuracyProfile,
    LayerLookAhead,
    find_min_selected,
    write_accuracy_json,
)
from ambidex.formats.locate import find_model
from ambidex.formats.neuron_profile import fingerprint
from ambidex.formats.spec import read_spec

PART_VERSION: Final = 1
NEEDLE_DEPTH: Final = 50
"""Percent of the text."""
CHOICE, NEEDLE, PERPLEXITY, LOOK_AHEAD = "choice", "needle", "perplexity", "look-ahead"
Run = tuple[Sequence[int], int, int]
"""Tokens of a text, how many of them are the prompt, and the first whose prediction counts."""
MODES: Final = (HybridGenMode.POST, HybridGenMode.PRE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyPlan:
    """What is measured: `keys` are numbers of selected keys; `context` tokens of each text, `rounds` secrets of each
    task, `shots` and `num_items` questions of the file, `num_predicted` tokens of the perplexity."""

    text: str
    context: int
    keys: Sequence[int]
    questions: Path
    shots: int
    num_items: int | None
    rounds: int
    num_predicted: int
    max_drop: float


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
        config: of hybridgen, or with no policy named.
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
    done: dict[str, Any] = {} if anew else read_parts(partial, head)
    meter: _Meter | None = None
    for part in (LOOK_AHEAD, CHOICE, *TASKS, NEEDLE, PERPLEXITY):
        if part in done:
            yield Part(name=part, seconds=done[part]["seconds"], is_kept=True)
            continue
        start = time.perf_counter()
        if part == LOOK_AHEAD:
            near = resolve_policy(config).near_tokens or 0
            layers = measure_look_ahead(
                replace(config, exact_layers=1), plan.text, context=plan.context, num_near=near, progress=progress
            )
            value: Any = [asdict(layer) for layer in layers]
        else:
            exact_layers = _exact_layers(config, done[LOOK_AHEAD]["value"])
            meter = meter or _Meter(replace(config, exact_layers=exact_layers), plan, progress)
            value = meter.measure(part)
        done[part] = {"value": value, "seconds": time.perf_counter() - start}
        write_accuracy_json(partial, {**head, "parts": done})
        yield Part(name=part, seconds=done[part]["seconds"], is_kept=False)
    profile = make_profile(config, plan, {part: kept["value"] for part, kept in done.items()}, model=name)
    write_accuracy_json(file, profile.record())
    partial.unlink(missing_ok=True)


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


def make_profile(config: EngineConfig, plan: AccuracyPlan, parts: Mapping[str, Any], *, model: str) -> AccuracyProfile:
    """The profile that the values of all parts make."""
    points = []
    for place, setting in enumerate(_grid(plan)):
        tasks = {task: (parts[task]["got"][place], parts[task]["exact"]) for task in (CHOICE, *TASKS)}
        points.append(
            AccuracyPoint(
                num_selected=setting.num_selected,
                mode=setting.mode,
                tasks=tasks,
                perplexity=(parts[PERPLEXITY]["got"][place], parts[PERPLEXITY]["exact"]),
                needle=(parts[NEEDLE]["got"][place], parts[NEEDLE]["exact"]),
                attended_share=parts[PERPLEXITY]["attended"][place],
            )
        )
    return AccuracyProfile(
        model=config.model,
        fingerprint=model,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=_settings(config, plan),
        max_drop=plan.max_drop,
        look_ahead=tuple(LayerLookAhead(**layer) for layer in parts[LOOK_AHEAD]),
        exact_layers=_exact_layers(config, parts[LOOK_AHEAD]),
        min_selected_tokens=find_min_selected(tuple(points), max_drop=plan.max_drop),
        points=tuple(points),
    )


class _Meter:
    """An engine whose K and mode are set from outside, and the samples of each part."""

    def __init__(self, config: EngineConfig, plan: AccuracyPlan, progress: Progress | None) -> None:
        self._plan = plan
        self._grid = _grid(plan)
        self._teacher = Teacher(config, progress=progress)
        self._teacher.check_length(plan.context, flag="--context")

    def measure(self, part: str) -> dict[str, Any]:
        """`got` of each setting, `exact`, `attended` (share of keys) of each setting, and how many `samples`."""
        samples = self._samples(part)
        got, exact = [0.0] * len(self._grid), 0.0
        chosen: list[SelectionFigures] = [SelectionFigures()] * len(self._grid)
        for sample in samples:
            scores = []
            for ids, num_prompt, first in sample.runs:
                runs = self._teacher.with_settings(ids, num_prompt=num_prompt, first=first, settings=self._grid)
                truth = self._teacher.exact(ids, first=first)
                scores.append([truth, *(logprobs for logprobs, _ in runs)])
                chosen = [past.join(figures) for past, (_, figures) in zip(chosen, runs, strict=True)]
            values = [sample.score([run[place] for run in scores]) for place in range(len(self._grid) + 1)]
            exact += values[0]
            got = [past + value for past, value in zip(got, values[1:], strict=True)]
        count = len(samples)
        mean = math.exp if part == PERPLEXITY else float  # of the mean loss, or of the share
        return {
            "got": [mean(value / count) for value in got],
            "exact": mean(exact / count),
            "attended": [figures.attended_share for figures in chosen],
            "samples": count,
        }

    def _samples(self, part: str) -> list["_Sample"]:
        plan, tokenizer = self._plan, self._teacher.engine.tokenizer
        if part == CHOICE:
            return self._questions()
        if part == PERPLEXITY:
            ids = tokenizer.encode(plan.text)
            text = Text(token_ids=ids, context=plan.context, num_predicted=plan.num_predicted, num_windows=1)
            (window,) = text.windows()
            num_prompt = plan.context - plan.num_predicted
            targets = torch.tensor(window[num_prompt + 1 :])[:, None]
            return [
                _Sample(
                    runs=[(window[:-1], num_prompt, num_prompt)],
                    score=lambda runs: -float(runs[0].gather(1, targets.to(runs[0].device)).mean()),
                )
            ]
        if part == NEEDLE:
            return [
                _needle_sample(make_haystack(
                    tokenizer, plan.text, context=plan.context, depth_percent=NEEDLE_DEPTH, seed=seed
                ))
                for seed in range(plan.rounds)
            ]  # fmt: skip
        make = TASKS[part](tokenizer, Hay.of(tokenizer, plan.text), plan.context, TASK_DEFAULTS[part])
        return [_probe_sample(make(seed)) for seed in range(plan.rounds)]

    def _questions(self) -> list["_Sample"]:
        plan, tokenizer = self._plan, self._teacher.engine.tokenizer
        items = read_items(plan.questions)
        before, asked = cut_shots(items, plan.shots)
        samples = []
        for item in asked[: plan.num_items]:
            runs: list[Run] = []
            tails: list[Sequence[int]] = []
            for context, continuation in zip(item.contexts, item.continuations, strict=True):
                head, tail = split_ids(tokenizer, before + context, continuation)
                ids = [*head, *tail[:-1]]
                self._teacher.check_length(len(ids) + 1, flag="--shots: a question of")
                if len(ids) < 2:
                    raise ConfigError("a question has one token, and nothing in front of it: give --shots at least 1")
                runs.append((ids, min(max(1, len(head) - 1), len(ids) - 1), len(head) - 1))
                tails.append(tail)
            samples.append(_choice_sample(runs, tails, item.right))
        return samples


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    """Texts to run, and what the log-probabilities of all of them give."""

    runs: list[Run]
    score: Callable[[list[Tensor]], float]


def _needle_sample(hay: Haystack) -> _Sample:
    return _Sample(
        runs=[(hay.ids, hay.num_prompt, hay.num_prompt)],
        score=lambda runs: _mean([float(odds > 0) for odds in digit_odds(runs[0], hay)]),
    )


def _probe_sample(probe: Probe) -> _Sample:
    num_prompt = len(probe.prompt)
    return _Sample(
        runs=[([*probe.prompt, *probe.question], num_prompt, num_prompt)],
        score=lambda runs: found_share(runs[0][-1], probe),
    )


def _choice_sample(runs: list[Run], tails: Sequence[Sequence[int]], right: int) -> _Sample:
    def score(logprobs: list[Tensor]) -> float:
        places = [torch.tensor(tail)[:, None] for tail in tails]
        sums = [float(run.gather(1, tail.to(run.device)).sum()) for run, tail in zip(logprobs, places, strict=True)]
        return float(max(range(len(sums)), key=sums.__getitem__) == right)

    return _Sample(runs=runs, score=score)


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


def _exact_layers(config: EngineConfig, layers: Sequence[Mapping[str, float]]) -> int:
    """As the user has it, or as measured."""
    if config.exact_layers is not None:
        return max(1, config.exact_layers)
    return find_exact_layers([LayerLookAhead(**layer) for layer in layers])


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


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)

"""`AccuracyMeter`: the tasks of `calibrate accuracy`, sample by sample, under several settings of HybridGen.

Multiple choice: questions with their choices, and things hidden in a text and asked for among others
(`eval.long_context`); besides them needle and perplexity. For each sample the prompt is computed once, and what follows
it as decode queries once for every setting.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.selection import SelectionSetting
from ambidex.core.step import SelectionFigures
from ambidex.eval.agreement import Text
from ambidex.eval.choice import cut_shots
from ambidex.eval.continuation import split_ids
from ambidex.eval.items import read_items
from ambidex.eval.long_context import TASK_DEFAULTS, TASKS
from ambidex.eval.needle import Haystack, digit_odds, make_haystack
from ambidex.eval.probe import Probe, found_share
from ambidex.eval.teacher import Progress, Teacher
from ambidex.eval.words import Hay

NEEDLE_DEPTH: Final = 50
"""Percent of the text."""
CHOICE, NEEDLE, PERPLEXITY = "choice", "needle", "perplexity"
COUNTED: Final = (CHOICE, *TASKS)
"""Tasks whose mean loss is the criterion."""
Run = tuple[Sequence[int], int, int]
"""Tokens of a text, how many of them are the prompt, and the first whose prediction counts."""


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
class Measured:
    """A task under several settings: the value of each sample under each of them (`got`) and with all keys (`exact`):
    the share that was answered rightly, of the perplexity its logarithm. `keys`: how many were attended under each
    setting, and how many there were."""

    got: Sequence[Sequence[float]]
    exact: Sequence[float]
    keys: Sequence[tuple[int, int]]


class AccuracyMeter:
    """An engine whose K and mode are set from outside, and the samples of each task.

    Args:
        config: of hybridgen with full feedback.
        progress: called with (bytes read, bytes in all) while weights load.
    Raises:
        ConfigError, ModelError: settings, model or context cannot be used.
        MachineError: the machine has not what they need.
    """

    def __init__(self, config: EngineConfig, plan: AccuracyPlan, progress: Progress | None) -> None:
        self._plan = plan
        self._teacher = Teacher(config, progress=progress)
        self._teacher.check_length(plan.context, flag="--context")

    def close(self) -> None:
        """End the engine's threads."""
        self._teacher.engine.close()

    def measure(
        self, task: str, settings: Sequence[SelectionSetting], *, exact: Sequence[float] | None = None
    ) -> Measured:
        """Run all samples of a task.

        Args:
            exact: what they gave with all keys, if that is known.
        Raises:
            ConfigError: text or questions do not do.
            RequestFailedError: the engine could not compute it.
        """
        got: list[list[float]] = [[] for _ in settings]
        truths: list[float] = []
        chosen = [SelectionFigures()] * len(settings)
        for sample in self._samples(task):
            scores: list[list[Tensor]] = [[] for _ in settings]
            for ids, num_prompt, first in sample.runs:
                runs = self._teacher.with_settings(ids, num_prompt=num_prompt, first=first, settings=settings)
                for place, (logprobs, figures) in enumerate(runs):
                    scores[place].append(logprobs)
                    chosen[place] = chosen[place].join(figures)
            for place, values in enumerate(scores):
                got[place].append(sample.score(values))
            if exact is None:
                truth = [self._teacher.exact(ids, first=first) for ids, _, first in sample.runs]
                truths.append(sample.score(truth))
        return Measured(
            got=got,
            exact=truths if exact is None else exact,
            keys=[(figures.num_attended, figures.num_visible) for figures in chosen],
        )

    def _samples(self, task: str) -> list["_Sample"]:
        plan, tokenizer = self._plan, self._teacher.engine.tokenizer
        if task == CHOICE:
            return self._questions()
        if task == PERPLEXITY:
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
        if task == NEEDLE:
            return [
                _needle_sample(make_haystack(
                    tokenizer, plan.text, context=plan.context, depth_percent=NEEDLE_DEPTH, seed=seed
                ))
                for seed in range(plan.rounds)
            ]  # fmt: skip
        make = TASKS[task](tokenizer, Hay.of(tokenizer, plan.text), plan.context, TASK_DEFAULTS[task])
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


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

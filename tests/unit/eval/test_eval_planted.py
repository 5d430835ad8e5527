"""Evaluations on a model whose retrieval heads are planted: what a policy must find, and must not, is known exactly."""

from pathlib import Path
from typing import Any

import pytest

from ambidex.core.config import EngineConfig
from ambidex.eval.long_context import make_multikey
from ambidex.eval.probe import Probe, measure_probes
from ambidex.eval.teacher import Teacher
from ambidex.eval.words import Hay
from planted_model import save_planted_model

CONTEXT, KEYS, NUM_PROBES = 300, 4, 12
BUDGET, SINKS = 80, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_planted_model(tmp_path_factory.mktemp("planted") / "model")


def make_teacher(folder: Path, **settings: Any) -> Teacher:
    shared: dict[str, Any] = {"num_threads": 1, "dtype": "fp32", "max_context_len": 500}
    return Teacher(EngineConfig(model=str(folder), **shared, **settings))


def probes(teacher: Teacher) -> list[Probe]:
    hay = Hay.of(teacher.engine.tokenizer, None)
    return [
        make_multikey(teacher.engine.tokenizer, hay, context=CONTEXT, keys=KEYS, seed=seed)
        for seed in range(NUM_PROBES)
    ]  # fmt: skip


def test_full_attention_finds_every_secret(folder: Path) -> None:
    teacher = make_teacher(folder)
    made = probes(teacher)
    got = measure_probes(teacher, made.__getitem__, context=CONTEXT, num_probes=NUM_PROBES, against_exact=True)
    assert (got.found, got.exact_found, got.by_chance) == (1.0, 1.0, 1 / KEYS)
    assert got.log_odds == pytest.approx(got.exact_log_odds, abs=1e-3)
    assert got.log_odds > 5


@pytest.mark.parametrize("mass", [0.0, 0.01])
def test_bounded_finds_every_secret(folder: Path, mass: float) -> None:
    teacher = make_teacher(folder, policy="bounded", max_dropped_mass=mass)
    made = probes(teacher)
    got = measure_probes(teacher, made.__getitem__, context=CONTEXT, num_probes=NUM_PROBES, against_exact=False)
    assert got.found == 1.0
    assert got.selection is not None
    assert got.selection.max_dropped_mass <= mass


def test_window_finds_those_secrets_alone_that_lie_in_it(folder: Path) -> None:
    """`streaming_llm` attends sinks and the newest keys: if the secret's row is one of them its lead is that of full
    attention, else it is guessed."""
    teacher = make_teacher(folder, policy="streaming_llm", policy_tokens=BUDGET, sink_tokens=SINKS)
    wanted, got = [], []
    for probe in probes(teacher):
        query = len(probe.prompt) + len(probe.question) - 1
        (right,) = probe.right
        rows = [place for place, token in enumerate(probe.prompt) if token == probe.candidates[right]]
        wanted.append(any(row < SINKS or row >= query - (BUDGET - SINKS) for row in rows))
        figures = measure_probes(teacher, lambda _, probe=probe: probe, context=CONTEXT, num_probes=1,
                                 against_exact=True)  # fmt: skip
        assert figures.exact_log_odds is not None
        got.append(abs(figures.log_odds - figures.exact_log_odds) < 0.5)
    assert got == wanted
    assert 0 < sum(wanted) < NUM_PROBES, "the test would prove nothing"

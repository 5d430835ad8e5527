"""`calibrate accuracy` on a tiny model: what is measured, what an interrupted run leaves, and who reads the file."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.policy import HybridGenMode
from ambidex.core.selection import SelectionSetting
from ambidex.engine.chosen_policy import choose_policy
from ambidex.engine.compose import build_engine
from ambidex.eval.accuracy import AccuracyPlan, run_accuracy
from ambidex.eval.look_ahead import correlation, find_exact_layers, measure_look_ahead, recall
from ambidex.eval.teacher import Teacher
from ambidex.formats.accuracy_profile import (
    AccuracyPoint,
    LayerLookAhead,
    default_accuracy_path,
    find_min_selected,
    read_accuracy_profile,
)
from ambidex.formats.locate import find_model
from ambidex.formats.neuron_profile import fingerprint
from ambidex.formats.spec import read_spec
from tiny_engine import make_engine_folder

TEXT = "The harbour lies to the north of the town, and the boats that lie in it are old. " * 12
CONTEXT, NEAR = 600, 16
PLAN = AccuracyPlan(
    text=TEXT,
    context=CONTEXT,
    keys=(64, 8),
    questions=Path("questions.jsonl"),
    shots=1,
    num_items=2,
    rounds=1,
    num_predicted=8,
    max_drop=1.0,
)
PARTS = ["look-ahead", "choice", "multikey", "variables", "counting", "needle", "perplexity"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("tiny"))


def make_folder(path: Path, *, seed: int = 0) -> Path:
    """A tiny model for longer contexts than others need."""
    folder = make_engine_folder(path, seed=seed)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 800}))
    return folder


@pytest.fixture
def plan(tmp_path: Path) -> AccuracyPlan:
    questions = tmp_path / "questions.jsonl"
    item = {"question": "Which one is it, of all these?", "choices": ["the cat", "a dog"], "answer": 1}
    questions.write_text("\n".join(json.dumps(item) for _ in range(3)))
    return replace(PLAN, questions=questions)


def make_config(folder: Path, **settings: Any) -> EngineConfig:
    shared: dict[str, Any] = {"policy": "hybridgen", "near_tokens": NEAR, "num_threads": 1, "dtype": "fp32"}
    return EngineConfig(model=str(folder), **{**shared, **settings})


def test_calibration_goes_on_after_an_interruption_and_is_read_by_the_policy(
    folder: Path, tmp_path: Path, plan: AccuracyPlan
) -> None:
    config, path = make_config(folder, exact_layers=1), tmp_path / "accuracy.json"
    first: Iterator[Any] = run_accuracy(config, plan, lambda _name: path)
    assert [next(first).name for _ in range(3)] == PARTS[:3]
    first.close()  # type: ignore[attr-defined]  # as Ctrl-C does
    assert not path.exists()
    again = list(run_accuracy(config, plan, lambda _name: path))
    assert [part.name for part in again] == PARTS
    assert [part.is_kept for part in again] == [True] * 3 + [False] * 4
    assert not path.with_name("accuracy.json.partial").exists()

    source = find_model(str(folder))
    spec = read_spec(source)
    profile = read_accuracy_profile(
        path, model="tiny", fingerprint=fingerprint(source, spec), num_layers=spec.num_layers
    )
    assert [(point.num_selected, point.mode.value) for point in profile.points] == [
        (8, "post"), (64, "post"), (8, "pre"), (64, "pre"),
    ]  # fmt: skip
    assert all(set(point.tasks) == {"choice", "multikey", "variables", "counting"} for point in profile.points)
    assert profile.min_selected_tokens == 8, "everything may be lost"
    assert len(profile.look_ahead) == spec.num_layers
    fewer, more = profile.points[:2]
    assert fewer.attended_share < more.attended_share < 1
    assert fewer.perplexity[0] != more.perplexity[0]
    assert fewer.perplexity[1] == more.perplexity[1], "with all keys there is one"

    engine = build_engine(make_config(folder, accuracy_profile=str(path), hybridgen_feedback="full"))
    assert "min_selected_tokens 8" in engine.report.value("compute", "policy")
    assert f"exact_layers {profile.exact_layers}" in engine.report.value("compute", "policy")
    assert "accuracy.json" in engine.report.why("compute", "policy")
    kept = make_config(folder, accuracy_profile=str(path), min_selected_tokens=5)
    assert choose_policy(kept, source, spec).settings.min_selected_tokens == 5, (
        "what is set goes before what is measured"
    )


def test_file_of_other_weights_is_refused_with_the_command_that_makes_one(
    folder: Path, tmp_path: Path, plan: AccuracyPlan
) -> None:
    path = tmp_path / "accuracy.json"
    list(run_accuracy(make_config(folder, exact_layers=1), plan, lambda _name: path))
    other = make_folder(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"another model .*ambidex calibrate accuracy .*other"):
        build_engine(make_config(other, accuracy_profile=str(path)))
    source = find_model(str(folder))
    spec = read_spec(source)
    default = default_accuracy_path({"XDG_CACHE_HOME": str(tmp_path)}, fingerprint(source, spec))
    default.parent.mkdir(parents=True)
    value = json.loads(path.read_text())
    default.write_text(json.dumps({**value, "min_selected_tokens": None}))
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert choose_policy(make_config(folder), source, spec, environ=environ).settings.exact_layers == 1
    with pytest.raises(ConfigError, match="found no number of keys"):
        choose_policy(make_config(folder, hybridgen_feedback="full"), source, spec, environ=environ)
    default.write_text(json.dumps({**value, "exact_layers": 99}))
    with pytest.raises(ConfigError, match="99 do not look ahead"):
        choose_policy(make_config(folder), source, spec, environ=environ)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 7}, "version 7, version 1 is read"),
        ({"exact_layers": "2"}, "exact_layers is '2'"),
        ({"min_selected_tokens": -1}, "min_selected_tokens is -1"),
        ({"look_ahead": [1]}, "look_ahead is"),
        ({"points": None}, "points is missing"),
        ({"max_drop": 2}, "max_drop is 2"),
    ],
)
def test_file_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    layer = {"input_cosine": 0.5, "correlation": 0.5, "recall": 0.5}
    value = {"version": 1, "model": "tiny", "fingerprint": "x", "date": "today", "settings": {}, "max_drop": 0.02,
             "look_ahead": [layer] * 2, "exact_layers": 1, "min_selected_tokens": 8, "points": []}  # fmt: skip
    path = tmp_path / "accuracy.json"
    path.write_text(json.dumps(value))
    assert read_accuracy_profile(path, model="tiny", fingerprint="x", num_layers=2).exact_layers == 1
    path.write_text(json.dumps({**value, **change}))
    with pytest.raises(ConfigError, match=message):
        read_accuracy_profile(path, model="tiny", fingerprint="x", num_layers=2)
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"no accuracy profile.*calibrate accuracy tiny"):
        read_accuracy_profile(path, model="tiny", fingerprint="x", num_layers=2)
    with pytest.raises(ConfigError, match="there is no accuracy profile"):
        read_accuracy_profile(tmp_path / "none.json", model="tiny", fingerprint="x", num_layers=2)


def test_settings_are_tried_on_the_same_prompt_as_if_each_had_its_own(folder: Path) -> None:
    """`Teacher.with_settings` computes the prompt once; an engine whose number and mode are fixed must say the same."""
    ids = [3 + ord(char) for char in TEXT[:120]]
    settings = [SelectionSetting(num_selected=num, mode=mode) for mode in (HybridGenMode.POST, HybridGenMode.PRE)
                for num in (4, 30)]  # fmt: skip
    options: dict[str, Any] = {"exact_layers": 1, "min_selected_tokens": 2, "max_tokens_per_step": 50}
    teacher = Teacher(make_config(folder, hybridgen_feedback="full", **options))
    found = teacher.with_settings(ids, num_prompt=90, first=90, settings=settings)
    assert len({float(logprobs.sum()) for logprobs, _ in found}) == len(settings)
    for (logprobs, figures), setting in zip(found, settings, strict=True):
        alone = Teacher(
            make_config(folder, policy_tokens=setting.num_selected, hybridgen_mode=setting.mode.value, **options)
        )
        wanted, chosen = alone.with_policy(ids, num_prompt=90)
        torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-5)
        assert chosen is not None
        assert (figures.num_attended, figures.num_visible) == (chosen.num_attended, chosen.num_visible)


def test_floor_above_the_context_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"`min_selected_tokens` is 300 .*context limit is 200"):
        build_engine(make_config(folder, min_selected_tokens=300, max_context_len=200))


def test_look_ahead_is_perfect_where_inputs_are_equal_and_worse_where_they_are_not(folder: Path) -> None:
    layers = measure_look_ahead(make_config(folder, exact_layers=1), TEXT, context=200, num_near=NEAR)
    assert layers[0] == LayerLookAhead(input_cosine=0.0, correlation=0.0, recall=0.0)
    assert all(-1 <= layer.correlation <= 1 and 0 < layer.recall <= 1 for layer in layers[1:])
    scores = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(recall(scores, scores), torch.ones(3))
    assert torch.allclose(correlation(scores, 2 * scores + 1), torch.ones(3))
    assert (recall(scores, -scores) < 0.2).all()
    assert correlation(scores, torch.ones(3, 200)).tolist() == [0.0] * 3


@pytest.mark.parametrize(
    ("recalls", "wanted"),
    [
        ([0.0, 0.3, 0.5, 0.95, 0.97, 0.9], 3),
        ([0.0, 0.95, 0.95, 0.95], 1),
        ([0.0, 0.95, 0.5, 0.95, 0.95, 0.95, 0.1], 3),
        ([0.0, 0.5, 0.5], 3),
        ([0.0, 0.5, 0.95], 2),
    ],
)
def test_first_layers_are_those_before_three_good_ones(recalls: list[float], wanted: int) -> None:
    layers = [LayerLookAhead(input_cosine=0.5, correlation=0.5, recall=value) for value in recalls]
    assert find_exact_layers(layers) == wanted


def test_least_number_of_keys_is_the_one_from_which_on_none_loses_more() -> None:
    def point(num: int, drop: float, mode: HybridGenMode = HybridGenMode.POST) -> AccuracyPoint:
        return AccuracyPoint(
            num_selected=num, mode=mode, tasks={"a": (0.5, 0.5), "b": (0.5, 0.5 + 2 * drop)}, perplexity=(2.0, 2.0),
            needle=(1.0, 1.0), attended_share=0.5,
        )  # fmt: skip

    points = (point(8, 0.01), point(16, 0.05), point(32, 0.02), point(64, -0.1), point(64, 0.3, HybridGenMode.PRE))
    assert point(8, 0.01).mean_drop == pytest.approx(0.01)
    assert find_min_selected(points, max_drop=0.0200001) == 32
    assert find_min_selected(points, max_drop=0.1) == 8
    assert find_min_selected((point(8, 0.3),), max_drop=0.02) is None

"""`calibrate accuracy` on a tiny model: what is measured, what an interrupted run leaves, and who reads the file."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ambidex.cli.calibrate_accuracy import found_text
from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.policy import HybridGenMode
from ambidex.core.selection import SelectionSetting
from ambidex.engine.chosen_policy import choose_policy
from ambidex.engine.compose import build_engine
from ambidex.eval.accuracy import find_drop_error, run_accuracy
from ambidex.eval.accuracy_meter import AccuracyMeter, AccuracyPlan
from ambidex.eval.look_ahead import correlation, find_exact_layers, measure_look_ahead, recall, weight_distance
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
COUNTED = ["choice", "multikey", "variables", "counting"]
PARTS = ["look-ahead", *(f"{task}, 1 exact layers" for task in COUNTED), *COUNTED, "needle", "perplexity"]


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
    assert [next(first).name for _ in range(7)] == PARTS[:7]
    first.close()  # type: ignore[attr-defined]  # as Ctrl-C does
    assert not path.exists()
    again = list(run_accuracy(config, plan, lambda _name: path))
    assert [part.name for part in again] == PARTS
    assert [part.is_kept for part in again] == [True] * 7 + [False] * 4
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
    (trial,) = profile.trials
    assert (trial.exact_layers, trial.num_selected, profile.exact_layers) == (1, 64, 1), "what is set is kept"
    assert trial.tasks == profile.points[1].tasks, "measured once"
    assert trial.drop_error is None, "one round does not tell"
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


NUM_DEEP_LAYERS = 6


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of equal layers that change their input little: each early query finds the right keys."""
    folder = make_folder(tmp_path_factory.mktemp("deep"))
    tensors = load_file(folder / "model.safetensors")
    first = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.0.")}
    for name, tensor in first.items():
        damped = 0.02 * tensor if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor
        for layer_idx in range(NUM_DEEP_LAYERS):
            tensors[name.replace(".0.", f".{layer_idx}.")] = damped.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": NUM_DEEP_LAYERS}))
    return folder


def test_more_exact_layers_are_tried_until_tasks_lose_little(
    deep_folder: Path, tmp_path: Path, plan: AccuracyPlan
) -> None:
    """The trials are made up, in the file that an interrupted run leaves; what follows from them is measured."""
    config, plan, path = make_config(deep_folder), replace(plan, max_drop=0.5), tmp_path / "accuracy.json"
    first: Iterator[Any] = run_accuracy(config, plan, lambda _name: path)
    begun = [next(first).name for _ in range(2)]
    assert begun == ["look-ahead", "choice, 1 exact layers"], "all early queries are good: one is tried first"
    first.close()  # type: ignore[attr-defined]  # as Ctrl-C does
    partial = path.with_name("accuracy.json.partial")
    state = json.loads(partial.read_text())
    for num, drop in ((1, 1.0), (3, 0.25), (2, 0.75)):
        value = {"got": [[1 - drop, 1 - drop]], "exact": [1.0, 1.0], "keys": [[num, 10]]}
        state["parts"] |= {f"{task}, {num} exact layers": {"value": value, "seconds": 0.0} for task in COUNTED}
    partial.write_text(json.dumps(state))
    plan_two = replace(plan, rounds=2)
    assert not any(part.is_kept for part in islice(run_accuracy(config, plan_two, lambda _name: path), 1)), "other plan"
    partial.write_text(json.dumps(state))

    parts = list(run_accuracy(config, plan, lambda _name: path))
    trials = [f"{task}, {num} exact layers" for num in (1, 3, 2) for task in COUNTED]
    assert [part.name for part in parts] == ["look-ahead", *trials, *COUNTED, "needle", "perplexity"]
    assert [part.is_kept for part in parts] == [True] * 13 + [False] * 6
    profile = json.loads(path.read_text())
    found = [(trial["exact_layers"], trial["mean_drop"]) for trial in profile["trials"]]
    assert found == [(1, 1), (2, 0.75), (3, 0.25)]
    assert [trial["attended_share"] for trial in profile["trials"]] == [0.1, 0.2, 0.3]
    assert profile["exact_layers"] == 3
    most = [point for point in profile["points"] if (point["num_selected"], point["mode"]) == (64, "post")]
    assert [point["mean_drop"] for point in most] == [0.25], "of the trial, which is not measured again"
    assert all(0.5 < point["attended_share"] < 0.7 for point in profile["points"]), "three of six layers are exact"


def test_no_number_of_exact_layers_that_does_leaves_the_first(
    deep_folder: Path, tmp_path: Path, plan: AccuracyPlan
) -> None:
    config, path = make_config(deep_folder), tmp_path / "accuracy.json"
    names = [part.name for part in run_accuracy(config, replace(plan, max_drop=-2.0), lambda _name: path)]
    assert [int(name.split()[1]) for name in names if name.startswith("choice, ")] == [1, 3, 4, 5], "by bisection"
    value = json.loads(path.read_text())
    assert (value["exact_layers"], value["min_selected_tokens"]) == (1, None)
    shares = [trial["attended_share"] for trial in value["trials"]]
    assert shares == sorted(set(shares)), "each trial had its own exact layers"
    path.write_text(json.dumps({**value, "max_drop": 0.0}))
    source = find_model(str(deep_folder))
    profile = read_accuracy_profile(
        path, model="tiny", fingerprint=fingerprint(source, read_spec(source)), num_layers=NUM_DEEP_LAYERS
    )
    assert "there is none" in found_text(profile)
    assert "64 keys and 1, 3, 4, 5 of 6 layers exact" in found_text(profile)


def test_more_exact_layers_than_layers_are_refused(folder: Path, tmp_path: Path, plan: AccuracyPlan) -> None:
    with pytest.raises(ConfigError, match=r"`exact_layers` is 99: the model has \d layers"):
        list(run_accuracy(make_config(folder, exact_layers=99), plan, lambda _name: tmp_path / "x.json"))


def test_known_scores_with_all_keys_are_not_measured_again(folder: Path, plan: AccuracyPlan) -> None:
    config = make_config(folder, exact_layers=1, hybridgen_feedback="full", min_selected_tokens=2)
    meter = AccuracyMeter(config, plan, None)
    settings = [SelectionSetting(num_selected=8), SelectionSetting(num_selected=64)]
    alone = meter.measure("multikey", settings)
    assert [len(values) for values in alone.got] == [1, 1]
    (few, all_few), (many, all_many) = alone.keys
    assert few < many < all_few == all_many
    known = meter.measure("multikey", settings, exact=[0.125])
    assert (known.got, known.exact) == (alone.got, [0.125])


def test_drop_error_is_that_of_paired_samples() -> None:
    """Both runs answer the same samples, so what all of them lose alike is no error."""
    steady = ([0.0, 0.5, 0.25], [0.5, 1.0, 0.75])
    varied = ([0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0])  # losses 1, 0, 1, 0: variance 1/3, of the mean 1/12
    assert find_drop_error({"a": steady}) == 0
    assert find_drop_error({"a": steady, "b": varied}) == pytest.approx((1 / 12) ** 0.5 / 2)
    assert find_drop_error({"a": steady, "b": ([1.0], [1.0])}) is None


def test_weight_distance_is_the_share_of_the_weight_elsewhere() -> None:
    true = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    assert weight_distance(true, true[:, :2]).tolist() == [0.0]
    # the far two get 3 each where the near two have 1 each: weights 3/8, 3/8, 1/8, 1/8 instead of 1/4
    torch.testing.assert_close(weight_distance(true, torch.full((1, 2), math.log(3.0))), torch.tensor([0.25]))
    apart = torch.tensor([[100.0, 0.0, 0.0]])
    torch.testing.assert_close(weight_distance(apart, torch.tensor([[0.0, 100.0]])), torch.tensor([1.0]))


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
        ({"version": 1}, "version 1, version 2 is read here: make one with `ambidex calibrate accuracy tiny"),
        ({"trials": [{"exact_layers": 1}]}, r"trials\[0\].*num_selected"),
        ({"exact_layers": "2"}, "exact_layers is '2'"),
        ({"min_selected_tokens": -1}, "min_selected_tokens is -1"),
        ({"look_ahead": [1]}, "look_ahead is"),
        ({"points": None}, "points is missing"),
        ({"max_drop": 2}, "max_drop is 2"),
    ],
)
def test_file_that_is_none_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    layer = {"input_cosine": 0.5, "correlation": 0.5, "recall": 0.5, "weight_distance": 0.5}
    value = {"version": 2, "model": "tiny", "fingerprint": "x", "date": "today", "settings": {}, "max_drop": 0.02,
             "look_ahead": [layer] * 2, "trials": [], "exact_layers": 1, "min_selected_tokens": 8,
             "points": []}  # fmt: skip
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
    assert layers[0] == LayerLookAhead(input_cosine=0.0, correlation=0.0, recall=0.0, weight_distance=0.0)
    assert all(-1 <= layer.correlation <= 1 and 0 < layer.recall <= 1 for layer in layers[1:])
    assert all(0 < layer.weight_distance < 1 for layer in layers[1:])
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
    layers = [LayerLookAhead(input_cosine=0.5, correlation=0.5, recall=value, weight_distance=0.5) for value in recalls]
    assert find_exact_layers(layers) == wanted


def test_least_number_of_keys_is_the_one_from_which_on_none_loses_more() -> None:
    def point(num: int, drop: float, mode: HybridGenMode = HybridGenMode.POST) -> AccuracyPoint:
        return AccuracyPoint(
            num_selected=num, mode=mode, tasks={"a": (0.5, 0.5), "b": (0.5, 0.5 + 2 * drop)}, drop_error=None,
            perplexity=(2.0, 2.0), needle=(1.0, 1.0), attended_share=0.5,
        )  # fmt: skip

    points = (point(8, 0.01), point(16, 0.05), point(32, 0.02), point(64, -0.1), point(64, 0.3, HybridGenMode.PRE))
    assert point(8, 0.01).mean_drop == pytest.approx(0.01)
    assert find_min_selected(points, max_drop=0.0200001) == 32
    assert find_min_selected(points, max_drop=0.1) == 8
    assert find_min_selected((point(8, 0.3),), max_drop=0.02) is None

"""Placement files and pinned words: what is written is read, and what is wrong is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from ambidex.core.errors import ConfigError
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.cost.workload import KVShares
from ambidex.solver.placement_file import parse_pins, parse_placement, placement_json, read_placement

HALF = WeightSplit(on_gpu=0.5, on_cpu=0.25, streamed=0.25)
ON_CPU = WeightSplit(on_gpu=0.0, on_cpu=1.0)
PLACEMENT = Placement(layers=(LayerPlacement(mlp=HALF),) * 3 + (LayerPlacement(attention=ON_CPU),), head=ON_CPU)


def test_a_placement_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    path.write_text(json.dumps(placement_json(PLACEMENT)))
    assert read_placement(path) == PLACEMENT


def test_what_is_left_out_lies_on_the_gpu() -> None:
    value = {"layers": [{"mlp": {"on_cpu": 1.0}}, {}]}
    assert parse_placement(value, where="it") == Placement(layers=(LayerPlacement(mlp=ON_CPU), LayerPlacement()))


def test_words_pin_parts_and_later_ones_hold() -> None:
    words = ["mlp.0-2=gpu:0.5,cpu:0.25,stream:0.25", "attention=gpu", "attention.0,3=cpu", "kv=gpu:0.25,cpu:0.75",
             "head=cpu"]  # fmt: skip
    pins = parse_pins(words, 4)
    assert pins.attention == {0: ON_CPU, 1: WeightSplit(), 2: WeightSplit(), 3: ON_CPU}
    assert pins.mlp == dict.fromkeys((0, 1, 2), HALF)
    assert (pins.head, pins.kv) == (ON_CPU, KVShares(on_gpu=0.25, on_cpu=0.75))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "is no JSON object"),
        ({"layers": {}}, "`layers` must be a list"),
        ({"layers": []}, "`layers` must be a list"),
        ({"layer": []}, "unknown keys .layer."),
        ({"layers": [{"norm": {}}]}, "layer 0 has unknown keys .norm."),
        ({"layers": [{"mlp": 1}]}, "mlp of layer 0 is no JSON object with on_gpu, on_cpu, streamed"),
        ({"layers": [{"mlp": {"on_gpu": 0.5}}]}, r"mlp of layer 0: .*add up to 0\.5"),
        ({"layers": [{"mlp": {"on_gpu": "all"}}]}, "`on_gpu` is 'all'"),
        ({"layers": [{}], "head": {"on_gpu": True}}, "head: `on_gpu` is 'True'"),
    ],
)
def test_what_is_no_placement_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_placement(value, where="placement.json")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("mlp", "no PART=WHERE"),
        ("norm=gpu", "no PART=WHERE"),
        ("head.1=gpu", "no PART=WHERE"),
        ("mlp.4=gpu", "layers 4 are named, the model has the layers 0 to 3"),
        ("mlp.2-1=gpu", "layers 2-1"),
        ("mlp.1--2=gpu", "no range"),
        ("mlp=tpu", "no LANE:SHARE"),
        ("mlp=tpu:1", "no LANE:SHARE"),
        ("mlp=gpu:x", "no LANE:SHARE"),
        ("mlp=gpu:nan,cpu:1", "no LANE:SHARE"),
        ("mlp=gpu:0.5,gpu:0.5", "no LANE:SHARE"),
        ("mlp=gpu:0.5,cpu:0.1", "add up to 0.6"),
        ("kv=gpu:0.5", "fractions that add up to 1"),
    ],
)
def test_a_word_that_is_no_pin_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_pins([word], 4)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.json cannot be read"):
        read_placement(tmp_path / "gone.json")
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(ConfigError, match=r"p\.json is not valid JSON"):
        read_placement(tmp_path / "p.json")

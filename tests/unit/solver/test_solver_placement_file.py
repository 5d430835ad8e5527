"""Placement files and pinned words: what is written is read, and what is wrong is named."""

import json
from pathlib import Path
from typing import Any

import pytest

from ambidex.core.errors import ConfigError
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.cost.workload import KVShares
from ambidex.solver.placement_file import join_pins, parse_pins, parse_words, placement_json, read_pins, whole_placement

HALF = WeightSplit(on_gpu=0.5, on_cpu=0.25, streamed=0.25)
ON_CPU = WeightSplit(on_gpu=0.0, on_cpu=1.0)
PLACEMENT = Placement(layers=(LayerPlacement(mlp=HALF),) * 3 + (LayerPlacement(attention=ON_CPU),), head=ON_CPU)
KV = KVShares(on_gpu=0.25, on_cpu=0.75)


def test_a_placement_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    path.write_text(json.dumps(placement_json(PLACEMENT, KV)))
    assert whole_placement(read_pins(path, 4), 4, where="it") == (PLACEMENT, KV)


def test_equal_layers_stand_together() -> None:
    written = placement_json(PLACEMENT, KV)
    assert [entry["layers"] for entry in written["layers"]] == ["0-2", "3"]
    assert written["layers"][0] == {
        "layers": "0-2", "attention": "gpu", "mlp": {"gpu": 0.5, "cpu": 0.25, "stream": 0.25},
    }  # fmt: skip


def test_words_say_the_same_as_a_file() -> None:
    words = ["mlp.0-2=gpu:0.5,cpu:0.25,stream:0.25", "attention=gpu", "attention.3=cpu", "mlp.3=gpu", "head=cpu",
             "kv=gpu:0.25,cpu:0.75"]  # fmt: skip
    assert whole_placement(parse_words(words, 4), 4, where="words") == (PLACEMENT, KV)


def test_later_pins_hold() -> None:
    joined = join_pins(parse_words(["mlp=gpu", "head=gpu"], 2), parse_words(["mlp.1=cpu"], 2))
    assert (joined.mlp, joined.head, joined.kv) == ({0: WeightSplit(), 1: ON_CPU}, WeightSplit(), None)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "is no JSON object"),
        ({"version": 2}, "version 1 is read here"),
        ({"version": 1, "layer": []}, "unknown keys .layer."),
        ({"version": 1, "layers": {}}, "`layers` is no list"),
        ({"version": 1, "layers": [{"layers": "0-9", "mlp": "gpu"}]}, "layers 0-9 are named, .* layers 0 to 3"),
        ({"version": 1, "layers": [{"layers": "2-1"}]}, "layers 2-1"),
        ({"version": 1, "layers": [{"layers": 1}]}, "no number and no range"),
        (
            {"version": 1, "layers": [{"layers": "1", "mlp": "gpu"}, {"layers": "0-1", "mlp": "cpu"}]},
            "layer 1 is there",
        ),
        ({"version": 1, "head": {"gpu": 0.5}}, r"head: .*add up to 0\.5"),
        ({"version": 1, "head": {"tpu": 1}}, "unknown keys .tpu."),
        ({"version": 1, "head": "disk"}, "which is no JSON object"),
        ({"version": 1, "kv": {"gpu": "all"}}, "share of gpu is 'all'"),
        ({"version": 1, "kv": {"gpu": 2}}, "fractions that add up to 1"),
    ],
)
def test_what_is_no_placement_is_refused(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_pins(value, 4, where="placement.json")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("mlp", "no PART=WHERE"),
        ("norm=gpu", "no PART=WHERE"),
        ("head.1=gpu", "no PART=WHERE"),
        ("mlp.4=gpu", "layers 4 are named"),
        ("mlp=tpu", "no LANE:SHARE"),
        ("mlp=gpu:x", "no LANE:SHARE"),
        ("mlp=gpu:nan,cpu:1", "no LANE:SHARE"),
        ("mlp=gpu:0.5,gpu:0.5", "no LANE:SHARE"),
        ("mlp=gpu:0.5,cpu:0.1", "add up to 0.6"),
        ("mlp=tpu:1", "unknown keys .tpu."),
    ],
)
def test_a_word_that_is_no_pin_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_words([word], 4)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.json cannot be read"):
        read_pins(tmp_path / "gone.json", 4)
    (tmp_path / "p.json").write_text("{")
    with pytest.raises(ConfigError, match=r"p\.json is not valid JSON"):
        read_pins(tmp_path / "p.json", 4)


def test_a_part_of_a_placement_is_no_whole_one() -> None:
    with pytest.raises(ConfigError, match="does not say where mlp of layer 0 lies"):
        whole_placement(parse_words(["attention=gpu", "head=gpu"], 2), 2, where="it")
    with pytest.raises(ConfigError, match="does not say where the head lies"):
        whole_placement(parse_words(["attention=gpu", "mlp=gpu"], 2), 2, where="it")

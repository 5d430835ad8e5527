"""Profiles: curves between their points, files that can be read back, other hardware refused."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ambidex.core.errors import ConfigError
from ambidex.hw.presets import CPUS, GPUS, LINKS, make_profile
from ambidex.hw.profile import Curve, Machine, NeuronRates, NodeRates, Products
from ambidex.hw.profile_file import default_path, has_profile, parse_profile, profile_json, read_profile, write_json

SHEETS = make_profile("rtx4090", "ddr5-2ch", "pcie4x16")
COSTS = NeuronRates(**{name: Curve(((1, place * 1e-11), (4, place * 2e-11)))
                       for place, name in enumerate(NeuronRates.__dataclass_fields__, 1)})  # fmt: skip
PROFILE = dataclasses.replace(
    SHEETS,
    cpu=dataclasses.replace(SHEETS.cpu, tiles_from={"Q4_0": 8, "Q4_K": None}, neurons={"bf16": COSTS}),
    machine=Machine(cpu="Some CPU", cores=8, gpu="Some GPU"),
    date="now",
    nodes=(
        NodeRates(node_id=0, is_memory_only=False, read_bytes_per_s=2e10, latency_s=9e-8, to_gpu_bytes_per_s=2.5e10),
        NodeRates(node_id=1, is_memory_only=True, read_bytes_per_s=1e10, latency_s=None, to_gpu_bytes_per_s=None),
    ),
)


def test_a_curve_meets_its_points_and_runs_between_them() -> None:
    curve = Curve(((1, 10.0), (4, 40.0), (16, 40.0)))
    assert [curve.at(n) for n in (1, 4, 16)] == [10.0, 40.0, 40.0]
    assert curve.at(2) == pytest.approx(20.0)
    assert curve.at(0.5) == 10.0
    assert curve.at(99) == 40.0


@pytest.mark.parametrize("points", [(), ((4, 1.0), (1, 1.0)), ((1, 1.0), (1, 2.0)), ((0, 1.0),), ((1, 0.0),)])
def test_a_curve_that_is_none_is_refused(points: tuple[tuple[int, float], ...]) -> None:
    with pytest.raises(ConfigError, match=r"ascending|above 0"):
        Curve(points)


def test_products_beyond_the_last_count_are_limited_by_operations() -> None:
    products = Products({"bf16": Curve(((1, 100.0), (8, 80.0)))})
    assert products.bytes_per_s("bf16", 16) == 40.0
    assert products.flops_per_s("bf16") == 2 * 8 * 80.0 / 2
    with pytest.raises(ConfigError, match="no rate for products of Q4_0"):
        products.bytes_per_s("Q4_0", 1)


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "there" / "profile.json"
    write_json(path, profile_json(PROFILE))
    assert read_profile(path) == PROFILE
    assert [child.name for child in path.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tiles_from": {"Q4_0": 0}}, "`tiles_from` of Q4_0 is '0': it must be from 1 on, or null"),
        ({"tiles_from": {"Q4_0": "many"}}, "`tiles_from` of Q4_0 is 'many'"),
        ({"tiles_from": None}, "`tiles_from` is 'None': it must be of type dict"),
        ({"neurons": {"bf16": {}}}, "`neurons` of bf16: `bags` is 'None': it must be of type list"),
        ({"neurons": {"bf16": {name: [[1, -1.0]] for name in NeuronRates.__dataclass_fields__}}}, "above 0"),
        ({"neurons": {"bf16": 3}}, "`neurons` of bf16 is not a JSON object"),
    ],
)
def test_crossovers_that_are_none_are_refused(change: dict[str, Any], said: str) -> None:
    value = json.loads(json.dumps(profile_json(PROFILE)))
    value["cpu"] |= change
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_profile(value, where="it")


def test_an_older_profile_which_knows_no_crossovers_is_refused_with_what_to_do() -> None:
    value = json.loads(json.dumps(profile_json(PROFILE))) | {"version": 2}
    del value["cpu"]["tiles_from"], value["cpu"]["neurons"]
    with pytest.raises(ConfigError, match="it has version 2, version 3 is read here: measure this machine again"):
        parse_profile(value, where="it")


def test_a_profile_without_nodes_is_read_as_one_that_has_none() -> None:
    value = profile_json(PROFILE)
    del value["nodes"]
    assert parse_profile(json.loads(json.dumps(value)), where="it") == dataclasses.replace(PROFILE, nodes=())


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ({}, "`nodes` is '{}': it must be a list"),
        ([3], "`nodes` 0 is not a JSON object"),
        ([{"node_id": 0}], "`nodes` 0: `is_memory_only` is 'None': it must be true or false"),
        ([{"node_id": 0, "is_memory_only": True, "read_bytes_per_s": -1}], "must be above 0"),
        (
            [{"node_id": 0, "is_memory_only": True, "read_bytes_per_s": 1, "latency_s": 0, "to_gpu_bytes_per_s": None}],
            "`latency_s` is 0.0: it must be above 0",
        ),
    ],
)
def test_nodes_that_are_none_are_refused(nodes: object, said: str) -> None:
    value = {**json.loads(json.dumps(profile_json(PROFILE))), "nodes": nodes}
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_profile(value, where="it")


def _without(*keys: str) -> dict[str, Any]:
    value = json.loads(json.dumps(profile_json(PROFILE)))
    *above, last = keys
    part = value
    for key in above:
        part = part[key]
    del part[last]
    return value


@pytest.mark.parametrize(
    "keys", [("version",), ("cpu",), ("cpu", "step_s"), ("gpu", "products"), ("link",), ("machine", "cores"), ("date",)]
)
def test_a_file_without_a_value_names_it(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=rf"{keys[-1]}.*ambidex calibrate"):
        parse_profile(_without(*keys), where="profile.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "has version 1, version 3 is read here"),
        ({"more": 1}, "unknown keys .more."),
        ({"date": 7}, "`date` is '7': it must be of type str"),
        ({"cpu": {**profile_json(PROFILE)["cpu"], "step_s": -1.0}}, "`step_s` is -1.0: it must be above 0"),
        ({"cpu": {**profile_json(PROFILE)["cpu"], "products": {"Q9": [[1, 2.0]]}}}, "Q9"),
        ({"cpu": {**profile_json(PROFILE)["cpu"], "products": {"bf16": [[2, 2.0], [1, 1.0]]}}}, "ascending"),
        ({"cpu": {**profile_json(PROFILE)["cpu"], "read_bytes_per_s": [[1, "fast"]]}}, "no list of .count, rate"),
        ({"gpu": None}, "not of both"),
    ],
)
def test_a_wrong_file_is_refused_with_the_way_out(change: dict[str, Any], message: str) -> None:
    value = json.loads(json.dumps({**profile_json(PROFILE), **change}))
    with pytest.raises(ConfigError, match=message):
        parse_profile(value, where="profile.json")


def test_no_file_and_no_json_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ambidex calibrate"):
        read_profile(tmp_path / "profile.json")
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / "profile.json").write_text(text)
        with pytest.raises(ConfigError, match="ambidex calibrate"):
            read_profile(tmp_path / "profile.json")


def test_other_hardware_is_refused_by_what_differs() -> None:
    PROFILE.check_machine(Machine(cpu="Some CPU", cores=8, gpu="Some GPU"))
    with pytest.raises(ConfigError, match=r"cores 8 there, 4 here; gpu Some GPU there, none here.*ambidex calibrate"):
        PROFILE.check_machine(Machine(cpu="Some CPU", cores=4, gpu=None))
    make_profile("h200", "ddr5-8ch", "pcie5x16").check_machine(Machine(cpu="?", cores=1, gpu=None))


def test_the_file_lies_in_the_users_cache() -> None:
    assert default_path({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/ambidex/profile.json")
    assert default_path({"HOME": "/home-of-someone"}) == Path("/home-of-someone/.cache/ambidex/profile.json")


def test_presets_are_all_profiles() -> None:
    for gpu in GPUS:
        for cpu in CPUS:
            for link in LINKS:
                profile = make_profile(gpu, cpu, link)
                assert parse_profile(json.loads(json.dumps(profile_json(profile))), where="p") == profile
    with pytest.raises(ConfigError, match=r"--gpu 'gtx1' is unknown: there are .*rtx4090"):
        make_profile("gtx1", "ddr5-2ch", "pcie4x16")


def test_a_folder_that_may_not_be_entered_has_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine started for a user who may not look into its home folder."""

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.stat", refuse)
    assert not has_profile({"HOME": "/root"})


def test_a_user_without_a_home_has_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert not has_profile({})


def test_curves_of_neurons_are_of_the_same_numbers_of_tokens() -> None:
    """What was known of one number of tokens was looked up in a curve that had others."""
    with pytest.raises(ConfigError, match="must be of the same numbers of tokens"):
        dataclasses.replace(COSTS, union=Curve(((1, 1e-11),)))

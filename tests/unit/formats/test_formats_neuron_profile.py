"""`NeuronProfile`: what is written is read, thresholds lie between the measured ones, and other files are refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ambidex.core.errors import ConfigError
from ambidex.core.model_spec import ModelSpec
from ambidex.core.sparsity import MLPSparsity, SparsityKind
from ambidex.formats.hf_config import spec_from_hf
from ambidex.formats.locate import find_model
from ambidex.formats.neuron_profile import (
    SHARES,
    NeuronProfile,
    default_neuron_path,
    fingerprint,
    read_neuron_profile,
)
from small_checkpoints import CONFIG


def spec() -> ModelSpec:
    return spec_from_hf(CONFIG)


def make_profile(**changes: Any) -> NeuronProfile:
    shape = (spec().num_layers, spec().intermediate_size)
    sizes = np.tile(np.array(SHARES, dtype=np.float32), (shape[0], 1))
    profile = NeuronProfile(
        model="abc", num_tokens=7, activity=np.full(shape, 0.25, np.float32), gate_sizes=sizes, input_sizes=2 * sizes
    )
    return dataclasses.replace(profile, **changes)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a" / "p.npz"
    make_profile().write(path)
    read = read_neuron_profile(path, spec(), model="abc")
    assert (read.num_tokens, read.active_share) == (7, 0.25)
    assert np.array_equal(read.gate_sizes, make_profile().gate_sizes)
    assert np.array_equal(read.input_sizes, make_profile().input_sizes)
    assert [item.name for item in path.parent.iterdir()] == ["p.npz"]


def test_thresholds_are_those_of_the_kind_at_the_share() -> None:
    cats = make_profile().masks(MLPSparsity(kind=SparsityKind.CATS, share=0.42))
    teal = make_profile().masks(MLPSparsity(kind=SparsityKind.TEAL, share=0.42))
    assert [mask.threshold for mask in cats] == pytest.approx([0.42] * spec().num_layers)
    assert [mask.threshold for mask in teal] == pytest.approx([0.84] * spec().num_layers)
    without = make_profile(gate_sizes=np.zeros((spec().num_layers, 0), np.float32))
    with pytest.raises(ConfigError, match="has no thresholds for cats"):
        without.masks(MLPSparsity(kind=SparsityKind.CATS, share=0.42))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "abd"}, "belongs to another model"),
        ({"activity": np.zeros((1, 3), np.float32)}, r"is of 1 x 3 neurons, the model has \d+ layers of \d+"),
        ({"activity": np.full((spec().num_layers, spec().intermediate_size), np.nan)}, "`activity` that are no sizes"),
    ],
)
def test_a_profile_that_is_not_the_models_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_profile(**changes).write(tmp_path / "p.npz")
    with pytest.raises(ConfigError, match=message):
        read_neuron_profile(tmp_path / "p.npz", spec(), model="abc")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 not a zip", b"{}"])
def test_a_file_that_is_no_profile_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is no neuron profile"):
        read_neuron_profile(path, spec(), model="abc")
    np.savez(path, version=1)
    with pytest.raises(ConfigError, match="is no neuron profile"):
        read_neuron_profile(path, spec(), model="abc")
    np.savez(path, version=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ConfigError, match="is no neuron profile"):
        read_neuron_profile(path, spec(), model="abc")


def test_a_fingerprint_tells_weights_apart(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weights = tmp_path / "model.safetensors"
    seen = set()
    for content in (b"one", b"two", b"three"):
        weights.write_bytes(content)
        seen.add(fingerprint(find_model(str(tmp_path)), spec()))
    assert len(seen) == 3
    assert fingerprint(find_model(str(tmp_path)), spec()) in seen


def test_the_default_path_is_in_the_users_cache() -> None:
    assert default_neuron_path({"XDG_CACHE_HOME": "/c"}, "abc") == Path("/c/ambidex/neurons/abc.npz")
    assert default_neuron_path({"HOME": "/h", "XDG_CACHE_HOME": "c"}, "abc") == Path(
        "/h/.cache/ambidex/neurons/abc.npz"
    )

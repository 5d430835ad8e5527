"""Trained predictors in an engine: one that is always right changes no token, one that is always wrong changes all that
the CPU computes; recall says which it is."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ambidex import EngineConfig, SamplingParams
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.errors import ConfigError, ModelFileError
from ambidex.core.ids import Tier
from ambidex.core.sparsity import NeuronFigures
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.models.site_plans import RingSizes
from tiny_engine import make_engine_folder
from tiny_models import NUM_LAYERS

DEVICES = [DeviceKind.CPU, pytest.param(DeviceKind.CUDA, marks=pytest.mark.gpu)]


def write_predictor(folder: Path, sign: float) -> Path:
    """One whose scores are the gate's own products, with a sign: w · x = relu(w · x) − relu(−w · x)."""
    weights = load_file(folder / "model.safetensors")
    tensors = {}
    for layer in range(NUM_LAYERS):
        gate = weights[f"model.layers.{layer}.mlp.gate_proj.weight"].float()
        eye = torch.eye(len(gate))
        tensors[f"blk.{layer}.fc1.weight"] = torch.cat([gate, -gate])
        tensors[f"blk.{layer}.fc2.weight"] = sign * torch.cat([eye, -eye], dim=1)
    path = folder.parent / f"predictor{sign:+.0f}.safetensors"  # inside, it would be a shard of the model
    save_file(tensors, path)
    return path


def make_engine(folder: Path, *, device: DeviceKind = DeviceKind.CPU, **settings: Any) -> Engine:
    own = {"weights_gpu_memory": "100KB", "block_size": 16, "num_threads": 1, **settings}
    config = EngineConfig(model=str(folder), device=device, dtype=DTypeChoice.FP32, **own)
    return build_engine(config, weight_ring=RingSizes(chunk_bytes=9000, num_slots=2))


def answer(engine: Engine) -> list[tuple[int, ...]]:
    params = SamplingParams(max_output_tokens=10, temperature=0.0, ignore_eos=True)
    ids, last = [engine.add(list(range(3, 3 + length)), params) for length in (1, 9, 30)], {}
    while engine.has_work:
        last |= {output.request_id: output for output in engine.step()}
    return [tuple(last[request_id].token_ids) for request_id in ids]


def figures_of(engine: Engine) -> NeuronFigures:
    figures = engine.stats.neurons
    assert figures is not None
    return figures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_engine_folder(tmp_path, "llama_relu")


@pytest.mark.parametrize("device", DEVICES)
def test_a_predictor_that_is_always_right_changes_no_token(folder: Path, device: DeviceKind) -> None:
    wanted = answer(make_engine(folder, device=device))
    engine = make_engine(folder, device=device, mlp_sparsity="relu", mlp_predictor=str(write_predictor(folder, 1.0)))
    assert answer(engine) == wanted
    figures = figures_of(engine)
    assert figures.num_checked > 0
    assert figures.recall > 0.999  # but for roundings about 0
    assert 0.3 < figures.active_share < 0.7


def test_a_predictor_that_is_always_wrong_finds_nothing(folder: Path) -> None:
    wanted = answer(make_engine(folder))
    engine = make_engine(folder, mlp_sparsity="relu", mlp_predictor=str(write_predictor(folder, -1.0)))
    assert answer(engine) != wanted
    figures = figures_of(engine)
    assert figures.recall < 0.001
    assert figures.num_active == 0


def test_the_report_and_the_ledger_know_it(folder: Path) -> None:
    path = write_predictor(folder, 1.0)
    plain = make_engine(folder, mlp_sparsity="relu")
    engine = make_engine(folder, mlp_sparsity="relu", mlp_predictor=str(path))
    value = engine.report.value("compute", "mlp_sparsity")
    assert "changes answers" in value
    assert f"which rows in front of it are computed says {path.name}" in value
    assert "relu, exact" in plain.report.value("compute", "mlp_sparsity")
    held = {entry.owner: entry.num_bytes for entry in engine.figures.ledger.entries(Tier.DRAM)}
    assert held["screens"] > 0
    assert "screens" not in {entry.owner for entry in plain.figures.ledger.entries(Tier.DRAM)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "`mlp_predictor` is for `mlp_sparsity` relu, which is off"),
        ({"mlp_sparsity": "relu-screened"}, "and so does `mlp_sparsity` relu-screened: use relu"),
        ({"mlp_sparsity": "relu", "neuron_cache": "dynamic"}, "change places, which `mlp_predictor` does not follow"),
        (
            {"mlp_sparsity": "relu", "session_dir": "sessions", "prefix_cache_percent": 50},
            "keeps what other engines use, too",
        ),
    ],
)
def test_what_cannot_go_together_is_refused(
    settings: dict[str, Any], message: str, folder: Path, tmp_path: Path
) -> None:
    if "session_dir" in settings:
        settings = {**settings, "session_dir": str(tmp_path / "sessions")}
    with pytest.raises(ConfigError, match=message):
        make_engine(folder, mlp_predictor=str(write_predictor(folder, 1.0)), **settings)


def test_the_predictor_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    save_file({f"blk.{layer}.fc{place}.weight": torch.ones(8, 8) for layer in range(2) for place in (1, 2)}, path)
    with pytest.raises(ModelFileError, match="is it another model's"):
        make_engine(folder, mlp_sparsity="relu", mlp_predictor=str(path))

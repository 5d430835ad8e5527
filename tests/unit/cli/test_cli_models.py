import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ambidex.cli.main import AmbidexCommand
from ambidex.cli.services import Services
from ambidex.formats.hf_config import KNOWN_ARCHITECTURES

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 10, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": True,
}  # fmt: skip


def run_models(cache: Path, *args: str) -> Result:
    """List models with this folder as the Hub's cache."""
    return CliRunner().invoke(AmbidexCommand(), ["models", *args], obj=Services(hub_cache=cache))


def add_to_cache(cache: Path, repo_id: str, files: dict[str, str]) -> Path:
    """Lay a repository into a Hub cache as the Hub does; returns its snapshot."""
    repo = cache / f"models--{repo_id.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0" * 40)
    (repo / "blobs").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    snapshot.mkdir(parents=True)
    for number, (name, text) in enumerate(files.items()):
        blob = repo / "blobs" / f"{number:040}"
        blob.write_text(text)
        (snapshot / name).symlink_to(blob)
    return snapshot


def find(result: Result, name: str) -> Any:
    """The entry of a model in the JSON output."""
    assert result.exit_code == 0, result.output
    return next(model for model in json.loads(result.stdout)["models"] if model["name"] == name)


def test_models_json_lists_architectures_and_formats(tmp_path: Path) -> None:
    result = json.loads(run_models(tmp_path, "--json").stdout)
    assert result["architectures"] == dict(KNOWN_ARCHITECTURES)
    assert "Q4_K" in result["formats"]["gguf"]


def test_models_lists_the_package_smollm2(tmp_path: Path) -> None:
    model = find(run_models(tmp_path, "--json"), "smollm2")
    assert (model["kind"], model["architecture"], model["problem"]) == ("gguf", "llama", None)
    assert model["num_bytes"] == Path(model["path"]).stat().st_size


def test_models_lists_a_hub_model_by_its_id_with_the_size_of_its_weights(tmp_path: Path) -> None:
    snapshot = add_to_cache(tmp_path, "org/tiny", {"config.json": json.dumps(LLAMA), "model.safetensors": "x" * 100})
    model = find(run_models(tmp_path, "--json"), "org/tiny")
    assert (model["kind"], model["architecture"], model["num_bytes"]) == ("safetensors", "llama", 100)
    assert (model["path"], model["problem"]) == (str(snapshot / "model.safetensors"), None)


def test_models_says_why_a_hub_model_does_not_run(tmp_path: Path) -> None:
    config = {**LLAMA, "architectures": ["MambaForCausalLM"]}
    add_to_cache(tmp_path, "org/mamba", {"config.json": json.dumps(config)})
    add_to_cache(tmp_path, "org/empty", {"config.json": json.dumps(LLAMA)})
    result = run_models(tmp_path, "--json")
    assert "MambaForCausalLM" in find(result, "org/mamba")["problem"]
    assert find(result, "org/empty")["problem"] == "no weights here (runs with --load-format dummy)"


def test_models_lists_a_gguf_file_of_the_hub_by_its_path(tmp_path: Path) -> None:
    snapshot = add_to_cache(tmp_path, "org/gguf", {"broken.gguf": "GGUF"})
    path = str(snapshot / "broken.gguf")
    assert path in find(run_models(tmp_path, "--json"), path)["problem"]


@pytest.mark.parametrize("cache", ["empty", "missing"])
def test_models_without_a_hub_cache_shows_tables(tmp_path: Path, cache: str) -> None:
    (tmp_path / "empty").mkdir()
    result = run_models(tmp_path / cache)
    assert result.exit_code == 0
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["llama", "LlamaForCausalLM", "yes"] in rows
    assert [row[:3] for row in rows if row[:1] == ["smollm2"]] == [["smollm2", "gguf", "llama"]]

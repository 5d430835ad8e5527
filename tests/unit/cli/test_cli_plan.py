"""`ambidex plan`: from a config.json alone to a placement, its speed and what binds; mistakes are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from ambidex.cli.main import AmbidexCommand
from ambidex.cli.services import Services
from ambidex.core.dtypes import GPU_WEIGHT_KINDS
from ambidex.hw.presets import make_profile
from ambidex.hw.profile import Machine
from ambidex.hw.profile_file import profile_json
from ambidex.models.quantized import find_kept
from ambidex.models.registry import build_model
from ambidex.models.site_plans import measure_weights
from quantized_files import make_file

META = torch.device("meta")

LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "float16",
}  # fmt: skip
HERE = Machine(cpu="Some CPU", cores=8, gpu="Some GPU")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of which there is a config.json and nothing else."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_70B))
    return tmp_path / "model"


def run_plan(folder: Path, *args: str, machine: Machine = HERE, env: dict[str, str] | None = None) -> Result:
    services = Services(describe_machine=lambda: machine)
    return CliRunner().invoke(AmbidexCommand(), ["plan", str(folder), *args], obj=services, env=env)


def plan_of(folder: Path, *args: str) -> dict[str, Any]:
    result = run_plan(folder, *args, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_large_model_is_planned_from_its_config_alone(folder: Path) -> None:
    found = plan_of(folder, "--weights", "Q4_0", "--gpu", "rtx4090")
    assert found["weights_bytes"] == pytest.approx(38.8e9, rel=0.01)
    memory = found["memory"]
    assert sum(memory["gpu"].values()) <= memory["gpu_budget"]
    assert sum(memory["gpu"].values()) + sum(memory["dram"].values()) >= found["weights_bytes"]
    assert found["decode"]["tokens_per_s"] == pytest.approx(1 / found["decode"]["step_s"])
    assert found["decode"]["step_s"] == max(found["decode"][name] for name in ("path_s", "link_s", "dram_s"))
    assert found["placement"]["layers"][-1]["layers"].endswith("79")
    assert 0 < found["one_more_gib_saves_s"] < found["decode"]["step_s"]


def test_tables_say_what_the_json_says(folder: Path) -> None:
    args = ("--weights", "Q4_0", "--gpu", "rtx3090", "--batch", "8", "--context", "8K", "--explain")
    found, shown = plan_of(folder, *args), run_plan(folder, *args).stdout
    assert f"{found['decode']['tokens_per_s']:.1f} tokens/s" in shown
    assert f"decode waits for          {found['decode']['binds']}" in shown
    assert "8 x 8192 tokens in the cache" in shown
    assert f"--kv-gpu-tokens {found['kv_gpu_tokens']}" in shown
    for name in ("layer split", "all streamed", "weights first", "kv first", "half half"):
        assert name in shown
    assert "does not fit" in shown


def test_more_memory_and_a_faster_link_are_never_slower(folder: Path) -> None:
    steps = [plan_of(folder, "--gpu", "rtx3090", "--gpu-memory", size)["decode"]["step_s"] for size in ("12GB", "20GB")]
    links = [
        plan_of(folder, "--gpu", "rtx3090", "--link", link)["decode"]["step_s"] for link in ("pcie3x16", "pcie4x16")
    ]
    assert steps[0] > steps[1]
    assert links[0] > links[1]


def test_pins_and_placement_files_are_obeyed(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "placement.json"
    first = run_plan(folder, "--gpu", "rtx4090", "--pin", "mlp.0-3=cpu", "--output", str(path))
    assert first.exit_code == 0, first.output
    placement = json.loads(path.read_text())
    assert (placement["layers"][0]["layers"], placement["layers"][0]["mlp"]) == ("0-3", "cpu")
    again = plan_of(folder, "--gpu", "rtx4090", "--placement", str(path))
    assert again["placement"] == placement


def test_a_quantised_file_is_planned_with_the_bytes_that_the_loader_takes(tmp_path: Path) -> None:
    plans = {}
    for kind in ("Q4_0", "Q8_0", "Q4_K"):
        path = tmp_path / f"{kind}.gguf"
        spec = make_file(path, {"token_embd": "F16"}, kind)
        pins = [word for pin in ("mlp=gpu:0.5,cpu:0.5", "attention=gpu", "head=gpu") for word in ("--pin", pin)]
        found = plans[kind] = plan_of(path, "--gpu", "rtx4090", *pins, "--context", "256")
        model = build_model(spec, device=META, dtype=torch.float16, activation_dtype=torch.float16)
        kinds = {name: kind for name, kind in find_kept(spec).items() if kind in GPU_WEIGHT_KINDS}
        taken = measure_weights(model, 2, kinds=kinds)
        assert found["weights_bytes"] == taken.total
        assert found["matrices_bytes"] == {kind if kinds else "fp16": taken.total - taken.whole}
        in_dram, on_gpu = found["memory"]["dram"], found["memory"]["gpu"]
        assert in_dram["weights, multiplied there"] == pytest.approx(sum(taken.mlp) / 2, rel=0.03)
        assert on_gpu["weights"] == pytest.approx(sum((sum(taken.mlp) / 2, *taken.attention, taken.head)), rel=0.03)
    read = {kind: found["decode"]["terms_s"]["GPU: MLP's weights"] for kind, found in plans.items()}
    assert read["Q8_0"] == pytest.approx(read["Q4_0"] * 34 / 18)
    assert read["Q4_K"] == pytest.approx(read["Q4_0"] * 64 / 18)
    shown = run_plan(tmp_path / "Q4_K.gguf", "--gpu", "rtx4090", "--context", "256").stdout
    assert "of fp16 in memory; Q4_K of the files dequantised" in shown


def test_a_format_without_a_product_on_a_gpu_is_counted_as_what_loading_makes_of_it(folder: Path) -> None:
    result = run_plan(folder, "--weights", "Q4_K", "--gpu", "h200")
    assert "a GPU has no product of Q4_K matrices" in result.stderr
    assert "of fp16 in memory" in result.stdout
    assert plan_of(folder, "--weights", "Q4_K", "--gpu", "none")["matrices_bytes"].keys() == {"Q4_K"}


def test_neurons_that_are_left_out_make_a_step_shorter(folder: Path, tmp_path: Path) -> None:
    machine = ("--gpu", "rtx3060-12g", "--gpu-memory", "8G")
    dense, sparse = (plan_of(folder, *machine, *words) for words in ((), ("--mlp-sparsity", "cats:0.5")))
    assert dense["decode"]["cpu_reads_of_mlps"] is None
    assert sparse["decode"]["cpu_reads_of_mlps"] == pytest.approx(2 / 3)
    assert sparse["decode"]["step_s"] < 0.9 * dense["decode"]["step_s"]
    tables = run_plan(folder, *machine, "--mlp-sparsity", "cats:0.5").stdout
    assert "the CPU reads 67 % of its part of MLPs" in tables
    for words, message in (
        (("--mlp-sparsity", "relu"), "needs a ReLU"),
        (("--neuron-profile", str(tmp_path / "n.npz")), "is for --mlp-sparsity"),
        (("--mlp-sparsity", "cats", "--neuron-profile", str(tmp_path / "n.npz")), "there is no neuron profile"),
    ):
        result = run_plan(folder, *machine, *words)
        assert (result.exit_code, message in result.stderr) == (2, True), result.stderr


def test_without_a_gpu_all_lies_in_dram(folder: Path) -> None:
    found = plan_of(folder, "--gpu", "none", "--cpu", "ddr5-8ch", "--weights", "Q4_0")
    assert found["machine"]["gpu"] is None
    assert found["decode"]["binds"] == "CPU"
    assert found["decode"]["step_s"] > found["weights_bytes"] / 307.2e9


def test_this_machines_profile_is_used_and_anothers_is_refused(folder: Path, tmp_path: Path) -> None:
    profile = profile_json(make_profile("rtx4090", "ddr5-2ch", "pcie4x16"))
    profile["machine"] = {"cpu": HERE.cpu, "cores": HERE.cores, "gpu": HERE.gpu}
    path = tmp_path / "ambidex" / "profile.json"
    path.parent.mkdir()
    path.write_text(json.dumps(profile))
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    assert run_plan(folder, "--weights", "Q4_0", "--dram-memory", "64GB", env=env).exit_code == 0
    other = run_plan(folder, env=env, machine=Machine(cpu="Some CPU", cores=4, gpu=None))
    assert other.exit_code == 2
    assert "measured on other hardware (cores 8 there, 4 here; gpu Some GPU there, none here)" in other.stderr
    assert "ambidex calibrate" in other.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "there is no profile of this machine"),
        (["--gpu", "gtx1"], "gtx1"),
        (["--link", "pcie4x16"], "--link is given without --gpu"),
        (["--gpu", "rtx4090", "--profile", "p.json"], "both name a machine"),
        (["--gpu", "none", "--gpu-memory", "8GB"], "there is no GPU"),
        (["--gpu", "rtx4090", "--context", "1M"], "longer than the model was made for, 131072 tokens"),
        (["--gpu", "rtx4090", "--context", "0"], "no number of at least 1"),
        (["--gpu", "rtx4090", "--pin", "mlp.80=gpu"], "the model has the layers 0 to 79"),
        (["--gpu", "rtx4090", "--placement", "gone.json"], "gone.json cannot be read"),
        (["--gpu", "rtx4090", "--dram-memory", "16GB"], "--dram-memory 14.9 GiB is"),
        (["--gpu", "rtx4090", "--gpu-memory", "512MiB"], "too small for what is not divided"),
        (["--gpu", "rtx4090", "--pin", "mlp=gpu"], "too small with what is pinned"),
    ],
)
def test_mistakes_are_named_in_one_line(folder: Path, tmp_path: Path, args: list[str], message: str) -> None:
    result = run_plan(folder, *args, env={"XDG_CACHE_HOME": str(tmp_path)})
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1

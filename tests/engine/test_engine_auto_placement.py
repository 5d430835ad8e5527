"""`placement` auto: what the solver found is what the engine does, with the same answers; predicted beside measured.

The machine's rates are a preset's, since the accelerator of these tests is the CPU.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ambidex import EngineConfig, SamplingParams
from ambidex.core.errors import ConfigError
from ambidex.core.ids import Tier
from ambidex.core.policy import LANE_PRESETS, PolicyName
from ambidex.core.units import MIB
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec
from ambidex.hw.presets import make_profile
from ambidex.models.registry import build_model
from ambidex.models.site_plans import RingSizes
from tiny_engine import add_tokenizer
from tiny_models import VOCAB_SIZE

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WEIGHTS = 4 * 4 * (256 * 64 * (4 + 2 * 2 + 4) + 3 * 256 * 1024)  # bytes of the layers' matrices
PROFILE = make_profile("rtx3060-12g", "ddr4-2ch", "pcie3x16")
RING = RingSizes(chunk_bytes=64 * 1024, num_slots=2)
SETTINGS: dict[str, Any] = {
    "dtype": "fp32", "max_tokens_per_step": 32, "max_running_requests": 2,
    "max_context_len": 128, "block_size": 16,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("auto")
    (path / "config.json").write_text(json.dumps(SHAPE))
    add_tokenizer(path)
    model = build_model(read_spec(find_model(str(path))), device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5
               for name, p in model.named_parameters()}  # fmt: skip
    save_file(tensors, path / "model.safetensors")
    return path


def make_engine(folder: Path, **settings: Any) -> Engine:
    return build_engine(EngineConfig(model=str(folder), **{**SETTINGS, **settings}), weight_ring=RING, profile=PROFILE)


def answer(engine: Engine) -> tuple[int, ...]:
    engine.add("Once upon a time", SamplingParams(max_output_tokens=8, temperature=0.0, ignore_eos=True))
    outputs = [output for _ in range(40) if engine.has_work for output in engine.step()]
    return tuple(outputs[-1].token_ids)


def test_weights_lie_where_the_solver_says_and_answers_are_the_same(folder: Path) -> None:
    whole = make_engine(folder)
    fixed = whole.figures.ledger
    taken = sum(e.num_bytes for e in fixed.entries(Tier.GPU) if e.owner not in ("weights", "kv"))
    engine = make_engine(folder, placement="auto", gpu_memory=taken + 2 * MIB + WEIGHTS // 2)
    held = {e.owner: e.num_bytes for e in engine.figures.ledger.entries(Tier.GPU)}
    in_dram = {e.owner: e.num_bytes for e in engine.figures.ledger.entries(Tier.DRAM)}
    assert held["weights"] < 0.75 * WEIGHTS
    assert in_dram["weights"] > 0.3 * WEIGHTS
    assert engine.figures.ledger.used(Tier.GPU) <= taken + 2 * MIB + WEIGHTS // 2
    assert answer(engine) == answer(whole)


def test_the_report_has_the_plan_and_steps_are_compared_with_it(folder: Path) -> None:
    engine = make_engine(folder, placement="auto")
    rows = {row.name: row for row in engine.report.facts if row.section == "plan"}
    assert set(rows) == {"workload", "step", "lanes", "keys", "gpu", "dram", "rates"}
    assert rows["workload"].value == "2 x 64 tokens"
    assert "data sheets" in rows["rates"].value
    assert engine.compare_decode() is None
    answer(engine)
    compared = engine.compare_decode()
    assert compared is not None
    predicted, measured = compared
    assert 0 < predicted < 1
    assert measured == engine.stats.decode_seconds / engine.stats.num_decode_steps
    assert engine.stats.num_decode_steps == 7


def test_weights_that_fit_stay_whole(folder: Path) -> None:
    engine = make_engine(folder, placement="auto")
    assert "weights" not in {entry.owner for entry in engine.figures.ledger.entries(Tier.DRAM)}
    assert make_engine(folder).compare_decode() is None


@pytest.mark.parametrize("name", LANE_PRESETS)
def test_the_rule_of_a_policy_places_weights_and_chooses_the_batch(folder: Path, name: PolicyName) -> None:
    whole = make_engine(folder, max_running_requests=64)
    taken = sum(e.num_bytes for e in whole.figures.ledger.entries(Tier.GPU) if e.owner not in ("weights", "kv"))
    engine = make_engine(
        folder, policy=name, placement="auto", max_running_requests=64,
        gpu_memory=taken + 2 * MIB + WEIGHTS // 2, dram_memory=2 * WEIGHTS,
    )  # fmt: skip
    plan = {row.name: row for row in engine.report.facts if row.section == "plan"}
    placed = engine.report.value("compute", "weights_placed")
    assert "over the link" in placed
    assert "multiplied by the CPU" not in placed
    assert f"chosen by {name}'s rule for" in engine.report.why("compute", "weights_placed")
    assert "as the rule has chosen" in plan["workload"].why
    batch = int(plan["workload"].value.split()[0])
    assert 1 <= batch < 64, "the budgets hold fewer requests than are allowed"
    assert engine.core.scheduler._max_running_requests == batch
    assert answer(engine) == answer(whole)


def test_a_budget_below_what_cannot_be_divided_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="too small for what is not divided"):
        make_engine(folder, placement="auto", gpu_memory=64 * 1024)


def test_without_a_profile_of_this_machine_auto_says_how_to_make_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = EngineConfig(model=str(folder), **SETTINGS, placement="auto")
    with pytest.raises(ConfigError, match="ambidex calibrate"):
        build_engine(config)
    assert dataclasses.replace(config, placement=None).placement is None

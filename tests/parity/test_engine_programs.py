"""Decode steps that are replayed as native programs give the tokens of the ordinary path."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ambidex import EngineConfig
from ambidex.core.config import DeviceKind, DTypeChoice, Graphs
from ambidex.core.ids import Lane
from ambidex.engine.compose import build_engine
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.decode import DecodeForm
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import call_model
from parity.test_engine_decode_steps import greedy, run
from tiny_engine import make_engine_folder
from tiny_models import VARIANTS

SPLITS: dict[str, dict[str, object]] = {
    "one tier": {"kv_gpu_tokens": 1024},
    "no GPU tier": {"kv_gpu_tokens": 0},
    "both tiers": {"kv_gpu_tokens": 400, "num_sink_tokens": 4, "recent_window": 8},
    "requests yield": {"kv_gpu_tokens": 104, "dram_memory": 0, "max_context_len": 100},
}


def make_config(folder: Path, **settings: object) -> EngineConfig:
    defaults: dict[str, object] = {"device": DeviceKind.CPU, "dtype": DTypeChoice.FP32, "block_size": 16}
    return EngineConfig(model=str(folder), **(defaults | settings))  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_of_programs_equal_the_ordinary_path(variant: str, tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, variant)
    for split in SPLITS.values():
        ordinary = build_engine(make_config(folder, graphs=Graphs.OFF, **split))
        wanted = run(ordinary, greedy())
        engine = build_engine(make_config(folder, **split))
        assert run(engine, greedy()) == wanted, split
        assert engine.stats.num_graph_failures == 0
        assert engine.stats.num_replayed_steps > engine.stats.num_steps / 4, split
        assert engine.stats.lane_bytes[Lane.CPU] == ordinary.stats.lane_bytes[Lane.CPU], split
        assert engine.stats.lane_bytes[Lane.GPU] == ordinary.stats.lane_bytes[Lane.GPU], split


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16", "int8", "int4", "k=int8,v=int4", "k=int4,v=int8"])
@pytest.mark.parametrize("dtype", [DTypeChoice.FP32, DTypeChoice.BF16, DTypeChoice.FP16])
def test_programs_store_and_read_each_format(dtype: DTypeChoice, kv_dtype: str, tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    settings = {"dtype": dtype, "kv_dtype": kv_dtype, **SPLITS["both tiers"]}
    wanted = run(build_engine(make_config(folder, graphs=Graphs.OFF, **settings)), greedy())
    engine = build_engine(make_config(folder, **settings))
    assert run(engine, greedy()) == wanted
    assert engine.stats.num_replayed_steps > engine.stats.num_steps / 4


def test_the_start_report_says_how_decode_steps_run(tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "llama")

    def find(**settings: object) -> tuple[str, str]:
        report = build_engine(make_config(folder, **settings)).report
        return next((row.value, row.why) for row in report.facts if row.name == "decode")

    assert find() == ("program", "decode steps are replayed as native programs")
    assert find(graphs=Graphs.OFF) == ("ordinary", "graphs are off")
    value, why = find(block_size=8)
    assert value == "ordinary"
    assert "16" in why


def test_a_step_that_cannot_be_recorded_takes_the_ordinary_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, one count, and the same tokens."""
    folder = make_engine_folder(tmp_path, "llama")

    def forward(model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        return torch.atan(torch.tan(call_model(model, batch, attention) * 1e-3)) * 1e3

    wanted = run(build_engine(make_config(folder, graphs=Graphs.OFF), forward=forward), greedy())
    engine = build_engine(make_config(folder), forward=forward)
    with caplog.at_level(logging.WARNING):
        assert run(engine, greedy()) == wanted
    assert engine.stats.num_graph_failures == 1
    assert engine.stats.num_replayed_steps == 0
    assert [r.message for r in caplog.records if "recorded" in r.message and "tan" in r.message] != []
    assert sum("recorded" in record.message for record in caplog.records) == 1


def test_programs_are_the_default_form_on_a_cpu(tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "qwen3")
    engine = build_engine(make_config(folder), decode_form=DecodeForm.PROGRAM)
    run(engine, greedy())
    assert engine.stats.num_replayed_steps > 0

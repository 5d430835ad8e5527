"""Weights over tiers, as a user sets them: the ledger, the report, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_engine_memory import FREE, SPEC

from ambidex import EngineConfig
from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import KVSpec
from ambidex.core.placement import LayerPlacement, Placement, WeightSizes, WeightSplit
from ambidex.core.units import MIB
from ambidex.cost.workload import KVShares
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.engine.memory import WeightBytes, fixed_bytes, plan_memory
from ambidex.engine.weights_plan import chunk_bytes_for, fill_placement
from ambidex.models.site_plans import RingSizes
from ambidex.solver.placement_file import placement_json
from tiny_engine import make_engine_folder

SIZES = WeightSizes(whole=10, attention=(20, 20), mlp=(50, 50), head=10)
RING = RingSizes(chunk_bytes=9000, num_slots=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("weights"), "llama")


def make_engine(folder: Path, **settings: Any) -> Engine:
    return build_engine(EngineConfig(model=str(folder), **settings), weight_ring=RING)


def held(engine: Engine, tier: Tier) -> dict[str, int]:
    return {entry.owner: entry.num_bytes for entry in engine.figures.ledger.entries(tier)}


def test_weights_beyond_their_memory_lie_in_dram_and_stand_in_the_ledger(folder: Path) -> None:
    whole = held(make_engine(folder), Tier.GPU)["weights"]
    limit = whole * 2 // 3
    engine = make_engine(folder, weights_gpu_memory=limit)
    gpu, dram = held(engine, Tier.GPU), held(engine, Tier.DRAM)
    assert 0.7 * limit < gpu["weights"] + gpu["weight ring"] <= limit
    assert whole <= gpu["weights"] + dram["weights"] < 1.02 * whole
    row = next(row for row in engine.report.facts if row.name == "weights_placed")
    assert "on the GPU" in row.value
    assert "multiplied by the CPU" in row.value
    assert row.why == "asked for"


def test_weights_that_fit_their_memory_are_not_divided(folder: Path) -> None:
    engine = make_engine(folder, weights_gpu_memory="1GiB")
    assert "weights" not in held(engine, Tier.DRAM)
    assert not [row for row in engine.report.facts if row.name == "weights_placed"]


def test_memory_for_weights_that_holds_not_even_what_is_whole_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"`weights_gpu_memory` 1000 B .* is too small: .* take \d"):
        make_engine(folder, weights_gpu_memory=1000)


def test_placement_and_memory_for_weights_exclude_each_other(folder: Path) -> None:
    with pytest.raises(ConfigError, match="both say where weights lie"):
        EngineConfig(model=str(folder), weights_gpu_memory=1, placement="x.json")


def test_dram_that_holds_no_weights_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"`dram_memory` 1\.0 KiB is too small: weights take"):
        make_engine(folder, weights_gpu_memory=200_000, dram_memory=1024)


def test_a_policy_that_looks_ahead_refuses_divided_attention(folder: Path, tmp_path: Path) -> None:
    half = WeightSplit(on_gpu=0.5, on_cpu=0.5)
    for layer, is_refused in ((LayerPlacement(attention=half), True), (LayerPlacement(mlp=half), False)):
        path = write(tmp_path, placement_json(Placement(layers=(layer,) * 2), KVShares()))
        if is_refused:
            with pytest.raises(ConfigError, match="infinigen computes queries a layer ahead"):
                make_engine(folder, placement=path, policy="infinigen")
        else:
            make_engine(folder, placement=path, policy="infinigen")


def write(folder: Path, content: object) -> str:
    path = folder / "placement.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_a_placement_file_is_obeyed(folder: Path, tmp_path: Path) -> None:
    half = WeightSplit(on_gpu=0.5, on_cpu=0.5)
    placement = Placement(layers=(LayerPlacement(mlp=half), LayerPlacement()))
    path = write(tmp_path, placement_json(placement, KVShares()))
    gpu, dram = (held(make_engine(folder, placement=path), tier)["weights"] for tier in (Tier.GPU, Tier.DRAM))
    assert dram == 48 * (2 * 96 + 96) * 4  # of 80 neurons 32 lie on the accelerator
    assert gpu > 7 * dram


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"version": 1, "layers": [], "head": "gpu"}, "does not say where attention of layer 0 lies"),
        ({"version": 1, "layers": [{"layers": "0-2", "mlp": "gpu"}]}, "the model has the layers 0 to 1"),
        ({"version": 1, "tail": {}}, r"unknown keys \(tail\)"),
    ],
)
def test_a_placement_for_another_model_or_of_another_form_is_refused(
    content: object, message: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(folder, placement=write(tmp_path, content))


def test_a_placement_that_is_not_there_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        make_engine(folder, placement=str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("gpu_bytes", "head", "attention", "mlp"),
    [(0, 0, 0, 0), (5, 0.5, 0, 0), (30, 1, 0.5, 0), (75, 1, 1, 0.25), (150, 1, 1, 1), (999, 1, 1, 1)],
)
def test_what_fits_goes_to_head_then_attention_then_mlp(
    gpu_bytes: int, head: float, attention: float, mlp: float
) -> None:
    placement = fill_placement(SIZES, gpu_bytes, streamed_share=0.4)
    layer = placement.layers[1]
    assert (placement.head.on_gpu, layer.attention.on_gpu, layer.mlp.on_gpu) == pytest.approx((head, attention, mlp))
    for split in placement.splits():
        assert split.streamed == pytest.approx(0.4 * (1 - split.on_gpu))


def test_chunks_take_a_share_of_the_budget_at_most() -> None:
    assert chunk_bytes_for(10**12) == 64 * MIB
    assert chunk_bytes_for(400 * MIB) == 5 * MIB


def test_weights_in_dram_leave_less_of_its_budget_for_kv() -> None:
    kv = KVSpec.of(SPEC, dtype=DType.BF16, block_size=16)
    config = EngineConfig(model="any", gpu_memory=80 * MIB, dram_memory=8 * MIB + 7 * 4096, max_context_len=512)
    for in_dram, most in ((0, 8 * MIB), (8 * MIB, 7 * 4096)):
        memory = plan_memory(
            config, SPEC, {Tier.GPU: kv, Tier.DRAM: kv}, free=FREE,
            weights=WeightBytes(on_gpu=MIB, in_dram=in_dram, ring=MIB),
            fixed=fixed_bytes(config, SPEC, activations=DType.BF16),
        )  # fmt: skip
        taken = {entry.owner: entry.num_bytes for entry in memory.ledger.entries(Tier.DRAM)}
        assert taken.get("weights", 0) == in_dram
        assert most - kv.bytes_per_block < taken["kv"] <= most

"""Where K and V of host memory lie changes no token: all in DRAM, V in the CXL tier, K spilled there, interleaved."""

from pathlib import Path
from typing import Any, Final

import pytest

from ambidex import EngineConfig, SamplingParams
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.ids import Tier
from ambidex.core.units import MIB
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from fault_runs import run, tokens
from tiny_engine import make_engine_folder

PROMPTS: Final = ("a prompt that is longer than what stays near, " * 2, "another one", "x" * 100)
GREEDY: Final = SamplingParams(max_output_tokens=20, temperature=0.0, ignore_eos=True)
SPLIT: Final[dict[str, Any]] = {
    "block_size": 16, "kv_gpu_tokens": 96, "num_sink_tokens": 16, "recent_window": 16, "max_tokens_per_step": 64,
    "num_threads": 1, "dtype": DTypeChoice.FP32,
}  # fmt: skip
EMULATED: Final[dict[str, Any]] = {"cxl_memory": MIB, "emulate_cxl": "100ns,20GB/s"}
MAPPINGS: Final[dict[str, dict[str, Any]]] = {
    "v in cxl": EMULATED,
    "v of some layers in cxl": {**EMULATED, "cxl_memory": 140_000},
    "k spilled": {**EMULATED, "dram_memory": 40_000},
    "interleaved": {**EMULATED, "kv_mapping": "interleave"},
}
POLICIES: Final[dict[str, dict[str, Any]]] = {
    "exact": {}, "hybridgen": {"policy": "hybridgen"}, "bounded": {"policy": "bounded", "bounded_scores": "exact"},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("cxl"))


def make_engine(folder: Path, **settings: Any) -> Engine:
    return build_engine(EngineConfig(model=str(folder), **{**SPLIT, **settings}))


def answers(engine: Engine) -> list[tuple[int, ...]]:
    return tokens(run(engine, PROMPTS, GREEDY))


def mapped(policy: str, mapping: str) -> dict[str, Any]:
    """Settings of a mapping, with room for what a policy keeps besides."""
    settings = dict(MAPPINGS[mapping])
    if policy == "hybridgen" and "dram_memory" in settings:
        settings["dram_memory"] *= 2  # it keeps K as rows there, too
    return settings


def check_budgets(engine: Engine) -> None:
    """No tier held more than its budget, by the ledger and by what requests held at most."""
    ledger = engine.figures.ledger
    for tier, size in engine.stats.peak_kv_bytes.items():
        held = sum(entry.num_bytes for entry in ledger.entries(tier) if entry.owner == "kv")
        assert size <= held <= ledger.budget(tier)


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_are_those_of_all_in_dram(folder: Path, policy: str, mapping: str) -> None:
    engine = make_engine(folder, **POLICIES[policy], **mapped(policy, mapping))
    assert answers(engine) == answers(make_engine(folder, **POLICIES[policy]))
    assert engine.stats.peak_kv_bytes[Tier.CXL] > 0
    check_budgets(engine)


def test_report_says_that_the_tier_is_emulated(folder: Path) -> None:
    report = make_engine(folder, **EMULATED).report
    assert report.value("kv", "cxl_tier") == "emulated (100 ns, 20 GB/s)"
    assert report.value("kv", "mapping") == "k-dram-v-cxl"
    assert report.value("memory cxl", "budget") == "1.0 MiB"


def test_v_of_first_layers_stays_in_dram_where_the_tier_is_small(folder: Path) -> None:
    engine = make_engine(folder, **MAPPINGS["v of some layers in cxl"], dram_memory=MIB)
    assert "layers in DRAM" in engine.report.why("kv", "mapping")
    assert answers(engine) == answers(make_engine(folder))
    check_budgets(engine)


def test_spilled_blocks_move_to_the_cxl_tier_while_requests_run(folder: Path) -> None:
    plain, spilled = make_engine(folder), make_engine(folder, **MAPPINGS["k spilled"])
    assert answers(plain) == answers(spilled)
    assert spilled.figures.num_blocks[Tier.CXL] > 0
    assert spilled.stats.num_moves > plain.stats.num_moves


def test_spilled_blocks_with_checksums(folder: Path) -> None:
    engine = make_engine(folder, **MAPPINGS["k spilled"], verify=True)
    assert answers(engine) == answers(make_engine(folder))
    assert engine.stats.num_verified_blocks > 0
    assert engine.stats.num_corrupt_blocks == 0


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "k=int8,v=int4"])
def test_integer_keys_keep_their_scales_in_dram(folder: Path, kv_dtype: str) -> None:
    engine = make_engine(folder, **EMULATED, kv_dtype=kv_dtype)
    assert answers(engine) == answers(make_engine(folder, kv_dtype=kv_dtype, graphs="off"))
    check_budgets(engine)


def test_prefix_cache_over_spilled_blocks(folder: Path, tmp_path: Path) -> None:
    settings = {**MAPPINGS["k spilled"], "prefix_cache_percent": 100, "session_dir": str(tmp_path / "kept")}
    engine = make_engine(folder, **settings)
    wanted = answers(make_engine(folder, prefix_cache_percent=100))
    assert answers(engine) == wanted
    assert answers(engine) == wanted
    assert engine.stats.num_cached_tokens > 0


@pytest.mark.gpu
@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize("policy", ["exact", "hybridgen"])
def test_tokens_on_a_gpu_are_those_of_all_in_dram(folder: Path, policy: str, mapping: str) -> None:
    engine = make_engine(folder, policy=policy, device=DeviceKind.CUDA, **mapped(policy, mapping))
    assert answers(engine) == answers(make_engine(folder, policy=policy, device=DeviceKind.CUDA))

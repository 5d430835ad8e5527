"""Divided weights that stay as a GGUF file stores them give the tokens of the undivided run."""

import json
from pathlib import Path
from typing import Any

import pytest

from ambidex import EngineConfig, SamplingParams
from ambidex.core.config import DeviceKind, Graphs
from ambidex.core.ids import Tier
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.core.units import MIB
from ambidex.cost.workload import KVShares
from ambidex.engine import auto_placement
from ambidex.engine.compose import build_engine, weight_choices
from ambidex.engine.engine import Engine
from ambidex.hw.presets import make_profile
from ambidex.hw.profile import HardwareProfile
from ambidex.models.site_plans import RingSizes
from ambidex.solver.placement_file import placement_json

pytestmark = pytest.mark.timeout(1800)

PARAMS = SamplingParams(max_output_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = ("The capital of France is", "One, two, three, four,")


def make_engine(placement: str | None, profile: HardwareProfile | None = None, **settings: object) -> Engine:
    config = EngineConfig(model="smollm2", max_context_len=128, placement=placement, **settings)  # type: ignore[arg-type]
    return build_engine(config, weight_ring=RingSizes(chunk_bytes=2**19), profile=profile)


def answers(engine: Engine) -> list[tuple[int, ...]]:
    ids, found = [engine.add(prompt, PARAMS) for prompt in PROMPTS], {}
    while engine.has_work:
        found |= {output.request_id: output for output in engine.step()}
    return [found[request_id].token_ids for request_id in ids]


def write(folder: Path, split: WeightSplit) -> str:
    placement = Placement(layers=(LayerPlacement(attention=split, mlp=split),) * 30)
    path = folder / "placement.json"
    path.write_text(json.dumps(placement_json(placement, KVShares())))
    return str(path)


def held(engine: Engine) -> int:
    return sum(
        entry.num_bytes
        for tier in (Tier.GPU, Tier.DRAM)
        for entry in engine.figures.ledger.entries(tier)
        if entry.owner == "weights"
    )


@pytest.mark.parametrize("graphs", list(Graphs))
def test_greedy_tokens_of_divided_smollm2_as_stored_equal_the_undivided_run(graphs: Graphs, tmp_path: Path) -> None:
    whole = make_engine(None, graphs=graphs)
    engine = make_engine(write(tmp_path, WeightSplit(on_gpu=0.4, on_cpu=0.3, streamed=0.3)), graphs=graphs)
    assert answers(engine) == answers(whole)
    assert engine.stats.num_graph_failures == 0
    assert held(whole) <= held(engine) < 1.05 * held(whole)
    assert "as stored" in engine.report.value("compute", "weights")


def test_auto_counts_the_bytes_that_are_taken_and_answers_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver's figures, within the three percent that predictions of memory may be off."""
    solved = []

    def solve(*args: Any, **words: Any) -> auto_placement.AutoPlacement:
        solved.append(auto_placement.solve_weights(*args, **words))
        return solved[-1]

    monkeypatch.setattr(weight_choices, "solve_weights", solve)
    whole = make_engine(None, max_running_requests=2)
    fixed = sum(e.num_bytes for e in whole.figures.ledger.entries(Tier.GPU) if e.owner not in ("weights", "kv"))
    engine = make_engine(
        "auto",
        gpu_memory=fixed + 60 * MIB,
        max_running_requests=2,
        profile=make_profile("rtx3060-12g", "ddr4-2ch", "pcie3x16"),
    )
    (plan,) = solved
    use = plan.solution.memory
    held = {tier: {e.owner: e.num_bytes for e in engine.figures.ledger.entries(tier)} for tier in (Tier.GPU, Tier.DRAM)}
    assert held[Tier.GPU]["weights"] == pytest.approx(use.gpu["weights"] + plan.weights.other_bytes, rel=0.03)
    in_dram = use.dram["weights, multiplied there"] + use.dram["weights, streamed"]
    assert held[Tier.DRAM]["weights"] == pytest.approx(in_dram, rel=0.03)
    assert in_dram > 20 * MIB
    assert held[Tier.GPU]["weight ring"] <= use.gpu["buffers of weights on their way"] * 1.03
    assert answers(engine) == answers(whole)


def test_a_dtype_that_is_asked_for_divides_dequantised_weights(tmp_path: Path) -> None:
    path = write(tmp_path, WeightSplit(on_gpu=0.5, streamed=0.5))
    engine = make_engine(path, dtype="fp16", graphs=Graphs.OFF)
    assert held(engine) > 2 * held(make_engine(None))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", list(Graphs))
def test_greedy_tokens_of_divided_smollm2_on_a_gpu_equal_those_of_all_on_the_gpu(
    graphs: Graphs, tmp_path: Path
) -> None:
    """Both as stored: the same numbers, multiplied by several lanes or by one."""
    whole = make_engine(write(tmp_path, WeightSplit()), device=DeviceKind.CUDA, graphs=graphs)
    wanted = answers(whole)
    assert held(whole) < 1.5 * held(make_engine(None, device=DeviceKind.CPU)), "weights are not as stored"
    for split in (WeightSplit(on_gpu=0.4, on_cpu=0.3, streamed=0.3), WeightSplit(on_gpu=0.0, streamed=1.0)):
        got = answers(make_engine(write(tmp_path, split), device=DeviceKind.CUDA, graphs=graphs))
        assert [tokens[:5] for tokens in got] == [tokens[:5] for tokens in wanted]  # later ones may differ in 16 bits

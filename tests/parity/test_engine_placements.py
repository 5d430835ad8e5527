"""Greedy tokens do not depend on where the weights lie: any placement gives the tokens of the undivided run."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ambidex import EngineConfig, SamplingParams
from ambidex.core.config import DeviceKind, DTypeChoice, Graphs, LoadFormat
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.cost.workload import KVShares
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.mlp.host_lane import HostSide
from ambidex.mlp.rates import LaneRates
from ambidex.mlp.split_site import Level
from ambidex.models.site_plans import RingSizes
from ambidex.runner.decode import DecodeForm
from ambidex.solver.placement_file import placement_json
from tiny_engine import make_engine_folder
from tiny_models import ALIBI_VARIANTS, NUM_LAYERS, VARIANTS, VOCAB_SIZE

FAMILIES: Final = ("llama", "llama_biased", "mistral", "qwen2", "qwen3", "opt", "opt_350m", "falcon_7b", "falcon_40b")
UNTIED: Final = ("llama", "llama_biased", "mistral", "qwen2", "qwen3")
PARAMS: Final = SamplingParams(max_output_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS: Final = [[3 + (7 * place + length * place * place) % (VOCAB_SIZE - 3) for place in range(length)]
                  for length in (1, 5, 16, 33, 70)]  # fmt: skip
KV: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"kv_gpu_tokens": 64, "num_sink_tokens": 8, "recent_window": 16},
    {"kv_gpu_tokens": 0, "num_sink_tokens": 0},
)
LEVELS: Final = (
    [],
    [Level(most_tokens=3, cpu_share=1.0)],
    [Level(most_tokens=1, cpu_share=1.0), Level(most_tokens=2, cpu_share=0.7), Level(most_tokens=9, cpu_share=0.3)],
    [Level(most_tokens=10**6, cpu_share=1.0)],
)
"""What the CPU multiplies of its part, by tokens of a step."""
DEVICES: Final = [DeviceKind.CPU, pytest.param(DeviceKind.CUDA, marks=pytest.mark.gpu)]
WHOLE: Final = WeightSplit()
SPREAD: Final = WeightSplit(on_gpu=0.4, on_cpu=0.3, streamed=0.3)


@st.composite
def splits(draw: st.DrawFn) -> WeightSplit:
    """Often with an empty part: that is where a mistake would hide."""
    shares = draw(st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=3, max_size=3).filter(any))
    gpu, cpu, _ = (share / sum(shares) for share in shares)
    return WeightSplit(on_gpu=gpu, on_cpu=cpu, streamed=max(0.0, 1.0 - gpu - cpu))


@st.composite
def placements(draw: st.DrawFn, variant: str) -> Placement:
    layers = tuple(LayerPlacement(attention=draw(splits()), mlp=draw(splits())) for _ in range(NUM_LAYERS))
    return Placement(layers=layers, head=draw(splits()) if variant in UNTIED else WHOLE)


def answer(folder: Path, placement: Placement | None, *, device: DeviceKind, **settings: Any) -> list[tuple[int, ...]]:
    """Greedy tokens of all prompts, which are computed together."""
    return answers_of(make_engine(folder, placement, device=device, **settings))


def make_engine(folder: Path, placement: Placement | None, *, device: DeviceKind, **settings: Any) -> Engine:
    names = ("weight_ring", "cpu_levels", "decode_form", "dummy_kind")
    parts = {name: settings.pop(name) for name in names if name in settings}
    path = None
    if placement is not None:
        path = folder / "placement.json"
        path.write_text(json.dumps(placement_json(placement, KVShares())))
    config = EngineConfig(
        model=str(folder), device=device, dtype=DTypeChoice.FP32, num_threads=1, block_size=16,
        placement=None if path is None else str(path), **settings,
    )  # fmt: skip
    return build_engine(config, **parts)


def answers_of(engine: Engine) -> list[tuple[int, ...]]:
    ids, answers = [engine.add(prompt, PARAMS) for prompt in PROMPTS], {}
    while engine.has_work:
        answers |= {output.request_id: output for output in engine.step()}
    assert not [output.error for output in answers.values() if output.error]
    assert engine.stats.num_graph_failures == 0
    return [answers[request_id].token_ids for request_id in ids]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", FAMILIES)
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_greedy_tokens_under_any_placement_equal_the_undivided_run(
    variant: str, device: DeviceKind, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"placements_{variant}" / variant
    if not folder.is_dir():
        make_engine_folder(folder.parent, variant)
    wanted = answer(folder, None, device=device)
    assert len(set(wanted)) > 1, "the model answers every prompt alike: the test would prove nothing"
    got = answer(
        folder,
        data.draw(placements(variant)),
        device=device,
        max_tokens_per_step=data.draw(st.sampled_from([7, 48, 512])),
        graphs=data.draw(st.sampled_from([Graphs.AUTO, Graphs.OFF])),
        weight_ring=RingSizes(
            chunk_bytes=data.draw(st.sampled_from([1, 9000, 30000])), num_slots=data.draw(st.integers(1, 4))
        ),
        cpu_levels=data.draw(st.sampled_from(LEVELS)),
        decode_form=data.draw(st.sampled_from([None, DecodeForm.FIXED] if device is DeviceKind.CPU else [None])),
        **data.draw(st.sampled_from(KV)),
    )
    assert got == wanted


@pytest.mark.parametrize("variant", [*VARIANTS, *ALIBI_VARIANTS])
def test_greedy_tokens_of_every_model_with_weights_in_three_places_equal_the_undivided_run(
    variant: str, tmp_path: Path
) -> None:
    folder = make_engine_folder(tmp_path, variant)
    placement = Placement(layers=(LayerPlacement(attention=SPREAD, mlp=SPREAD),) * NUM_LAYERS)
    wanted = answer(folder, None, device=DeviceKind.CPU)
    ring = RingSizes(chunk_bytes=9000, num_slots=2)
    assert answer(folder, placement, device=DeviceKind.CPU, weight_ring=ring) == wanted


@pytest.mark.parametrize("kv", KV, ids=["kv on the accelerator", "kv on both tiers", "kv in dram"])
@pytest.mark.parametrize("variant", ["llama_biased", "opt", "falcon_7b"])
def test_greedy_tokens_of_fixed_steps_with_a_part_for_the_cpu_equal_the_undivided_run(
    variant: str, kv: dict[str, Any], tmp_path: Path
) -> None:
    """Every place has a part for the CPU, beside keys in DRAM of the same layers; that of large steps is smaller."""
    folder = make_engine_folder(tmp_path, variant)
    placement = Placement(layers=(LayerPlacement(attention=SPREAD, mlp=SPREAD),) * NUM_LAYERS)
    wanted = answer(folder, None, device=DeviceKind.CPU)
    for cpu_levels in LEVELS:
        got = answer(
            folder, placement, device=DeviceKind.CPU, decode_form=DecodeForm.FIXED, cpu_levels=cpu_levels,
            weight_ring=RingSizes(chunk_bytes=9000, num_slots=3), **kv,
        )  # fmt: skip
        assert got == wanted


@pytest.mark.parametrize("kind", [None, "Q4_0"])
def test_prompts_beyond_the_levels_are_multiplied_by_the_accelerator_alone(
    kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As levels are where they are measured: none for more tokens than that, nor where the CPU is no help."""
    rates = LaneRates(cpu={1: 90e9, 4: 60e9, 8: 40e9, 16: 1e9}, link=50e9, most_native_tokens=16)
    levels = rates.levels(on_cpu=50, streamed=50)
    assert [level.most_tokens for level in levels] == [1, 4, 8]
    multiplied: list[int] = []
    compute = HostSide.compute

    def note(side: HostSide, x: Tensor) -> Tensor:
        multiplied.append(len(x))
        return compute(side, x)

    monkeypatch.setattr(HostSide, "compute", note)
    folder = make_engine_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 256}))  # whole records
    split = WeightSplit(on_gpu=0.2, on_cpu=0.5, streamed=0.3)
    engine = make_engine(
        folder, Placement(layers=(LayerPlacement(attention=split, mlp=split),) * NUM_LAYERS, head=split),
        device=DeviceKind.CPU, load_format=LoadFormat.DUMMY, dummy_kind=kind, cpu_levels=levels,
        weight_ring=RingSizes(chunk_bytes=1), max_tokens_per_step=64,
    )  # fmt: skip
    for prompt in PROMPTS[-2:]:  # one chunk of 33 tokens; of 70, one of 64 and one that a level is for
        engine.add(prompt, PARAMS)
        engine.step()
        assert multiplied == [1] * len(multiplied), "but for the head, of which a row is wanted"
        multiplied.clear()
        while engine.has_work:
            engine.step()
        assert set(multiplied) - {1} <= {6}, "prompts of few tokens and steps of one"
        assert 1 in multiplied
        multiplied.clear()


PLACEMENTS: Final = {
    "streamed": WeightSplit(on_gpu=0.5, streamed=0.5),
    "cpu": WeightSplit(on_gpu=0.5, on_cpu=0.5),
    "three": SPREAD,
    "nothing on the gpu": WeightSplit(on_gpu=0.0, on_cpu=0.5, streamed=0.5),
}


CAPTURED_KV: Final[tuple[dict[str, Any], ...]] = ({}, {"kv_gpu_tokens": 400, "num_sink_tokens": 4, "recent_window": 8})
"""The newest block of each request lies on the GPU, else no step is captured."""


@pytest.mark.gpu
@pytest.mark.parametrize("kv", CAPTURED_KV, ids=["kv on the gpu", "kv on both tiers"])
@pytest.mark.parametrize("split", PLACEMENTS)
@pytest.mark.parametrize("variant", ["llama_biased", "opt", "falcon_7b", "qwen3"])
def test_greedy_tokens_of_captured_steps_under_a_placement_equal_the_undivided_run(
    variant: str, split: str, kv: dict[str, Any], tmp_path: Path
) -> None:
    """Copies are part of the graphs, the CPU answers between their nodes, and graphs are really replayed."""
    folder = make_engine_folder(tmp_path, variant)
    parts = PLACEMENTS[split]
    placement = Placement(layers=(LayerPlacement(attention=parts, mlp=parts),) * NUM_LAYERS)
    wanted = answer(folder, None, device=DeviceKind.CUDA)
    for cpu_levels in (None, *LEVELS):
        engine = make_engine(
            folder, placement, device=DeviceKind.CUDA, weight_ring=RingSizes(chunk_bytes=9000, num_slots=3),
            cpu_levels=cpu_levels, **kv,
        )  # fmt: skip
        assert answers_of(engine) == wanted
        assert engine.stats.num_replayed_steps > 3

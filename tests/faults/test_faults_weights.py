"""Weights that come late, memory that cannot be pinned, an accelerator that does not ask: no wrong answer, no hang."""

import json
import random
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ambidex import EngineConfig, SamplingParams
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.ids import Fallback
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.cost.workload import KVShares
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.mlp.handover import WeightHandover
from ambidex.mlp.split_site import Level
from ambidex.models.site_plans import RingSizes
from ambidex.runner.decode import DecodeForm
from ambidex.solver.placement_file import placement_json
from ambidex.storage.host_memory import HostMemory
from ambidex.storage.words import HostWords
from fault_runs import run
from late_streams import late_gpu_streams, late_streams
from tiny_engine import make_engine_folder

PROMPTS: Final = ("hello world, this is a prompt of some length", "x" * 60, "one", "y" * 33)
PARAMS: Final = SamplingParams(max_output_tokens=8, temperature=0.0, ignore_eos=True)
SPREAD: Final = WeightSplit(on_gpu=0.4, on_cpu=0.3, streamed=0.3)
RING: Final = RingSizes(chunk_bytes=9000, num_slots=3)
LEVELS: Final = (Level(most_tokens=4, cpu_share=1.0),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_engine_folder(tmp_path_factory.mktemp("late_weights"), "llama_biased")
    layer = LayerPlacement(attention=SPREAD, mlp=SPREAD)
    (path / "placement.json").write_text(json.dumps(placement_json(Placement(layers=(layer,) * 2), KVShares())))
    return path


def make_engine(folder: Path, device: DeviceKind = DeviceKind.CPU, *, is_divided: bool = True, **parts: Any) -> Engine:
    config = EngineConfig(
        model=str(folder), device=device, dtype=DTypeChoice.FP32, num_threads=1, block_size=16,
        kv_gpu_tokens=256, num_sink_tokens=16, recent_window=16, max_tokens_per_step=40,
        placement=str(folder / "placement.json") if is_divided else None,
    )  # fmt: skip
    return build_engine(config, weight_ring=RING, cpu_levels=LEVELS, **parts)


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    outputs = run(engine, PROMPTS, PARAMS)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [output.token_ids for output in outputs]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), form=st.sampled_from([DecodeForm.ORDINARY, DecodeForm.FIXED]))
def test_weights_that_come_late_change_no_answer(folder: Path, seed: int, form: DecodeForm) -> None:
    rng = random.Random(seed)
    answer, write_word = WeightHandover.answer, HostWords.write
    wanted = tokens(make_engine(folder, is_divided=False))

    def late_answer(handover: WeightHandover, place: int) -> None:
        torch.randn(rng.choice([1, 300, 600]), 300).norm()  # a while, and something else in the caches
        answer(handover, place)

    def late_write(words: HostWords, word: Tensor) -> None:
        torch.randn(rng.choice([1, 300]), 300).norm()
        write_word(words, word)

    with pytest.MonkeyPatch.context() as patch, late_streams(seed):
        patch.setattr(WeightHandover, "answer", late_answer)
        patch.setattr(HostWords, "write", late_write)
        assert tokens(make_engine(folder, decode_form=form)) == wanted


def test_weights_that_nobody_waits_for_would_be_noticed(folder: Path) -> None:
    wanted = tokens(make_engine(folder, is_divided=False))
    with late_streams(0, is_ordered=False):
        outputs = run(make_engine(folder), PROMPTS, PARAMS)
        assert [output.token_ids for output in outputs] != wanted


def test_a_cpu_that_does_not_answer_fails_the_step_and_the_engine_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = tokens(make_engine(folder, is_divided=False))
    engine = make_engine(folder, decode_form=DecodeForm.FIXED)
    answer = WeightHandover.answer

    def fail(handover: WeightHandover, place: int) -> None:
        if place == 3:
            raise MemoryError("the CPU has other worries")
        answer(handover, place)

    with monkeypatch.context() as patch:
        patch.setattr(WeightHandover, "answer", fail)
        with pytest.raises(MemoryError):
            run(engine, PROMPTS, PARAMS)
    assert tokens(make_engine(folder, decode_form=DecodeForm.FIXED)) == wanted


@pytest.mark.gpu
def test_weights_that_cannot_be_pinned_are_a_warning_and_a_counter(folder: Path) -> None:
    wanted = tokens(make_engine(folder, DeviceKind.CUDA, is_divided=False))
    engine = make_engine(folder, DeviceKind.CUDA, host_memory=HostMemory(pin=lambda _tensor, _owner: "no pins today"))
    assert engine.stats.fallbacks[Fallback.PAGEABLE_MEMORY] >= 1
    assert tokens(engine) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("form", [DecodeForm.ORDINARY, DecodeForm.CAPTURED])
def test_late_streams_of_a_gpu_change_no_answer(folder: Path, seed: int, form: DecodeForm) -> None:
    rng = random.Random(seed)
    wanted = tokens(make_engine(folder, DeviceKind.CUDA, is_divided=False, decode_form=form))
    with late_gpu_streams(rng, "weight_ring") as forward:
        engine = make_engine(folder, DeviceKind.CUDA, decode_form=form, forward=forward)
        assert tokens(engine) == wanted
    assert engine.stats.num_graph_failures == 0

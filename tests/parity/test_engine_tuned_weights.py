"""Weights that change places while an engine answers: the same tokens within the same memory, whatever fails."""

import json
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ambidex import EngineConfig, SamplingParams
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.errors import ConfigError, CopyError
from ambidex.core.ids import Lane, Tier
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.core.step import StepResult
from ambidex.core.units import MIB
from ambidex.cost.fit import LaneTerms
from ambidex.cost.units import Coefficients
from ambidex.cost.workload import KVShares
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.engine.weight_tuner import WeightTuner
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec
from ambidex.hw.presets import make_profile
from ambidex.models.registry import build_model
from ambidex.models.site_plans import ALIGNMENT_BYTES, RingSizes
from ambidex.models.weight_moves import WeightMoves
from ambidex.runner.capture import Capture, CudaCapture
from ambidex.runner.decode import DecodeForm
from ambidex.sched.tuner import Bucket, Kind, Where
from ambidex.solver.problem import MARGIN_BYTES
from tiny_engine import add_tokenizer, make_engine_folder
from tiny_models import VOCAB_SIZE

FAMILIES: Final = ("llama", "qwen2", "opt", "falcon_40b")
SHAPE: Final = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 512, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PROFILE: Final = make_profile("rtx3060-12g", "ddr4-2ch", "pcie3x16")
PARAMS: Final = SamplingParams(max_output_tokens=14, temperature=0.0, ignore_eos=True)
PROMPTS: Final = [[3 + (7 * place + length * place * place) % (VOCAB_SIZE - 3) for place in range(length)]
                  for length in (1, 5, 33)]  # fmt: skip
DEVICES: Final = [DeviceKind.CPU, pytest.param(DeviceKind.CUDA, marks=pytest.mark.gpu)]
RING: Final = RingSizes(chunk_bytes=9000, num_slots=3)
ON_CPU: Final = WeightSplit(on_gpu=0.0, on_cpu=1.0)
STREAMED: Final = WeightSplit(on_gpu=0.0, streamed=1.0)
NOTHING: Final = Placement(layers=(LayerPlacement(attention=ON_CPU, mlp=ON_CPU),) * 3, head=ON_CPU)
MOSTLY_GPU: Final = WeightSplit(on_gpu=0.9, streamed=0.1)
LONG: Final = [[3 + (5 * place + start) % (VOCAB_SIZE - 3) for place in range(33)] for start in range(3)]
"""Whose answers of 24 tokens stay below 64: the tuner sees steps of one kind."""


def make_config(folder: Path, device: DeviceKind, **words: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder), device=device, dtype=DTypeChoice.FP32, num_threads=1, block_size=16, max_context_len=128,
        max_running_requests=4, max_tokens_per_step=32, dram_memory=64 * MIB, **words,
    )  # fmt: skip


@cache
def measure_whole(
    folder: Path, device: DeviceKind, form: DecodeForm | None, capture: Callable[[], Capture]
) -> dict[str, int]:
    """What an engine with all weights on the accelerator takes there, by owner."""
    whole = build_engine(make_config(folder, device, kv_gpu_tokens=512), decode_form=form, capture=capture)
    return {entry.owner: entry.num_bytes for entry in whole.figures.ledger.entries(Tier.GPU)}


@cache
def answer_undivided(folder: Path, device: DeviceKind) -> list[tuple[int, ...]]:
    """Tokens of the undivided model."""
    return answer(build_engine(make_config(folder, device)))


def make_engine(
    folder: Path,
    form: DecodeForm = DecodeForm.FIXED,
    *,
    device: DeviceKind = DeviceKind.CPU,
    share: float = 0.6,
    capture: Callable[[], Capture] = CudaCapture,
    **parts: Any,
) -> Engine:
    """An engine with a share of the weights on the accelerator, as the solver divides them."""
    decode_form = form if device is DeviceKind.CPU else None
    held = measure_whole(folder, device, decode_form, capture)
    beside = sum(size for owner, size in held.items() if owner != "weights") + MARGIN_BYTES + RING.chunk_bytes * 3
    config = make_config(
        folder, device, placement="auto", tune_weights=True, kv_gpu_tokens=512,
        gpu_memory=beside + 10 * ALIGNMENT_BYTES + int(share * held["weights"]),
    )  # fmt: skip
    return build_engine(config, weight_ring=RING, profile=PROFILE, decode_form=decode_form, capture=capture, **parts)


def moves_of(engine: Engine) -> WeightMoves:
    assert engine.tuner is not None
    assert isinstance(engine.tuner.mover, WeightMoves)
    return engine.tuner.mover


def answer(
    engine: Engine, before_step: Callable[[int], object] = lambda _: None, *, prompts: list[list[int]] = PROMPTS
) -> list[tuple[int, ...]]:
    params = PARAMS if prompts is PROMPTS else replace(PARAMS, max_output_tokens=24)
    ids, answers = [engine.add(prompt, params) for prompt in prompts], {}
    num = 0
    while engine.has_work:
        before_step(num)
        answers |= {output.request_id: output for output in engine.step()}
        num += 1
    assert not [output.error for output in answers.values() if output.error]
    assert engine.stats.num_graph_failures == 0
    return [answers[request_id].token_ids for request_id in ids]


def weights_on_gpu(engine: Engine) -> int:
    return {entry.owner: entry.num_bytes for entry in engine.figures.ledger.entries(Tier.GPU)}["weights"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tuned")
    (path / "config.json").write_text(json.dumps(SHAPE))
    add_tokenizer(path)
    model = build_model(read_spec(find_model(str(path))), device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    save_file(
        {name: torch.randn(p.shape, generator=generator) * p.shape[-1] ** -0.5 for name, p in model.named_parameters()},
        path / "model.safetensors",
    )
    return path


@st.composite
def placements(draw: st.DrawFn, num_layers: int) -> Placement:
    def split() -> WeightSplit:
        shares = draw(st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=3, max_size=3).filter(any))
        gpu, cpu, _ = (share / sum(shares) for share in shares)
        return WeightSplit(on_gpu=gpu, on_cpu=cpu, streamed=max(0.0, 1.0 - gpu - cpu))

    layers = tuple(LayerPlacement(attention=split(), mlp=split()) for _ in range(num_layers))
    return Placement(layers=layers, head=split())


@pytest.mark.parametrize("variant", FAMILIES)
@settings(deadline=None, max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tokens_are_those_of_the_undivided_run_while_weights_move(
    variant: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_moves(variant, DeviceKind.CPU, data, tmp_path_factory)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", FAMILIES)
@settings(deadline=None, max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tokens_on_a_gpu_are_those_of_the_undivided_run_while_weights_move(
    variant: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each of few examples captures its steps anew some ten times, which takes a GPU machine seconds."""
    check_moves(variant, DeviceKind.CUDA, data, tmp_path_factory)


def check_moves(
    variant: str, device: DeviceKind, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"tuned_{variant}" / variant
    if not folder.is_dir():
        make_engine_folder(folder.parent, variant)
    wanted = answer_undivided(folder, device)
    assert len(set(wanted)) > 1, "the model answers every prompt alike: the test would prove nothing"
    engine = make_engine(folder, device=device)
    assert engine.tuner is not None
    moves, limit = moves_of(engine), weights_on_gpu(engine)
    num_layers = engine.figures.spec.num_layers

    def change(num: int) -> None:
        if num % (4 if device is DeviceKind.CPU else 6) == 1:
            moves.begin(data.draw(placements(num_layers)))
        assert weights_on_gpu(engine) <= limit

    assert answer(engine, change) == wanted
    assert moves.num_failed == 0
    engine.close()


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_come_and_go_within_their_memory_and_say_where_they_are(folder: Path, device: DeviceKind) -> None:
    wanted = answer(build_engine(make_config(folder, device)))
    engine = make_engine(folder, device=device)
    moves, start = moves_of(engine), weights_on_gpu(engine)
    first = moves.placement
    away = LayerPlacement(attention=ON_CPU, mlp=STREAMED)
    less = Placement(layers=(away,) * 3, head=STREAMED)

    def change(num: int) -> None:
        if num == 4:
            moves.begin(less)
            assert not moves.is_moving, "what leaves the accelerator is not copied"
            assert weights_on_gpu(engine) < start
            assert moves.placement.layers[0].mlp.on_cpu == 0.0
            assert moves.placement.layers[0].attention.streamed == 0.0
        if num == 8:
            moves.begin(first)
            assert moves.is_moving

    assert answer(engine, change) == wanted
    assert not moves.is_moving
    assert moves.num_bytes > 0
    assert weights_on_gpu(engine) == start
    assert moves.placement == first


def test_a_copy_that_fails_leaves_its_chunk_where_it_was(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    wanted = answer(build_engine(make_config(folder, DeviceKind.CPU)))
    calls = []

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        calls.append(source.numel())
        if len(calls) % 2:
            raise CopyError("the link is down")
        target.copy_(source)

    engine = make_engine(folder, copy_weights=copy)
    moves, start = moves_of(engine), weights_on_gpu(engine)
    first = moves.placement

    def change(num: int) -> None:
        if num in (3, 7):
            moves.begin(NOTHING if num == 3 else first)

    assert answer(engine, change) == wanted
    assert moves.num_failed > 0
    assert "the link is down" in caplog.text
    assert not moves.is_moving
    near = sum(memory.nbytes for chunks in moves._divided.near for memory in chunks)
    assert weights_on_gpu(engine) == start - sum(_movable_bytes(moves)) + near < start


def test_steps_are_captured_again_once_weights_have_moved(folder: Path) -> None:
    """With a capture whose replay is the step as it was launched, so without a part for the CPU."""
    captured: list[int] = []

    def capture(body: Callable[[], None]) -> Callable[[], None]:
        captured.append(num_steps[-1])
        return body

    wanted = answer(build_engine(make_config(folder, DeviceKind.CPU)), prompts=LONG)
    engine = make_engine(folder, DecodeForm.CAPTURED, capture=lambda: capture)
    moves, num_steps = moves_of(engine), [0]
    before = moves.placement
    layer = LayerPlacement(attention=STREAMED, mlp=STREAMED)
    streamed, more = (Placement(layers=(layer,) * 3, head=split) for split in (STREAMED, MOSTLY_GPU))

    def change(num: int) -> None:
        num_steps.append(num)
        if num in (0, 9, 15):
            moves.begin(more if num == 9 else streamed)
            assert moves.placement != before

    assert answer(engine, change, prompts=LONG) == wanted
    first = [num for num in captured if num < 9]
    assert first
    assert [num for num in captured if num >= 9], "the steps of the old parts went on"
    assert min(num for num in captured if num >= 15) == 15


def test_memory_that_is_not_there_is_a_failed_move(folder: Path) -> None:
    engine = make_engine(folder)
    moves, first = moves_of(engine), moves_of(engine).placement
    moves.begin(NOTHING)
    ledger = engine.figures.ledger
    ledger.take(Tier.GPU, "somebody else", ledger.free(Tier.GPU))
    moves.begin(first)
    while moves.is_moving:
        moves.advance(1 << 30)
    assert moves.num_failed > 0
    assert moves.num_bytes == 0
    assert ledger.free(Tier.GPU) == 0


def test_lanes_are_timed_and_told_to_who_follows(folder: Path) -> None:
    engine = make_engine(folder)
    seen: list[StepResult] = []
    engine.core._after_step = lambda _, result: seen.append(result)
    answer(engine)
    decode = [result for result in seen if result.lane_seconds]
    assert len(decode) > 5
    for result in decode:
        busy, total = result.lane_seconds, result.seconds["total"]
        assert set(busy) == {Lane.GPU, Lane.CPU, Lane.STREAM}
        assert 0 < busy[Lane.GPU] < total
        assert 0 <= busy[Lane.CPU] < total
    untimed = build_engine(make_config(folder, DeviceKind.CPU), decode_form=DecodeForm.FIXED)
    seen.clear()
    untimed.core._after_step = lambda _, result: seen.append(result)
    answer(untimed)
    assert not [result for result in seen if result.lane_seconds]


class AtOnce(Executor):
    """Decides in the caller's thread."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **words: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **words))
        except ConfigError as error:
            future.set_exception(error)
        return future


class ScriptedWorld:
    """Promises that another placement halves a step's time."""

    def __init__(self, better: Placement, *, is_feasible: bool = True) -> None:
        self._better, self._is_feasible = better, is_feasible

    def keys(self, batch: int, context: int) -> KVShares:
        del batch, context
        return KVShares()

    def solve(self, bucket: Bucket, coefficients: Coefficients) -> Where:
        del bucket, coefficients
        if not self._is_feasible:
            raise ConfigError("nothing fits")
        return Where(placement=self._better, kv=KVShares())

    def predict_s(self, bucket: Bucket, coefficients: Coefficients, where: Where) -> float:
        del bucket, coefficients
        return 1e-4 if where.placement == self._better else 2e-4

    def terms(self, batch: int, context: int, where: Where) -> LaneTerms:
        del batch, context, where
        return {}

    def move_s(self, old: Where, new: Where) -> float:
        del old, new
        return 0.0


def follow(engine: Engine, better: Placement, seconds: Callable[[], float], **words: Any) -> WeightTuner:
    """A tuner that is told that steps take so many seconds."""
    world = ScriptedWorld(better, **words)
    tuner = WeightTuner(world, moves_of(engine), link_bytes_per_s=1e9, beside=AtOnce())
    engine.core._after_step = lambda plan, result: tuner.after_step(plan, replace(result, seconds={"total": seconds()}))
    return tuner


def test_decisions_are_carried_out_and_judged_and_stand_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ambidex.engine.weight_tuner")
    wanted = answer(build_engine(make_config(folder, DeviceKind.CPU)), prompts=LONG)
    engine = make_engine(folder)
    moves = moves_of(engine)
    better = moves.reach(Placement(layers=(LayerPlacement(attention=STREAMED, mlp=STREAMED),) * 3, head=STREAMED))
    assert better != moves.placement
    tuner = follow(engine, better, lambda: 1e-3 if moves.placement == better else 2e-3)
    assert answer(engine, prompts=LONG) == wanted
    assert [decision.kind for decision in tuner.decisions] == [Kind.MOVE, Kind.KEPT]
    assert tuner.decisions[1].measured_s == pytest.approx(1e-3)
    assert moves.placement == better
    first, second = (record.getMessage() for record in caplog.records)
    assert "move, 0.2 ms a step predicted where it is, 0.1 ms there; 2.0 ms a step before, 0.1 predicted" in first
    assert "0 % by the CPU" in first
    assert "kept, as fast as before, or faster; 2.0 ms a step before, 0.1 predicted; 1.0 measured" in second


def test_a_move_that_made_steps_slower_is_taken_back(folder: Path) -> None:
    engine = make_engine(folder)
    moves = moves_of(engine)
    better, before = moves.reach(NOTHING), moves.placement
    tuner = follow(engine, better, lambda: 1e-2 if moves.placement == better else 1e-3)
    answer(engine, prompts=LONG)
    first, second = tuner.decisions[:2]  # the next ones are of fewer requests
    assert (first.kind, second.kind) == (Kind.MOVE, Kind.ROLL_BACK)
    assert (first.where.placement, second.where.placement) == (better, before)
    assert second.measured_s == pytest.approx(1e-2)
    moves.begin(before)
    while moves.is_moving:
        moves.advance(1 << 30)
    assert moves.placement == before


def test_where_nothing_fits_weights_stay_and_a_warning_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = make_engine(folder)
    moves = moves_of(engine)
    before = moves.placement
    follow(engine, before, lambda: 1e-3, is_feasible=False)
    answer(engine)
    assert moves.placement == before
    assert "no placement of weights was found" in caplog.text


def test_the_engines_own_world_solves_for_chunks_within_their_memory(folder: Path) -> None:
    engine = make_engine(folder)
    assert engine.tuner is not None
    world, moves = engine.tuner._world, moves_of(engine)
    for bucket in ((1, 64), (4, 128)):
        found = world.solve(bucket, Coefficients(cpu_weights=4.0))
        assert moves.reach(found.placement) == found.placement
        assert world.predict_s(bucket, Coefficients(), found) > 0
        assert set(world.terms(*bucket, found)) == {"gpu", "cpu", "link"}
    more = Where(placement=moves.placement, kv=KVShares())
    assert world.move_s(Where(placement=NOTHING, kv=KVShares()), more) > 0
    answer(engine)  # with the thread of its own
    engine.tuner.close()


def test_the_thread_of_decisions_ends_with_its_engine(folder: Path) -> None:
    engine = make_engine(folder)
    assert engine.tuner is not None
    answer(engine)
    assert isinstance(engine.tuner._beside, ThreadPoolExecutor)
    (thread,) = engine.tuner._beside._threads
    assert thread.is_alive()
    engine.close()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_what_cannot_be_tuned_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="`placement` is None: use auto"):
        make_config(folder, DeviceKind.CPU, tune_weights=True)
    with pytest.raises(ConfigError, match="leave one of them out"):
        make_config(folder, DeviceKind.CPU, tune_weights=True, placement="auto", mlp_sparsity="relu")
    with pytest.raises(ConfigError, match="needs decode steps whose lanes can be timed"):
        make_engine(folder, DecodeForm.PROGRAM, share=0.2)


def _movable_bytes(moves: WeightMoves) -> list[int]:
    divided = moves._divided
    return [
        memory.nbytes
        for place, plan in enumerate(divided.plans)
        for memory in divided.chunks_of(place)[: len(plan.cuts.movable)]
    ]

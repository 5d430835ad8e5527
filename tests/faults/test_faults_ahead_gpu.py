"""Steps with keys in DRAM that are prepared ahead, on a GPU: in its own order, late, broken off, never ending.

Each test takes seconds, the first ones those of a compiler. What hangs is cut off by a thread, which ends the process:
a call of the driver hears no signal.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from ahead_runs import BROKEN_OUTPUTS, NUM_LAYERS, NUM_OUTPUTS, PLACES, add_all, answers, break_off, make_engine
from ahead_runs import run_to_end as run
from ambidex.attention import handover
from ambidex.core.config import DeviceKind, DTypeChoice, KVDTypeChoice
from ambidex.core.errors import LaneError
from ambidex.core.ids import Lane
from ambidex.core.policy import PolicyName
from ambidex.engine.engine import Engine
from ambidex.kernels.cpu.native import AttentionScript
from ambidex.runner import graphs
from ambidex.runner.capture import Capture, CudaCapture
from ambidex.runner.graphs import DecodeSteps
from ambidex.runner.runner import ModelRunner
from ambidex.storage.step_watch import StepWatch
from ambidex.storage.words import StreamWords
from late_streams import late_gpu_streams
from tiny_engine import make_engine_folder

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180, method="thread")]

FP16: Final = {"dtype": DTypeChoice.FP16, "kv_dtype": KVDTypeChoice.AUTO}
LANES: Final[dict[str, tuple[dict[str, Any], set[Lane]]]] = {
    "the CPU lane": ({"stream_percent": 0}, {Lane.CPU}),
    "both": ({"stream_percent": 50}, {Lane.CPU, Lane.STREAM}),
    "both, fp16": ({"stream_percent": 50, **FP16}, {Lane.CPU, Lane.STREAM}),
    "all travel, fp16": ({"policy": PolicyName.FLEXGEN, "num_sink_tokens": 0, **FP16}, {Lane.STREAM}),
}
CYCLES: Final = (0, 0, 50_000, 1_000_000)
"""For which a GPU sleeps: up to about half a millisecond, several of these steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("ahead"), num_layers=NUM_LAYERS)


@pytest.fixture(autouse=True)
def sleeping_kernel() -> Iterator[None]:
    """It is loaded now: that would wait for streams that wait for words. Behind a test nothing is under way."""
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def make(folder: Path, capture: Capture | None = None, **settings: Any) -> Engine:
    return make_engine(folder, capture or CudaCapture(), device=DeviceKind.CUDA, **settings)


def warm(engine: Engine) -> Engine:
    """The engine, whose steps are captured: the first ones may round otherwise."""
    answers(engine)
    return engine


def in_turn(engine: Engine, patch: pytest.MonkeyPatch, *, most: int = 100) -> list[tuple[int, ...]]:
    """The answers where no step is sent before the last one was waited for; by the same graphs."""
    with patch.context() as now:
        now.setattr(DecodeSteps, "try_launch", lambda *_: None)
        return answers(engine, most=most)


def steps_of(engine: Engine) -> DecodeSteps:
    runner = engine.core.executor
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.decode_steps, DecodeSteps)
    return runner.decode_steps


def late_capture(rng: random.Random) -> Capture:
    """Graphs that begin late, and whose tokens come late."""
    capture = CudaCapture()

    def late(body: Callable[[], None]) -> Callable[[], None]:
        replay = capture(body)

        def replay_late() -> None:
            torch.cuda._sleep(rng.choice(CYCLES))
            replay()
            torch.cuda._sleep(rng.choice(CYCLES))

        return replay_late

    return late


@pytest.mark.parametrize("name", LANES)
def test_steps_ahead_give_what_steps_in_turn_give(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, lanes = LANES[name]
    engine = warm(make(folder, **settings))
    wanted = in_turn(engine, monkeypatch)
    launch, num_sent = DecodeSteps.try_launch, 0

    def counting_launch(steps: DecodeSteps, requests: Sequence[Any]) -> Any:
        nonlocal num_sent
        launched = launch(steps, requests)
        num_sent += launched is not None and requests[0].is_pending
        return launched

    monkeypatch.setattr(DecodeSteps, "try_launch", counting_launch)
    assert answers(engine) == wanted
    assert num_sent > max(NUM_OUTPUTS) / 2
    assert all(engine.stats.lane_bytes[lane] > 0 for lane in lanes)
    assert engine.stats.num_graph_failures == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LANES)
def test_whoever_is_late_the_answers_are_the_same(
    folder: Path, name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, run_script = random.Random(seed), AttentionScript.run

    def late_run(script: AttentionScript, *args: Any, **named: Any) -> tuple[int, int]:
        time.sleep(rng.choice([0.0, 0.0, 0.003]))
        return run_script(script, *args, **named)

    monkeypatch.setattr(AttentionScript, "run", late_run)
    with late_gpu_streams(rng, "step_stream"):
        engine = warm(make(folder, late_capture(rng), **LANES[name][0]))
        wanted = in_turn(engine, monkeypatch)
        for _ in range(2):
            assert answers(engine) == wanted


def test_a_share_that_follows_its_lanes_changes_between_steps_ahead(folder: Path) -> None:
    """Numbers are rounded as the lanes share the keys, so the answers need not be the same."""
    engine = make(folder, **FP16)
    for _ in range(3):
        assert [len(tokens) for tokens in answers(engine)] == list(NUM_OUTPUTS)
    assert engine.stats.lane_bytes[Lane.STREAM] + engine.stats.lane_bytes[Lane.CPU] > 0
    assert engine.stats.num_graph_failures == 0


def test_requests_come_and_go_beside_steps_ahead(folder: Path) -> None:
    rng = random.Random(0)
    engine = make(folder, stream_percent=50, prefix_cache_percent=50, max_tokens_per_step=64)
    errors: list[str | None] = []
    while engine.stats.num_steps < 400 or engine.has_work:
        if engine.stats.num_steps < 400 and rng.random() < 0.1:
            add_all(engine, most=rng.randint(1, 40))
        if engine._live and rng.random() < 0.05:
            engine.abort(rng.choice(list(engine._live)))
        errors += [output.error for output in engine.step()]
    engine.core.scheduler.check()
    assert set(errors) == {None}
    assert engine.stats.num_replayed_steps > 100


@pytest.mark.parametrize("is_behind", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, LaneError])
def test_wherever_a_step_breaks_off_the_next_ones_are_right(
    folder: Path, error: type[BaseException], is_behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "StepWatch", partial(StepWatch, limit_s=5.0, look_s=0.1))
    monkeypatch.setattr(handover, "WAIT_LIMIT_S", 5.0)
    engine = warm(make(folder, late_capture(random.Random(1)), stream_percent=50))
    wanted = in_turn(engine, monkeypatch, most=BROKEN_OUTPUTS)
    for place in PLACES:
        assert break_off(engine, place, error, 8, is_behind=is_behind, patch=monkeypatch), place
        assert answers(engine, most=BROKEN_OUTPUTS) == wanted, place


@pytest.mark.parametrize("layer_idx", [0, NUM_LAYERS - 1])
@pytest.mark.parametrize("name", ["both, fp16", "all travel, fp16"])
def test_blocks_that_never_arrive_fail_their_step_alone(
    folder: Path, name: str, layer_idx: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU waits for a word without a limit of its own."""
    monkeypatch.setattr(graphs, "StepWatch", partial(StepWatch, limit_s=2.0, look_s=0.1))
    monkeypatch.setattr(handover, "WAIT_LIMIT_S", 2.0)
    write, lost = StreamWords.write, 0

    def losing_write(words: StreamWords, word: Tensor) -> None:
        nonlocal lost
        if word.data_ptr() == lost:
            lost = 0
        else:
            write(words, word)

    monkeypatch.setattr(StreamWords, "write", losing_write)
    engine = warm(make(folder, **LANES[name][0]))
    wanted = answers(engine)
    ids = add_all(engine)
    for _ in range(12):
        engine.step()
    stream = steps_of(engine)._lanes._stream
    assert stream is not None
    lost = stream._arrived[layer_idx].data_ptr()
    outputs = run(engine)
    assert not lost
    for request_id, whole in zip(ids, wanted, strict=True):
        assert outputs[request_id].error is not None
        assert outputs[request_id].token_ids == whole[: len(outputs[request_id].token_ids)]
    assert answers(engine) == wanted


def test_an_engine_that_is_closed_waits_for_the_step_under_way(folder: Path) -> None:
    capture = CudaCapture()

    def slow_capture(body: Callable[[], None]) -> Callable[[], None]:
        replay = capture(body)

        def replay_late() -> None:
            torch.cuda._sleep(50_000_000)  # tens of milliseconds
            replay()

        return replay_late

    engine = make(folder, slow_capture, stream_percent=50)
    add_all(engine)
    while engine.core._next is None:
        engine.step()
    assert not torch.cuda.current_stream().query()
    engine.close()
    assert torch.cuda.current_stream().query()

"""What the tests of steps ahead share: a few requests, an engine whose keys come to lie in DRAM, their answers."""

import contextlib
import random
from pathlib import Path
from typing import Any, Final

import pytest

from ambidex import EngineConfig, SamplingParams
from ambidex.attention.decode_batch import DecodeBatch
from ambidex.attention.handover import Handover
from ambidex.core.config import DeviceKind, DTypeChoice, KVDTypeChoice
from ambidex.core.ids import RequestId
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.engine.outputs import RequestOutput
from ambidex.runner.capture import Capture
from ambidex.runner.chosen_copy import ChosenCopy
from ambidex.runner.decode import DecodeForm
from ambidex.runner.step_under_way import StepUnderWay
from ambidex.sched.scheduler import Scheduler
from ambidex.storage.lane_clock import TimedRun
from ambidex.storage.lane_thread import WorkBeside
from ambidex.storage.step_stream import StepStream
from ambidex.storage.words import StepFence
from tiny_models import VOCAB_SIZE

NUM_LAYERS: Final = 5
"""More than the stream lane's buffers, so that its blocks wait for each other."""
NUM_OUTPUTS: Final = (40, 28, 34)
_rng = random.Random(3)
PROMPTS: Final = [[_rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (50, 70, 60)]


def make_engine(
    folder: Path, capture: Capture | None = None, *, device: DeviceKind = DeviceKind.CPU, **settings: Any
) -> Engine:
    """An engine whose decode steps are captured in that way; None: each is launched anew."""
    chosen = {
        "dtype": DTypeChoice.FP32,
        "kv_dtype": KVDTypeChoice.INT8,
        "kv_gpu_tokens": 400,
        "num_sink_tokens": 4,
        **settings,
    }
    config = EngineConfig(model=str(folder), device=device, num_threads=1, block_size=16, recent_window=8, **chosen)
    if capture is None:
        return build_engine(config, decode_form=DecodeForm.FIXED, min_streamed=2)
    return build_engine(config, decode_form=DecodeForm.CAPTURED, capture=lambda: capture, min_streamed=2)


BROKEN_OUTPUTS: Final = 16
PLACES: Final[dict[str, tuple[type, str]]] = {
    "a plan": (Scheduler, "schedule_ahead"),
    "inputs": (DecodeBatch, "try_prepare"),
    "words": (Handover, "reset"),
    "copies": (StepStream, "start"),
    "answers": (WorkBeside, "start"),
    "a launch": (TimedRun, "_mark"),
    "launched": (StepFence, "mark"),
    "all copies": (StepStream, "finish"),
    "tokens": (ChosenCopy, "begin"),
    "a step": (StepUnderWay, "bring"),
    "the lane": (WorkBeside, "wait"),
    "the end": (ChosenCopy, "wait_here"),
}
"""What steps with keys in DRAM call on their way, once or more often."""


def break_off(
    engine: Engine, place: str, error: type[BaseException], number: int, *, is_behind: bool, patch: pytest.MonkeyPatch
) -> bool:
    """Run short answers, in which one of these calls raises: all fail, or the step that it belongs to is run again.

    Args:
        place: of `PLACES`.
        number: of the call, from 1.
        is_behind: it raises when it has done its work.
    Returns:
        False if there were fewer calls.
    """
    owner, name = PLACES[place]
    function, num_calls = getattr(owner, name), 0

    def breaking(*args: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == number and not is_behind:
            raise error("the test says so")
        found = function(*args, **named)
        if num_calls == number:
            raise error("the test says so")
        return found

    add_all(engine, most=BROKEN_OUTPUTS)
    with patch.context() as now:
        now.setattr(owner, name, breaking)
        while engine.has_work:
            with contextlib.suppress(error):
                engine.step()
    return num_calls >= number


def add_all(engine: Engine, *, most: int = 100) -> list[RequestId]:
    """Three requests, which end at different steps.

    Args:
        most: tokens of an answer.
    """
    return [
        engine.add(prompt, SamplingParams(max_output_tokens=min(num, most), temperature=0.0, ignore_eos=True))
        for prompt, num in zip(PROMPTS, NUM_OUTPUTS, strict=True)
    ]


def run_to_end(engine: Engine) -> dict[RequestId, RequestOutput]:
    """The last output of each request that is there; the engine's books are right then."""
    outputs: dict[RequestId, RequestOutput] = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    engine.core.scheduler.check()
    assert sum(engine.stats.kv_bytes.values()) == 0
    return outputs


def answers(engine: Engine, *, most: int = 100) -> list[tuple[int, ...]]:
    """Of these requests, none of which fails."""
    ids = add_all(engine, most=most)
    outputs = run_to_end(engine)
    assert [outputs[request_id].error for request_id in ids] == [None] * len(ids)
    return [outputs[request_id].token_ids for request_id in ids]

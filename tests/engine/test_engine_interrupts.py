"""Ctrl-C at any moment leaves an engine that answers on and owns every block."""

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ambidex import LLM, SamplingParams
from ambidex.engine.interrupts import holding_interrupts
from tiny_engine import make_engine_folder

GREEDY = SamplingParams(max_output_tokens=3, temperature=0.0, ignore_eos=True)
BOOKS = ("/ambidex/engine/", "/ambidex/kv/", "/ambidex/sched/")
PROMPTS = ["hello, world", "the quick brown fox jumps", "ab"]


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("interrupts"))


class CtrlC:
    """Counts the lines that run where requests and blocks are kept, and presses Ctrl-C at one of them."""

    def __init__(self, press_at: int | None) -> None:
        self.num_lines = 0
        self._press_at = press_at

    def __call__(self, frame: FrameType, event: str, _arg: object) -> Any:
        if not any(part in frame.f_code.co_filename for part in BOOKS):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self._press_at:
                signal.raise_signal(signal.SIGINT)
        return self


def run_traced(llm: LLM, tracer: CtrlC) -> None:
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        llm.generate(PROMPTS, GREEDY)
    finally:
        sys.settrace(before)


def test_ctrl_c_within_the_books_of_a_step_leaves_no_lost_plan_and_no_block_without_owner(folder: Path) -> None:
    """One that came between `schedule` and `update` left an engine that refused every further step."""
    seed = 0 if "CI" in os.environ else random.randrange(2**32)
    print(f"seed {seed}")  # shown when the test fails
    with LLM(str(folder), block_size=4, kv_gpu_tokens=24, num_sink_tokens=4, recent_window=8, max_tokens_per_step=8,
             num_threads=1) as llm:  # fmt: skip
        expected = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
        counter = CtrlC(None)
        run_traced(llm, counter)
        for press_at in random.Random(seed).sample(range(1, counter.num_lines), 12):
            with pytest.raises(KeyboardInterrupt):
                run_traced(llm, CtrlC(press_at))
            assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected, press_at
            llm._engine.core.scheduler.check()
            assert sum(llm.stats().kv_bytes.values()) == 0, press_at
            assert not llm._inboxes, press_at


def press(num_times: int, done: list[str]) -> None:
    """Ctrl-C within a block, which notes how far it came."""
    with holding_interrupts():
        for _ in range(num_times):
            signal.raise_signal(signal.SIGINT)
            done.append("pressed")


def test_ctrl_c_is_handled_behind_the_block() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        press(1, done)
    assert done == ["pressed"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_is_handled_at_once() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        press(2, done)
    assert done == ["pressed"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_waits_for_the_outermost_block() -> None:
    done: list[str] = []

    def press_within() -> None:
        with holding_interrupts():
            press(1, done)
            done.append("outer")

    with pytest.raises(KeyboardInterrupt):
        press_within()
    assert done == ["pressed", "outer"]


def test_a_handler_of_the_program_sees_each_ctrl_c_once() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: seen.append(number))
    with holding_interrupts():
        signal.raise_signal(signal.SIGINT)
        assert not seen
    assert seen == [signal.SIGINT]
    with holding_interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert seen == [signal.SIGINT] * 3


def test_another_thread_leaves_signals_alone() -> None:
    handlers: list[object] = []

    def work() -> None:
        with holding_interrupts():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]

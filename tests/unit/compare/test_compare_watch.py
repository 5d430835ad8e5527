"""Following a worker: it may end, hang or break at any place, and each cell gets one outcome."""

import faulthandler
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ambidex.compare import watch
from ambidex.compare.cells import Cell, CellKind
from ambidex.compare.watch import KnownRates, explain_exit, find_place, follow
from ambidex.core.config import EngineConfig

CELL = Cell(
    kind=CellKind.SPEED, engine="ambidex", model="m", variant="exact", context=64, batch=1, kv_gpu_tokens=None,
    settings={},
)  # fmt: skip
CELLS = [CELL, replace(CELL, context=128)]
BEGUN, DONE, FAILED = {"begun": 0}, {"index": 0, "figures": {"x": 1}}, {"index": 1, "failed": "no memory"}
NEXT = {"begun": 1}


@dataclass
class FakeProcess:
    """A worker that has told what it tells; `exitcode` None: it does not end. It has no place that it could name."""

    exitcode: int | None = None
    pid: int | None = None
    waited_s: float | None = None

    def join(self, timeout: float | None = None) -> None:
        self.waited_s = timeout


def run(tmp_path: Path, process: FakeProcess, *told: Any, stderr: str = "", timeout_s: float = 0.01) -> Any:
    results, errors = tmp_path / "results.jsonl", tmp_path / "stderr"
    results.write_text("".join(json.dumps(line) + "\n" for line in told))
    errors.write_text(stderr)
    rates: list[Any] = []
    got = list(follow(process, CELLS, results, errors, timeout_s, keep_rates=rates.append))  # type: ignore[arg-type]
    return [(CELLS.index(cell), outcome.get("reason")) for cell, outcome in got], rates


def test_worker_that_has_told_everything_need_not_end(tmp_path: Path) -> None:
    process = FakeProcess()
    outcomes, _ = run(tmp_path, process, BEGUN, DONE, NEXT, FAILED)
    assert outcomes == [(0, None), (1, "no memory")]
    assert process.waited_s == watch.END_S


@pytest.mark.parametrize("told", [[BEGUN, DONE, NEXT], [BEGUN, DONE]])
def test_worker_that_hangs_in_a_cell_or_before_it_fails_that_one(tmp_path: Path, told: list[Any]) -> None:
    outcomes, _ = run(tmp_path, FakeProcess(), *told)
    assert outcomes == [(0, None), (1, "it took longer than 0.01 s (--cell-timeout)")]


def test_worker_that_breaks_off_fails_the_cell_that_was_begun_alone(tmp_path: Path) -> None:
    outcomes, _ = run(tmp_path, FakeProcess(exitcode=-9), BEGUN, DONE, NEXT)
    assert outcomes == [(0, None), (1, "killed by SIGKILL: no message")]
    outcomes, _ = run(tmp_path, FakeProcess(exitcode=1), BEGUN, DONE)
    assert outcomes == [(0, None)], "what was not begun is for the next worker"


def test_rates_are_handed_on_and_hold_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"dram": 1e11, "gpu": None, "link": None}
    _, rates = run(tmp_path, FakeProcess(exitcode=0), BEGUN, {"rates": found}, DONE, NEXT, FAILED)
    assert rates == [found]
    known, config = KnownRates(), EngineConfig(model="m")
    known.keep(config, found)
    assert known.find(config) == found
    assert known.find(EngineConfig(model="other")) == found
    assert known.find(EngineConfig(model="m", num_threads=1)) is None
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + watch.RATES_S + 1)
    assert known.find(config) is None


def test_reason_of_a_crash_names_signal_and_last_words() -> None:
    assert explain_exit(-9, "") == "killed by SIGKILL: no message"
    assert explain_exit(1, "Traceback\nRuntimeError: broken\n") == "exit code 1: RuntimeError: broken"
    assert explain_exit(2, "usage: it\n  needs more\n") == "exit code 2:   needs more"


def test_reason_of_a_crash_is_the_error_not_the_advice_behind_it() -> None:
    stderr = (
        "Traceback (most recent call last):\n"
        '  File "selective.py", line 3, in attend\n'
        "torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.\n"
    )
    assert explain_exit(1, stderr).endswith("AcceleratorError: CUDA error: an illegal memory access was encountered")
    fatal = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:\n  File ...\n\nExtension modules: numpy\n"
    assert explain_exit(-11, fatal) == "killed by SIGSEGV: Fatal Python error: Segmentation fault"


def test_place_is_the_innermost_line_of_the_package(tmp_path: Path) -> None:
    stack = (
        "Current thread 0x00007f (most recent call first):\n"
        '  File "/x/torch/cuda/__init__.py", line 900 in synchronize\n'
        '  File "/y/ambidex/attention/selective.py", line 12 in settle\n'
        '  File "/y/ambidex/engine/core.py", line 40 in step\n'
    )
    assert find_place(stack) == ", in selective.py line 12, settle (inside __init__.py synchronize)"
    assert find_place("nothing") == ""
    with (tmp_path / "own").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=False)
        file.seek(0)
        own = file.read()
    assert 'test_compare_watch.py", line' in own.splitlines()[1], "the form that is read is the one that is written"
    assert watch._FRAME.match(own.splitlines()[1])

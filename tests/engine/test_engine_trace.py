"""The timeline: events nest, stand in order, name what happened and fit the steps; the file is valid at any time."""

import json
import logging
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from ambidex import LLM, SamplingParams
from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.trace import Track
from ambidex.engine.compose import build_engine
from ambidex.engine.trace_file import TraceFile
from tiny_engine import make_engine_folder

CHILD_ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
GREEDY = SamplingParams(max_output_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = ["a lighthouse on a rock, far out at sea", "b" * 30]
SETTINGS: dict[str, Any] = {
    "block_size": 4, "kv_gpu_tokens": 32, "num_sink_tokens": 4, "recent_window": 8, "max_context_len": 96,
    "max_tokens_per_step": 24, "num_threads": 1, "device": "cpu",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_engine_folder(tmp_path_factory.mktemp("model")))


def load(path: Path) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """Spans by track, in the order of their beginning and the longer first, and counters."""
    events = json.loads(path.read_text(encoding="utf-8"))
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            spans[names[event["tid"]]].append(event)
    for track in spans.values():
        track.sort(key=lambda span: (span["ts"], -span["dur"]))
    return spans, [event for event in events if event["ph"] == "C"]


def is_within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    """To a nanosecond, of which a time is a thousandth part."""
    early = outer["ts"] - 1e-3 <= inner["ts"]
    return bool(early and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1e-3)


def check_nesting(spans: list[dict[str, Any]]) -> None:
    """Spans of a track are within each other or apart."""
    stack: list[dict[str, Any]] = []
    for span in spans:
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= span["ts"] + 1e-3:
            stack.pop()
        assert not stack or is_within(span, stack[-1]), (span, stack[-1])
        stack.append(span)


def test_timeline_of_a_split_run_tells_steps_sections_lanes_and_counters(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with LLM(folder, trace=str(path), **SETTINGS) as llm:
        answers = llm.generate(PROMPTS, GREEDY)
        stats = llm.stats()
    with LLM(folder, **SETTINGS) as llm:
        assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == [a.token_ids for a in answers]
    spans, counters = load(path)
    for track in spans.values():
        check_nesting(track)

    steps = [span for span in spans[Track.STEPS] if span["name"].startswith("step ")]
    assert [step["name"] for step in steps] == [f"step {number}" for number in range(len(steps))]
    assert len(steps) >= stats.num_steps
    for step in steps:
        inner = [span for span in spans[Track.STEPS] if span is not step and is_within(span, step)]
        names = [span["name"] for span in inner]
        assert names[0] == "schedule"
        assert names[1] == "execute"
        assert names[-1] == "update"
        assert set(names[2:-1]) <= {"moves", "prepare", "forward", "sample"}
        assert names[2] == "moves"
        parts = [span for span in inner if span["name"] in ("schedule", "execute", "update")]
        assert sum(part["dur"] for part in parts) == pytest.approx(step["dur"], rel=1e-6, abs=0.01)
        sections = sum(span["dur"] for span in inner[2:-1])
        assert sections <= inner[1]["dur"] + 0.01
    assert sum(step["dur"] for step in steps) / 1e6 >= stats.seconds["total"]

    forwards = [span for span in spans[Track.STEPS] if span["name"] == "forward"]
    outer = [span for span in spans[Track.CPU_LANE] if span["name"].startswith("layer ")]
    inner = [span for span in spans[Track.CPU_LANE] if span["name"].startswith("attend layer ")]
    assert len(outer) == len(inner) > 0
    assert all(is_within(work, wait) for work, wait in zip(inner, outer, strict=True))
    assert [work["name"] for work in inner] == [f"attend {wait['name']}" for wait in outer]
    for span in outer + spans[Track.GPU_LANE]:
        assert any(is_within(span, forward) for forward in forwards)
    copies = spans[Track.COPIES]
    assert len(copies) == stats.num_moves > 0
    assert all(copy["name"].endswith(" from gpu to dram") for copy in copies)

    by_name = defaultdict(list)
    for counter in counters:
        by_name[counter["name"]].append(counter["args"])
    assert max(values["running"] for values in by_name["requests"]) == 2
    assert by_name["requests"][-1] == {"running": 0, "waiting": 0}
    assert max(values["dram"] for values in by_name["KV bytes"]) == stats.peak_kv_bytes["dram"]  # type: ignore[index]
    assert sum(values["cpu"] for values in by_name["lane bytes"]) == stats.lane_bytes["cpu"]  # type: ignore[index]


def test_timeline_is_valid_after_each_step_and_when_the_process_is_killed(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    program = (
        "import os, signal\n"
        "from ambidex import LLM, SamplingParams\n"
        f"llm = LLM({folder!r}, trace={str(path)!r}, block_size=4, num_threads=1, device='cpu')\n"
        "stream = llm.stream('some words', SamplingParams(max_output_tokens=50, ignore_eos=True))\n"
        "for _ in range(5): next(stream)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    child = subprocess.run([sys.executable, "-c", program], env=CHILD_ENV, capture_output=True, check=False)
    assert child.returncode == -9, child.stderr
    spans, _ = load(path)
    assert sum(span["name"].startswith("step ") for span in spans[Track.STEPS]) == 5


def test_a_step_that_is_cut_short_is_told(folder: str, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "trace.json"
    config = EngineConfig(model=folder, trace=str(path), **SETTINGS)
    engine = build_engine(config, forward=fail)  # type: ignore[arg-type]
    engine.add("abc", GREEDY)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    spans, _ = load(path)
    (execute,) = [span for span in spans[Track.STEPS] if span["name"] == "execute"]
    assert execute["args"]["end"] == "cut short"


def test_an_engine_without_a_timeline_has_plain_parts(folder: str) -> None:
    engine = build_engine(EngineConfig(model=folder, **SETTINGS))
    assert type(engine.core).__name__ == "EngineCore"
    attention = engine.core.executor._attention  # type: ignore[attr-defined]
    assert type(attention._cpu).__name__ == "CPULane"
    assert not any(type(reader).__name__ == "TracedReader" for reader in attention._readers.values())


@pytest.mark.gpu
def test_timeline_on_a_gpu_sets_the_devices_times_within_the_steps(folder: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    config = SETTINGS | {"device": "cuda", "block_size": 16, "kv_gpu_tokens": 64, "recent_window": 16}
    with LLM(folder, trace=str(path), **config) as llm:
        llm.generate(PROMPTS, SamplingParams(max_output_tokens=40, temperature=0.0, ignore_eos=True))
        num_steps = llm.stats().num_steps
    spans, _ = load(path)
    for track in spans.values():
        check_nesting(track)
    executions = [span for span in spans[Track.STEPS] if span["name"] == "execute"]
    assert len(spans[Track.GPU]) <= num_steps <= len(executions)
    assert spans[Track.GPU_LANE]
    assert spans[Track.CPU_LANE]
    slack = 100.0  # µs by which the clocks may differ
    for span in spans[Track.GPU] + spans[Track.GPU_LANE] + spans[Track.COPIES]:
        assert any(
            execute["ts"] - slack <= span["ts"] and span["ts"] + span["dur"] <= execute["ts"] + execute["dur"] + slack
            for execute in executions
        ), span


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_text("[1, 2]"), "holds something else than an earlier timeline"),
        (lambda path: path.symlink_to("/dev/null"), "is no regular file"),
        (lambda path: path.symlink_to(path.parent / "none" / "file"), "No such file or directory"),
    ],
)
def test_a_file_that_cannot_take_a_timeline_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, make: Any, reason: str
) -> None:
    path = tmp_path / "trace.json"
    make(path)
    with pytest.raises(ConfigError, match=f"`trace` {path} .*{reason}.*name another file"):
        LLM(str(tmp_path / "no model"), trace=str(path))


def test_an_earlier_timeline_is_replaced_and_one_in_use_is_not(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    first = TraceFile(str(path))
    first.add_span(Track.STEPS, "old", 0, 1)
    first.flush()
    with pytest.raises(ConfigError, match="is in use"):
        TraceFile(str(path))
    del first
    second = TraceFile(str(path))
    second.flush()
    assert "old" not in path.read_text()
    assert json.loads(path.read_text())[0]["name"] == "process_name"


def test_a_full_file_ends_valid_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    trace = TraceFile(str(path), max_bytes=2000)
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            trace.add_span(Track.STEPS, f"step {number}", number, number + 1)
            trace.flush()
    assert path.stat().st_size <= 2000
    assert 1 <= len(load(path)[0][Track.STEPS]) < 100
    assert caplog.text.count("ends here") == 1

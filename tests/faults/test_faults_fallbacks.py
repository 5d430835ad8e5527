"""What a machine lacks: the engine runs on the next path, says so once, counts it, and answers the same."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from ambidex import ConfigError, EngineConfig
from ambidex.cli.main import ISA_NAMES
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.ids import Fallback
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.hw.topology import read_topology
from ambidex.kernels import dispatch
from ambidex.kernels.cpu import native
from ambidex.storage.host_memory import HostMemory
from fault_runs import GREEDY, PROMPTS, SPLIT, run, tokens

TESTS = Path(__file__).parents[1]
ASK = """
import json, sys
from ambidex import EngineConfig
from ambidex.engine.compose import build_engine
from fault_runs import SPLIT, run, tokens

engine = build_engine(EngineConfig(model=sys.argv[1], **SPLIT, **json.loads(sys.argv[2])))
print(json.dumps({"tokens": tokens(run(engine)), "fallbacks": dict(engine.stats.fallbacks)}))
"""


def make_config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), **SPLIT, **settings)


def ask_alone(
    folder: Path, *prefix: str, settings: dict[str, Any], before: str = "", **environment: str
) -> tuple[dict[str, Any], str]:
    """What an engine in a process of its own answers and counts, and what it says on stderr."""
    command = [*prefix, sys.executable, "-c", before + ASK, str(folder), json.dumps(settings)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS), **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    answer["tokens"] = [tuple(ids) for ids in answer["tokens"]]
    return answer, done.stderr


def check_said_once(engine: Engine, kind: Fallback, count: int, said: str, log: str) -> None:
    assert engine.stats.fallbacks[kind] == count
    assert engine.report.value("fallbacks", kind) == str(count)
    assert said in engine.report.why("fallbacks", kind)
    assert log.count(engine.report.why("fallbacks", kind)) == 1


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[tuple[int, ...]]:
    """The answers of an engine that lacks nothing."""
    return tokens(run(build_engine(make_config(folder, num_threads=1))))


@pytest.fixture
def fresh_choices() -> Iterator[None]:
    """Implementations are chosen anew, also after the test."""
    for forget in (dispatch._decide.cache_clear, dispatch._why_no_triton.cache_clear):
        forget()
    yield
    for forget in (dispatch._decide.cache_clear, dispatch._why_no_triton.cache_clear):
        forget()


def test_an_engine_that_lacks_nothing_counts_nothing(folder: Path) -> None:
    engine = build_engine(make_config(folder, num_threads=1), host_memory=HostMemory(advise=lambda _: None))
    expected = {Fallback.NO_AVX2} if native.isa() == "generic" else set()
    assert set(engine.stats.fallbacks) == expected


def test_no_huge_pages(folder: Path, wanted: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture) -> None:
    memory = HostMemory(advise=lambda _: "they are used up")
    engine = build_engine(make_config(folder, num_threads=1), host_memory=memory)
    check_said_once(engine, Fallback.SMALL_PAGES, 2, "they are used up", caplog.text)
    assert tokens(run(engine)) == wanted


@pytest.mark.usefixtures("fresh_choices")
def test_no_native_module(
    folder: Path, wanted: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_import_error", ImportError("not built"))
    engine = build_engine(make_config(folder))
    check_said_once(engine, Fallback.NO_NATIVE_OPS, 1, "not built", caplog.text)
    assert tokens(run(engine)) == wanted


def test_a_thread_that_cannot_be_pinned(folder: Path, wanted: list[tuple[int, ...]]) -> None:
    # One processor for two threads, which the settings refuse, is how pinning fails here.
    num_threads = 2
    unchecked = "import ambidex.engine.compose.choices as choices\nchoices.check_num_threads = lambda _: None\n"
    answer, said = ask_alone(
        folder, "taskset", "-c", first_processor(), settings={"num_threads": num_threads}, before=unchecked
    )
    assert answer["fallbacks"].get(Fallback.UNPINNED_THREADS) == num_threads - 1
    assert said.count("1 of 2 CPU threads have no processor of their own") == 1
    assert answer["tokens"] == wanted


def test_more_threads_than_processors_are_refused(folder: Path) -> None:
    """4096 were taken on 2 cores, and no step came to its end."""
    most = read_topology().max_threads
    with pytest.raises(ConfigError, match=f"`num_threads` is 4096: .*at most {most}, or leave it out"):
        build_engine(make_config(folder, num_threads=4096))


def first_processor() -> str:
    return str(min(os.sched_getaffinity(0)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_processor_without_avx2(folder: Path, dtype: str) -> None:
    # Torch without AVX2, too: the whole engine as on such a processor.
    settings: dict[str, Any] = {"num_threads": 1, "dtype": dtype}
    answer, said = ask_alone(folder, settings=settings, AMBIDEX_MAX_ISA="generic", ATEN_CPU_CAPABILITY="default")
    assert answer["fallbacks"].get(Fallback.NO_AVX2) == 1
    assert said.count("native ops run without AVX2") == 1
    engine = build_engine(make_config(folder, num_threads=1, dtype=DTypeChoice(dtype)))
    assert answer["tokens"] == tokens(run(engine))


def test_a_limit_that_is_no_instruction_set_is_refused(folder: Path) -> None:
    script = (
        "import sys\nfrom ambidex import LLM, ConfigError\n"
        "try:\n    LLM(sys.argv[1])\nexcept ConfigError as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "AMBIDEX_MAX_ISA": "sse9"})
    names = ", ".join(ISA_NAMES[:-1]) + f" or {ISA_NAMES[-1]}"  # as the command line knows them
    assert done.stdout == f'AMBIDEX_MAX_ISA: expected {names}, got "sse9": correct or unset it\n', done.stderr


@pytest.mark.gpu
def test_pinning_is_refused(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(_tensor: Tensor, _owner: object) -> str:
        return "limit of locked memory"

    config = make_config(folder, device=DeviceKind.CUDA, dtype=DTypeChoice.FP32)
    wanted = tokens(run(build_engine(config)))
    engine = build_engine(config, host_memory=HostMemory(pin=refuse))
    check_said_once(engine, Fallback.PAGEABLE_MEMORY, 2, "limit of locked memory", caplog.text)
    assert tokens(run(engine)) == wanted
    assert engine.stats.num_moves > 0


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_choices")
def test_a_gpu_that_triton_does_not_know(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("compute capability 6.1")

    config = make_config(folder, device=DeviceKind.CUDA, dtype=DTypeChoice.FP32)
    wanted = tokens(run(build_engine(config)))
    num_kernels = sum("triton" in names for names in dispatch.IMPLEMENTATIONS.values())
    for forget in (dispatch._decide.cache_clear, dispatch._why_no_triton.cache_clear):
        forget()
    monkeypatch.setattr(dispatch, "run_probe", fail)
    engine = build_engine(config)
    check_said_once(engine, Fallback.PLAIN_KERNELS, num_kernels, "compute capability 6.1", caplog.text)
    assert tokens(run(engine)) == wanted
    assert len(PROMPTS) * GREEDY.max_output_tokens == engine.stats.num_output_tokens  # type: ignore[operator]

"""The engine's process: killed, stopped, failing; and what becomes of the requests that it had."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from ambidex import LLM, AmbidexError, ConfigError, SamplingParams
from ambidex.core.config import EngineConfig
from ambidex.core.errors import EngineLostError, ModelNotFoundError
from ambidex.engine.client import EngineClient
from ambidex.engine.report import EngineReport
from ambidex.server.service import EngineService, MakeEngine, Progress
from ambidex.server.worker.client import WorkerEngine
from held_worker import held_worker
from live_server import SMALL_POOL, START_S, WAIT_S, LiveServer, in_worker, wait_until


@dataclass(slots=True)
class Stream:
    """What one streaming client has seen."""

    pieces: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None
    is_done: bool = False


def read_stream(server: LiveServer, body: dict[str, Any], stream: Stream) -> Stream:
    with server.http.stream("POST", "/v1/completions", json={**body, "stream": True}, timeout=START_S) as response:
        for line in response.iter_lines():
            if line == "data: [DONE]":
                stream.is_done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                if "error" in event:
                    stream.error = event["error"]
                else:
                    stream.pieces.append(event["choices"][0]["text"])
    return stream


def complete(server: LiveServer, prompt: object, **fields: object) -> httpx.Response:
    """One whole completion, waited for longer than an engine takes to be built anew."""
    body = {"prompt": prompt, "temperature": 0, **fields}
    return server.http.post("/v1/completions", json=body, timeout=START_S)


def gated(make: MakeEngine, may_start: threading.Event) -> MakeEngine:
    """The same, but an engine is built only when it may be."""

    async def start(progress: Progress) -> EngineClient:
        async with asyncio.timeout(START_S):
            while not may_start.is_set():
                await asyncio.sleep(0.01)
        return await make(progress)

    return start


def waits_for_restart(server: LiveServer) -> bool:
    """The only answer that is open waits for the next engine."""
    return [answer._restart is not None for answer in set(server.app.answers._open.values())] == [True]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_kill_9_under_load_keeps_what_has_not_been_sent_and_ends_open_streams_cleanly(
    folder: Path, device: str
) -> None:
    num_tokens = 100
    body = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    params = SamplingParams(max_output_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    prompts = [f"prompt {idx}" for idx in range(24)]
    with LLM(str(folder), device=device, dtype="fp32") as offline:
        wanted = [output.text for output in offline.generate(prompts, params)]
    begun = [Stream() for _ in range(4)]
    start = in_worker(folder, max_running_requests=8, device=device, dtype="fp32", **SMALL_POOL)
    with ThreadPoolExecutor(max_workers=32) as pool, contextlib.ExitStack() as stack:
        with held_worker(num_requests=len(begun)):
            server = stack.enter_context(LiveServer(start))
        first = server.worker.pid
        os.kill(first, signal.SIGSTOP)  # so that these four begin together
        streams = [
            pool.submit(read_stream, server, {**body, "prompt": prompts[idx]}, stream)
            for idx, stream in enumerate(begun)
        ]
        wait_until(lambda: server.app.answers.num_choices == len(begun))
        os.kill(first, signal.SIGCONT)
        wait_until(lambda: all(stream.pieces for stream in begun))  # and then its step does not end: no other begins
        queued = [pool.submit(read_stream, server, {**body, "prompt": prompt}, Stream()) for prompt in prompts[4:14]]
        whole = [pool.submit(complete, server, prompt, **body) for prompt in prompts[14:]]
        wait_until(lambda: server.app.answers.num_choices == len(prompts))
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: server.http.get("/ready").status_code == 503)
        assert server.http.get("/ready").json()["status"] == "restarting"
        assert server.http.get("/health").json() == {"status": "ok", "engine": "restarting"}
        assert "ambidex_engine_ready 0.0" in server.http.get("/metrics").text
        for stream, text in zip((future.result() for future in streams), wanted[:4], strict=True):
            assert stream.error is not None
            assert (stream.error["type"], stream.error["code"]) == ("server_error", "engine_failed")
            assert "SIGKILL" in stream.error["message"]
            assert not stream.is_done
            assert text.startswith("".join(stream.pieces))
        assert ["".join(future.result().pieces) for future in queued] == wanted[4:14]
        assert [future.result().json()["choices"][0]["text"] for future in whole] == wanted[14:]
        assert server.http.get("/ready").status_code == 200
        assert server.worker.pid != first
        assert "ambidex_engine_restarts 1.0" in server.http.get("/metrics").text
        assert not Path(f"/proc/{first}").exists()
        wait_until(server.is_idle)


def test_whole_answers_that_were_being_computed_begin_anew(folder: Path, offline: LLM) -> None:
    params = SamplingParams(max_output_tokens=100, temperature=0.0, ignore_eos=True)
    wanted = offline.generate("hello", params)[0].text
    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
        with held_worker(num_requests=2):
            server = stack.enter_context(LiveServer(in_worker(folder, max_tokens_per_step=4)))
        answer = pool.submit(complete, server, ["hello", "hello"], max_tokens=100, ignore_eos=True)
        wait_until(lambda: server.status()["num_output_tokens"] > 4)
        os.kill(server.worker.pid, signal.SIGKILL)
        choices = answer.result().json()["choices"]
        assert [choice["text"] for choice in choices] == [wanted, wanted]
        assert answer.result().json()["usage"]["completion_tokens"] == 200
        assert server.service.num_restarts == 1


def test_client_that_leaves_while_the_engine_is_built_anew_is_not_answered_later(folder: Path) -> None:
    may_start = threading.Event()
    may_start.set()
    data = b'{"prompt": "hello", "max_tokens": 50}'
    with LiveServer(gated(in_worker(folder), may_start)) as server:
        may_start.clear()
        os.kill(server.worker.pid, signal.SIGSTOP)
        with socket.create_connection(server.url.removeprefix("http://").split(":")) as connection:  # type: ignore[arg-type]
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            connection.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
            wait_until(lambda: server.app.answers.num_choices == 1)
            os.kill(server.worker.pid, signal.SIGKILL)
            wait_until(lambda: waits_for_restart(server))
        wait_until(lambda: server.app.answers.num_choices == 0)
        may_start.set()
        wait_until(lambda: server.http.get("/ready").status_code == 200, timeout_s=START_S)
        assert server.is_idle()
        assert server.status()["num_computed_tokens"] == 0


def test_abort_while_the_engine_is_built_anew_ends_the_answer(folder: Path) -> None:
    may_start = threading.Event()
    may_start.set()
    with LiveServer(gated(in_worker(folder), may_start)) as server, ThreadPoolExecutor() as pool:
        may_start.clear()
        os.kill(server.worker.pid, signal.SIGSTOP)
        headers = {"X-Request-Id": "mine"}
        body = {"prompt": "hello", "max_tokens": 50}
        answer = pool.submit(server.http.post, "/v1/completions", json=body, headers=headers)
        wait_until(lambda: server.app.answers.num_choices == 1)
        os.kill(server.worker.pid, signal.SIGKILL)
        wait_until(lambda: waits_for_restart(server))
        server.http.post("/v1/abort", json={"id": "mine"}).raise_for_status()
        choice = answer.result().json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("", "abort")
        may_start.set()


def test_process_that_says_nothing_is_killed_and_built_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LiveServer(in_worker(folder, silence_s=10)) as server:
        first = server.worker.pid
        monkeypatch.setattr("ambidex.server.service.STATUS_S", 0.2)  # so that all is asked long before it is killed
        os.kill(first, signal.SIGSTOP)
        assert server.http.get("/ready").json()["status"] == "stalled"
        response = server.http.get("/v1/ambidex/status")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_stalled")
        assert "ambidex_engine_ready 0.0" in server.http.get("/metrics").text
        monkeypatch.undo()
        wait_until(lambda: server.service.num_restarts == 1)
        assert "has said nothing" in str(server.service.error)
        wait_until(lambda: server.http.get("/ready").status_code == 200, timeout_s=START_S)
        assert server.complete("x").status_code == 200


@dataclass(slots=True)
class LostEngine:
    """An engine that has failed."""

    fault: AmbidexError | None
    is_closed: bool = False
    report: EngineReport = field(default_factory=lambda: EngineReport(facts=()))

    async def ended(self) -> AmbidexError:
        while self.fault is None:
            await asyncio.sleep(0.01)
        return self.fault

    async def close(self, _save_s: float | None = None) -> None:
        self.is_closed = True

    async def decode_outcome(self) -> None:
        return None


@pytest.mark.parametrize("is_built", [True, False])
def test_restarts_in_a_row_are_counted_out(is_built: bool) -> None:
    engines: list[LostEngine] = []

    async def start(_progress: object) -> Any:
        assert all(engine.is_closed for engine in engines)  # its memory is free before the next is built
        lost = EngineLostError(f"lost {len(engines)}")
        engines.append(LostEngine(lost, is_closed=not is_built and len(engines) > 0))
        if engines[-1].is_closed:
            raise lost  # while it is built anew
        return engines[-1]

    async def main() -> EngineService:
        service = EngineService(start, stall_s=60)
        await service.run()
        return service

    service = asyncio.run(main())
    assert (service.state, service.num_restarts, str(service.error)) == ("failed", 3, "lost 3")


def test_error_of_an_engine_that_was_mended_is_forgotten() -> None:
    """A server that had built its engine anew ended with exit code 1 and the error of the first one."""
    engines: list[LostEngine] = []

    async def start(_progress: object) -> Any:
        engines.append(LostEngine(EngineLostError("lost") if not engines else None))
        return engines[-1]

    async def main() -> EngineService:
        service = EngineService(start, stall_s=60)
        running = asyncio.create_task(service.run())
        async with asyncio.timeout(WAIT_S):
            while len(engines) < 2 or service.state != "ready":
                await asyncio.sleep(0.01)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        return service

    service = asyncio.run(main())
    assert (service.num_restarts, service.error) == (1, None)


def test_progress_of_a_restart_begins_anew() -> None:
    # Bug: "the engine failed and is being built anew (100 %)", which was the progress of the engine before.
    engines: list[LostEngine] = []
    seen: list[tuple[int, int]] = []

    async def main() -> None:
        async def start(progress: Callable[[int, int], None]) -> Any:
            seen.append(service.loaded_bytes)
            progress(100, 100)
            engines.append(LostEngine(EngineLostError("lost") if not engines else None))
            return engines[-1]

        service = EngineService(start, stall_s=60)
        running = asyncio.create_task(service.run())
        async with asyncio.timeout(WAIT_S):
            while len(engines) < 2 or service.state != "ready":
                await asyncio.sleep(0.01)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    asyncio.run(main())
    assert seen == [(0, 0), (0, 0)]


def test_engine_that_is_lost_at_the_first_start_ends_the_server() -> None:
    async def start(_progress: object) -> Any:
        raise EngineLostError("lost at once")

    async def main() -> EngineService:
        service = EngineService(start, stall_s=60)
        await service.run()
        return service

    service = asyncio.run(main())
    assert (service.state, service.num_restarts, str(service.error)) == ("failed", 0, "lost at once")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_engine_ends_with_its_server(folder: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", "from ambidex.cli.main import run; run()", "serve", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert process.stderr is not None
    try:
        url = process.stderr.readline().split()[0]
        wait_until(lambda: httpx.get(f"{url}/ready", timeout=WAIT_S).status_code == 200, timeout_s=START_S)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 1
        process.send_signal(number)
        process.wait(timeout=WAIT_S)
        wait_until(lambda: not _is_alive(int(children[0])))
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def start_and_close(config: EngineConfig) -> None:
    engine = await WorkerEngine.start(config, progress=lambda *_: None, silence_s=60)
    await engine.close()


def test_errors_of_loading_keep_their_class_and_words(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        asyncio.run(start_and_close(EngineConfig(model=str(tmp_path / "none"))))
    with pytest.raises(ConfigError, match="dram_memory"):
        asyncio.run(start_and_close(EngineConfig(model=str(folder), dram_memory=10**15)))


def test_process_that_dies_while_it_loads_is_an_error(folder: Path) -> None:
    async def main() -> None:
        started = asyncio.create_task(start_and_close(EngineConfig(model=str(folder))))
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
        before = set(children.read_text().split())
        while not (born := set(children.read_text().split()) - before):
            await asyncio.sleep(0.001)
        os.kill(int(born.pop()), signal.SIGKILL)
        await started

    with pytest.raises(EngineLostError, match="SIGKILL"):
        asyncio.run(main())


def test_server_without_its_engine_needs_no_torch() -> None:
    code = "import sys; import ambidex.server.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_key_is_not_handed_to_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMBIDEX_API_KEY", "not-for-the-engine")
    with LiveServer(in_worker(folder)) as server:
        variables = Path(f"/proc/{server.worker.pid}/environ").read_bytes().split(b"\0")
        assert [name for name in variables if name.startswith(b"AMBIDEX_API_KEY")] == []

"""Cancelling, failing, stalling, draining: whatever becomes of one request, the others get their answers."""

import asyncio
import contextlib
import json
import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ambidex import LLM, AsyncLLM, ConfigError, SamplingParams
from ambidex.attention.tiered import TieredAttention
from ambidex.models.base import CausalLM
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import call_model
from ambidex.server.config import ServerConfig
from ambidex.server.main import bind
from live_server import SMALL_POOL, WAIT_S, LiveServer, maker, wait_until
from tiny_engine import ids_of, make_engine_folder

LONG = {"max_tokens": 60, "ignore_eos": True}


class Valve:
    """A model whose steps wait while it is closed; `fault`, if set, is raised by every step."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self.closes_after: int | None = None
        """Steps after which it closes by itself: however fast they are, the next one waits."""
        self.num_waiting = 0
        self.num_steps = 0
        self.fault: Exception | None = None

    def is_shut(self) -> bool:
        """It has closed by itself, and a step waits."""
        return self.num_steps == self.closes_after and self.num_waiting == 1

    def forward(self, model: CausalLM, batch: InputBatch, attention: TieredAttention) -> Tensor:
        if self.num_steps == self.closes_after:
            self.is_open.clear()
        self.num_waiting += 1
        assert self.is_open.wait(WAIT_S)
        self.num_waiting -= 1
        self.num_steps += 1
        if self.fault is not None:
            raise self.fault
        return call_model(model, batch, attention)


@pytest.fixture
def valve() -> Iterator[Valve]:
    valve = Valve()
    yield valve
    valve.is_open.set()


@contextlib.contextmanager
def opened(server: LiveServer, path: str = "/v1/completions", **body: object) -> Iterator[socket.socket]:
    """A request whose answer is not read; leaving closes the connection."""
    data = json.dumps({"prompt": "hello", "temperature": 0, **LONG, **body}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield connection


@pytest.mark.parametrize("is_stream", [False, True])
def test_disconnect_in_decode_frees_every_tier(folder: Path, valve: Valve, is_stream: bool) -> None:
    valve.closes_after = 3
    with LiveServer(maker(folder, forward=valve.forward, **SMALL_POOL)) as server:
        with opened(server, stream=is_stream):
            wait_until(valve.is_shut)
        wait_until(lambda: server.status()["num_open"] == 0)
        valve.is_open.set()
        wait_until(server.is_idle)
        assert valve.num_steps == 4, "the one that was being computed was the last"
        assert 'reason="gone"' in server.http.get("/metrics").text


def test_disconnect_in_prefill_ends_it_within_a_chunk(folder: Path, valve: Valve) -> None:
    with LiveServer(maker(folder, forward=valve.forward, max_tokens_per_step=4, **SMALL_POOL)) as server:
        valve.is_open.clear()
        with opened(server, prompt="x" * 100, max_tokens=20):
            wait_until(lambda: valve.num_waiting == 1)
        wait_until(lambda: server.status()["num_open"] == 0)  # it is seen while the chunk is computed
        valve.is_open.set()
        wait_until(server.is_idle)
        assert valve.num_steps == 1  # 25 chunks make the prompt


def test_disconnect_while_queued_ends_that_request_and_not_the_running_one(
    folder: Path, valve: Valve, offline: LLM
) -> None:
    wanted = offline.generate("hello", SamplingParams(max_output_tokens=30, temperature=0.0, ignore_eos=True))[0].text
    config = {"forward": valve.forward, "max_running_requests": 1, **SMALL_POOL}
    valve.closes_after = 2
    with LiveServer(maker(folder, **config)) as server, ThreadPoolExecutor() as pool:
        running = pool.submit(server.complete, "hello", max_tokens=30, ignore_eos=True)
        wait_until(valve.is_shut)
        with opened(server, prompt="queued"):
            wait_until(lambda: server.status()["num_open"] == 2)
        wait_until(lambda: server.status()["num_open"] == 1)
        valve.is_open.set()
        assert running.result().json()["choices"][0]["text"] == wanted
        wait_until(server.is_idle)
        assert server.status()["num_computed_tokens"] <= 5 + 30 + 6


def run_both(server: LiveServer, valve: Valve) -> None:
    """Let two requests, the first of which waits in the first step, run side by side for a few steps."""
    wait_until(lambda: valve.is_shut() and server.status()["num_open"] == 2)
    valve.closes_after = 5
    valve.is_open.set()
    wait_until(lambda: valve.is_shut() and server.status()["num_running"] == 2)


def test_abort_by_id_ends_the_addressed_answer_alone(folder: Path, valve: Valve) -> None:
    valve.closes_after = 0
    with LiveServer(maker(folder, forward=valve.forward, **SMALL_POOL)) as server, ThreadPoolExecutor() as pool:
        other = pool.submit(server.complete, "other", max_tokens=20, ignore_eos=True)
        headers = {"X-Request-Id": "my-own-id"}
        aborted = pool.submit(server.http.post, "/v1/completions", json={"prompt": "hello", **LONG}, headers=headers)
        run_both(server, valve)
        response = server.http.post("/v1/abort", json={"id": "my-own-id"})
        assert response.json()["aborted"] is True
        valve.is_open.set()
        answer = aborted.result()
        assert answer.headers["x-request-id"] == "my-own-id"
        assert answer.json()["choices"][0]["finish_reason"] == "abort"
        assert 0 < answer.json()["usage"]["completion_tokens"] < 20
        assert other.result().json()["usage"]["completion_tokens"] == 20
        assert server.http.post("/v1/abort", json={"id": "my-own-id"}).status_code == 404


def test_abort_of_a_stream_by_the_id_of_its_chunks(folder: Path, valve: Valve) -> None:
    valve.closes_after = 1
    with LiveServer(maker(folder, forward=valve.forward, **SMALL_POOL)) as server:
        chunks = server.openai.completions.create(
            model="tiny", prompt="x", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        first = next(iter(chunks))
        wait_until(valve.is_shut)
        server.http.post("/v1/abort", json={"id": first.id}).raise_for_status()
        valve.is_open.set()
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "abort"


def test_concurrent_answers_equal_their_solo_runs(server: LiveServer, offline: LLM) -> None:
    rng = random.Random(3)
    asks = [("".join(rng.choices("abcdefgh ", k=rng.randint(1, 60))), rng.randint(1, 60)) for _ in range(48)]
    params = [SamplingParams(max_output_tokens=n, temperature=0.0, ignore_eos=True) for _, n in asks]
    wanted = [offline.generate(text, own)[0].text for (text, _), own in zip(asks, params, strict=True)]

    async def ask(client: httpx.AsyncClient, idx: int) -> str:
        text, num_tokens = asks[idx]
        body = {"prompt": text, "temperature": 0, "max_tokens": num_tokens, "ignore_eos": True, "stream": idx % 2 == 0}
        if idx % 2:
            return str((await client.post("/v1/completions", json=body)).json()["choices"][0]["text"])
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            events = [json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: {")]
        return "".join(event["choices"][0]["text"] for event in events)

    async def main() -> list[str]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S, limits=limits) as client:
            return await asyncio.gather(*(ask(client, idx) for idx in range(len(asks))))

    assert asyncio.run(main()) == wanted
    assert server.status()["num_moves"] > 0
    wait_until(server.is_idle)


def test_storm_of_disconnects_leaves_all_tiers_empty_and_answers_right(server: LiveServer, offline: LLM) -> None:
    rng = random.Random(5)
    wanted = offline.generate("after the storm", SamplingParams(max_output_tokens=16, temperature=0.0))[0].text

    async def visit() -> None:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(
            {"prompt": "x" * rng.randint(1, 60), "max_tokens": 60, "stream": rng.random() < 0.5, "ignore_eos": True}
        ).encode()
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        writer.write(body[: rng.choice((len(body), len(body), len(body), 5))])
        await writer.drain()
        await asyncio.sleep(rng.random() * 0.1)
        writer.transport.abort()

    async def main() -> None:
        for _ in range(10):
            await asyncio.gather(*(visit() for _ in range(30)))

    asyncio.run(main())
    wait_until(server.is_idle)
    assert server.app.answers.num_open == 0
    assert server.complete("after the storm").json()["choices"][0]["text"] == wanted


def test_full_queue_is_a_429_with_retry_after(folder: Path, valve: Valve) -> None:
    with LiveServer(maker(folder, forward=valve.forward, **SMALL_POOL), max_queue=2) as server:
        valve.is_open.clear()
        with opened(server), opened(server):
            wait_until(lambda: server.status()["num_open"] == 2)
            response = server.complete("x")
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
            assert int(response.headers["retry-after"]) > 0
            valve.is_open.set()
        wait_until(server.is_idle)
        assert server.complete("x", n=2).status_code == 200
        assert server.complete("x", n=3).status_code == 429


def test_silent_stream_gets_comments_with_progress(folder: Path, valve: Valve) -> None:
    with LiveServer(maker(folder, forward=valve.forward, max_tokens_per_step=8), ping_s=0.05) as server:
        valve.is_open.clear()
        body = {"prompt": "x" * 40, "max_tokens": 2, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            assert next(line for line in lines if line) == ": 0 of 40 prompt tokens are computed"
            valve.is_open.set()
            assert "data: [DONE]" in list(lines)


def test_503_while_loading_then_ready(folder: Path) -> None:
    may_load = threading.Event()

    def make(progress: object) -> AsyncLLM:
        progress(30, 100)  # type: ignore[operator]
        assert may_load.wait(WAIT_S)
        return maker(folder)(progress)

    with LiveServer(make, is_awaited=False) as server:
        wait_until(lambda: server.service.loaded_bytes == (30, 100))
        assert server.http.get("/health").json() == {"status": "ok", "engine": "loading"}
        assert server.http.get("/ready").status_code == 503
        response = server.complete("x")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_loading")
        assert "30 %" in response.json()["error"]["message"]
        assert "retry-after" in response.headers
        may_load.set()
        wait_until(lambda: server.http.get("/ready").status_code == 200)
        assert server.complete("x").status_code == 200


def test_taken_port_fails_before_anything_loads() -> None:
    with bind(ServerConfig(port=0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} cannot be listened on"):
            bind(ServerConfig(port=port))


def test_model_that_cannot_load_ends_the_server_with_its_error() -> None:
    def make(_progress: object) -> AsyncLLM:
        raise ConfigError("no such model")

    with LiveServer(make, is_awaited=False) as server:
        wait_until(lambda: not server._thread.is_alive())
        assert str(server.service.error) == "no such model"


def test_stalled_engine_is_not_ready_and_names_the_stage(folder: Path, valve: Valve) -> None:
    with LiveServer(maker(folder, forward=valve.forward), stall_s=0.1) as server:
        valve.is_open.clear()
        with opened(server):
            wait_until(lambda: server.http.get("/ready").json().get("stage") == "computing and copying")
            wait_until(lambda: server.http.get("/ready").status_code == 503)
            body = server.http.get("/ready").json()
            assert (body["status"], body["stage"]) == ("stalled", "computing and copying")
            assert body["stage_s"] > 0.1
            assert server.http.get("/health").status_code == 200
            valve.is_open.set()
            wait_until(lambda: server.http.get("/ready").status_code == 200)


def test_nan_logits_fail_their_request_alone(tmp_path: Path, offline: LLM) -> None:
    poisoned = make_engine_folder(tmp_path)
    weights = load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][ids_of("~")[0]] = torch.nan
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    wanted = offline.generate("hello", SamplingParams(max_output_tokens=16, temperature=0.0))[0].text
    with LiveServer(maker(poisoned)) as server, ThreadPoolExecutor() as pool:
        good, bad = pool.submit(server.complete, "hello"), pool.submit(server.complete, "a~b")
        assert good.result().json()["choices"][0]["text"] == wanted
        assert bad.result().status_code == 500
        assert "not finite" in bad.result().json()["error"]["message"]
        lines = server.http.post("/v1/completions", json={"prompt": "a~b", "stream": True}).text.split("\n\n")
        assert "not finite" in json.loads(lines[-2][6:])["error"]["message"]
        assert server.complete("hello").json()["choices"][0]["text"] == wanted


def test_failing_step_fails_its_requests_and_the_engine_goes_on(folder: Path, valve: Valve) -> None:
    with LiveServer(maker(folder, forward=valve.forward)) as server:
        valve.fault = RuntimeError("injected")
        response = server.complete("x")
        assert response.status_code == 500
        assert "injected" in response.json()["error"]["message"]
        valve.fault = None
        assert server.complete("x").status_code == 200
        assert server.service.num_restarts == 0


def test_dead_engine_is_built_anew_and_queued_requests_are_answered(folder: Path, offline: LLM) -> None:
    wanted = offline.generate("hello", SamplingParams(max_output_tokens=16, temperature=0.0))[0].text
    engines: list[AsyncLLM] = []
    may_build = threading.Event()
    may_build.set()

    def make(progress: object) -> AsyncLLM:
        assert may_build.wait(WAIT_S)
        engines.append(maker(folder)(progress))
        return engines[-1]

    with LiveServer(make) as server, ThreadPoolExecutor() as pool:
        may_build.clear()
        before = server.complete("hello")

        def die() -> None:
            queued = [pool.submit(server.complete, "hello") for _ in range(3)]
            wait_until(lambda: server.app.answers.num_choices == 3)
            asks.extend(queued)
            raise SystemError("the device is lost")

        asks: list[object] = []
        engines[0]._inbox.put(die)
        wait_until(lambda: server.service.state == "restarting")
        assert server.http.get("/ready").json()["status"] == "restarting"
        assert server.http.get("/health").json()["engine"] == "restarting"
        response = server.complete("late")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_restarting")
        may_build.set()
        texts = [ask.result().json()["choices"][0]["text"] for ask in asks]  # type: ignore[attr-defined]
        assert [before.json()["choices"][0]["text"], *texts] == [wanted] * 4
        assert "ambidex_engine_restarts 1.0" in server.http.get("/metrics").text


def test_stream_that_has_begun_ends_with_an_error_event_when_the_engine_dies(folder: Path, valve: Valve) -> None:
    engines: list[AsyncLLM] = []

    def make(progress: object) -> AsyncLLM:
        engines.append(maker(folder, forward=valve.forward)(progress))
        return engines[-1]

    def die() -> None:
        raise SystemError("the device is lost")

    valve.closes_after = 2
    with LiveServer(make) as server:
        with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, **LONG}) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            wait_until(valve.is_shut)
            engines[0]._inbox.put(die)
            valve.is_open.set()
            last = list(lines)[-1]
        assert "the device is lost" in json.loads(last[6:])["error"]["message"]
        wait_until(lambda: server.http.get("/ready").status_code == 200)
        assert server.complete("x").status_code == 200


def test_engine_that_dies_again_and_again_ends_the_server(folder: Path, valve: Valve) -> None:
    valve.fault = RuntimeError("a poisoned device")
    with LiveServer(maker(folder, forward=valve.forward)) as server:

        def has_ended() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                assert server.complete("x").status_code in (500, 503)
            return not server._thread.is_alive()

        wait_until(has_ended)
        assert server.service.state == "failed"
        assert "a poisoned device" in str(server.service.error)


def test_drain_lets_open_answers_end_and_takes_no_more(folder: Path, valve: Valve) -> None:
    valve.closes_after = 4
    with LiveServer(maker(folder, forward=valve.forward), drain_s=WAIT_S) as server, ThreadPoolExecutor() as pool:
        ask = pool.submit(server.complete, "hello", **LONG)
        wait_until(valve.is_shut)
        server.server.handle_exit(15, None)
        wait_until(lambda: server.app.answers._closing is not None)
        valve.is_open.set()
        assert ask.result().json()["usage"]["completion_tokens"] == 60
        wait_until(lambda: not server._thread.is_alive())


def test_drain_that_takes_too_long_ends_answers_with_a_clean_error(folder: Path, valve: Valve) -> None:
    valve.closes_after = 0
    with LiveServer(maker(folder, forward=valve.forward), drain_s=0.2) as server, ThreadPoolExecutor() as pool:
        whole = pool.submit(server.complete, "hello", **LONG)
        body = {"prompt": "x", "stream": True, **LONG}
        stream = pool.submit(server.http.post, "/v1/completions", json=body)
        run_both(server, valve)
        server.server.handle_exit(15, None)
        assert whole.result().status_code == 503
        assert "shutting down" in json.loads(stream.result().text.split("\n\n")[-2][6:])["error"]["message"]
        valve.is_open.set()
        wait_until(lambda: not server._thread.is_alive())

"""Clients that close their sending half once the request is out, as `nc -N` does: they still want the answer."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from ambidex import LLM, SamplingParams
from ambidex.attention.tiered import TieredAttention
from ambidex.models.base import CausalLM
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import call_model
from live_server import SMALL_POOL, WAIT_S, LiveServer, maker, wait_until


@contextlib.contextmanager
def half_closed(server: LiveServer, request: bytes) -> Iterator[socket.socket]:
    """A client that has sent this and says that it sends no more."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        yield connection


def completion(version: str = "1.1", **body: object) -> bytes:
    data = json.dumps({"prompt": "hello", "temperature": 0, "max_tokens": 20, "ignore_eos": True, **body}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def answer_of(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body, as a client of Python's own library reads them."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


def text_of(body: bytes) -> str:
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["text"] for event in events or [json.loads(body)])


class Gate:
    """A model whose steps wait while it is closed."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.num_waiting = 0

    def forward(self, model: CausalLM, batch: InputBatch, attention: TieredAttention) -> Tensor:
        self.num_waiting += 1
        assert self.is_open.wait(WAIT_S)
        self.num_waiting -= 1
        return call_model(model, batch, attention)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.is_open.set()


@pytest.mark.parametrize("is_stream", [False, True])
def test_half_closed_client_gets_its_answer(server: LiveServer, offline: LLM, is_stream: bool) -> None:
    params = SamplingParams(max_output_tokens=20, temperature=0.0, ignore_eos=True)
    wanted = offline.generate("hello", params)[0].text
    with half_closed(server, completion(stream=is_stream)) as connection:
        status, body = answer_of(connection)
    assert (status, text_of(body)) == (200, wanted)
    assert (b"[DONE]" in body) == is_stream


@pytest.mark.parametrize("is_stream", [False, True])
def test_answer_that_takes_long_comes_to_a_half_closed_client_too(
    folder: Path, offline: LLM, gate: Gate, is_stream: bool
) -> None:
    wanted = offline.generate("hello", SamplingParams(max_output_tokens=20, temperature=0.0, ignore_eos=True))[0].text
    with (
        LiveServer(maker(folder, forward=gate.forward, **SMALL_POOL)) as server,
        half_closed(server, completion(stream=is_stream)) as connection,
    ):
        wait_until(lambda: gate.num_waiting == 1)
        probe = b":\n\n" if is_stream else b"100 Continue"
        seen = b""
        while seen.count(probe) < 4:  # it has been asked again and again whether it is there
            seen += connection.recv(65536, socket.MSG_PEEK)[len(seen) :]
        gate.is_open.set()
        status, body = answer_of(connection)
    assert (status, text_of(body)) == (200, wanted)


@pytest.mark.parametrize("is_stream", [False, True])
def test_client_that_leaves_after_it_has_half_closed_is_noticed(folder: Path, gate: Gate, is_stream: bool) -> None:
    with LiveServer(maker(folder, forward=gate.forward, **SMALL_POOL)) as server:
        with half_closed(server, completion(stream=is_stream)):
            wait_until(lambda: gate.num_waiting == 1)
        wait_until(lambda: server.status()["num_open"] == 0)  # while the step still waits
        gate.is_open.set()
        wait_until(server.is_idle)
        assert 'reason="gone"' in server.http.get("/metrics").text


def test_half_closed_client_gets_what_is_no_answer_of_the_model(server: LiveServer) -> None:
    with half_closed(server, b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n") as connection:
        status, body = answer_of(connection)
    assert (status, json.loads(body)["data"][0]["id"]) == (200, "tiny")


@pytest.mark.parametrize("request_bytes", [completion()[:-3], completion()[:40], completion("1.0")])
def test_request_that_was_cut_or_cannot_be_asked_back_ends_the_connection(
    server: LiveServer, request_bytes: bytes
) -> None:
    with half_closed(server, request_bytes) as connection:
        assert b" 200 " not in connection.recv(65536)
    wait_until(server.is_idle)

"""What the server's own connection does: pieces of a stream at once and in order, for slow readers, too."""

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from torch import Tensor

from ambidex import LLM, SamplingParams
from ambidex.engine.outputs import RequestOutput
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import call_model
from ambidex.server.connection import Connection
from ambidex.server.writers import Choice, CompletionWriter
from live_server import SMALL_POOL, WAIT_S, LiveServer, maker, wait_until


@contextlib.contextmanager
def asked(server: LiveServer, **body: object) -> Iterator[socket.socket]:
    data = json.dumps({"prompt": "hello", "temperature": 0, "stream": True, **body}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection.sendall(head.encode() + data)
        yield connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(65536):
        data += part
    return data


def chunks_of(data: bytes) -> list[bytes]:
    """The body of a chunked response, chunk by chunk; each length is held against what follows it."""
    rest, chunks = data.partition(b"\r\n\r\n")[2], []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size, 16)
        assert rest[length : length + 2] == b"\r\n"
        chunks.append(rest[:length])
        rest = rest[length + 2 :]
    assert chunks.pop() == b""
    return chunks


def texts_of(chunks: list[bytes]) -> list[str]:
    lines = b"".join(chunks).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2]]


def next_chunk(stream: BinaryIO) -> bytes:
    """Wait for one chunk of a response."""
    chunk = stream.read(int(stream.readline(), 16))
    assert stream.readline() == b"\r\n"
    return chunk


def test_each_token_is_a_chunk_of_its_own_in_order(folder: Path, offline: LLM) -> None:
    """Each step waits until the client has the token of the one before: what comes together may be joined."""
    params = SamplingParams(max_output_tokens=30, temperature=0.0, ignore_eos=True)
    wanted = offline.generate("hello", params)[0].text
    may_step, texts = threading.Semaphore(0), []

    def forward(model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        assert may_step.acquire(timeout=WAIT_S)
        return call_model(model, batch, attention)

    with (
        LiveServer(maker(folder, forward=forward, **SMALL_POOL)) as server,
        asked(server, max_tokens=30, ignore_eos=True, logprobs=1) as connection,
        connection.makefile("rb") as file,
    ):
        may_step.release()
        while file.readline() != b"\r\n":
            pass  # the head
        for place in range(30):
            first, *others = next_chunk(file).decode().split("\n\n")
            assert others == (["data: [DONE]", ""] if place == 29 else [""]), "the last ends the answer, too"
            (choice,) = json.loads(first[6:])["choices"]
            assert len(choice["logprobs"]["tokens"]) == 1
            texts.append(choice["text"])
            may_step.release()
        assert next_chunk(file) == b""
    assert "".join(texts) == wanted


def test_several_choices_of_one_stream_come_whole(server: LiveServer, offline: LLM) -> None:
    wanted = offline.generate("hello", SamplingParams(max_output_tokens=12, temperature=0.0, ignore_eos=True))[0].text
    with asked(server, max_tokens=12, ignore_eos=True, n=4) as connection:
        body = b"".join(chunks_of(read_all(connection))).decode()
    texts = ["", "", "", ""]
    for line in body.split("\n\n")[:-2]:
        for choice in json.loads(line[6:])["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [wanted] * 4


def test_client_that_does_not_read_gets_all_of_it_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = CompletionWriter.advance

    def padded(self: CompletionWriter, idx: int, output: RequestOutput) -> list[Choice]:
        """More than sockets hold."""
        return [{**choice, "padding": "x" * 400_000} for choice in own(self, idx, output)]

    with LiveServer(maker(folder, **SMALL_POOL)) as server:
        plain = server.complete("hello", max_tokens=40, ignore_eos=True).json()["choices"][0]["text"]
        monkeypatch.setattr(CompletionWriter, "advance", padded)
        with asked(server, max_tokens=40, ignore_eos=True) as connection:
            wait_until(lambda: [answer.num_output_tokens for answer in server.app.answers._open.values()] == [40] * 2)
            chunks = chunks_of(read_all(connection))
        assert "".join(texts_of(chunks)) == plain
        assert len(chunks) < 40, "what came while the client did not read was joined"


@pytest.mark.parametrize("is_pushed", [True, False])
def test_answer_that_cannot_be_written_fails_alone(
    folder: Path, offline: LLM, monkeypatch: pytest.MonkeyPatch, *, is_pushed: bool
) -> None:
    # Bug: its error had another code where the reader wrote than where pieces were written as they came.
    own = CompletionWriter.advance

    def broken(self: CompletionWriter, idx: int, output: RequestOutput) -> list[Choice]:
        if len(output.token_ids) > 3 and output.prompt_token_ids[0] == 3 + ord("b"):
            raise RuntimeError("made to fail")
        return own(self, idx, output)

    monkeypatch.setattr(CompletionWriter, "advance", broken)
    if not is_pushed:
        monkeypatch.setattr(Connection, "can_write", False)
    wanted = offline.generate("hello", SamplingParams(max_output_tokens=16, temperature=0.0, ignore_eos=True))[0].text
    with LiveServer(maker(folder, **SMALL_POOL)) as server:
        with asked(server, prompt="broken", max_tokens=16, ignore_eos=True) as one, asked(
            server, max_tokens=16, ignore_eos=True
        ) as other:  # fmt: skip
            last = b"".join(chunks_of(read_all(one))).decode().split("\n\n")[-2]
            error = json.loads(last[6:])["error"]
            assert (error["type"], error["code"]) == ("server_error", "request_failed")
            assert "".join(texts_of(chunks_of(read_all(other)))) == wanted
        wait_until(server.is_idle)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/models", 200), ("GET", "/v1/models/tiny", 200), ("PUT", "/v1/models", 405), ("GET", "/", 200),
     ("GET", "/openapi.json", 200), ("POST", "/v1/chat/completions/", 307), ("GET", "/v1/chat/completions", 405)],
)  # fmt: skip
def test_routes_that_have_a_short_way_and_those_that_have_none(
    server: LiveServer, method: str, path: str, status: int
) -> None:
    response = server.http.request(method, path)
    assert response.status_code == status
    assert "x-request-id" in response.headers
    assert response.headers["x-content-type-options"] == "nosniff"

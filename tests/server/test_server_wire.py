"""Messages between server and engine: equal on the other side, and nothing else gets through."""

import asyncio
import random
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ambidex.core import errors
from ambidex.core.errors import ContextLengthError, InternalError, RequestError
from ambidex.core.ids import Fallback, Lane, RequestId, Tier
from ambidex.core.request import FinishReason, Request, SamplingParams
from ambidex.core.sparsity import CacheFigures, NeuronFigures
from ambidex.core.step import SampledToken
from ambidex.engine.outputs import RequestOutput
from ambidex.engine.pulse import Beat, Stage
from ambidex.engine.stats import EngineStats
from ambidex.engine.status import EngineStatus
from ambidex.server.worker import wire
from ambidex.server.worker.wire import Channel, PieceReader, Pieces, PieceWriter, SentError, StatusIs, Submit

REQUEST = Request(
    request_id=RequestId("req-7"),
    prompt_token_ids=(1, 2, 3),
    params=SamplingParams(stop=("a", "\n"), logit_bias={3: -1.5}, logprobs=2, regex="[a-z]+"),
    max_total_tokens=19,
    stop_ids=frozenset({2, 5}),
    tenant="t",
    cache_salt="s",
    priority=-3,
)


async def exchange(
    received: Any, act: Callable[[Channel, socket.socket], None], **limits: int
) -> tuple[list[Any], Any]:
    """What the other end takes of what is sent, and why it lost the connection."""
    taken: list[Any] = []
    lost: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    own, others = socket.socketpair()
    raw = own.dup()
    sender = Channel(received, taken.append, lambda _: None)
    receiver = Channel(received, taken.append, lost.set_result, **limits)
    loop = asyncio.get_running_loop()
    await loop.create_unix_connection(lambda: sender, sock=own)
    await loop.create_unix_connection(lambda: receiver, sock=others)
    act(sender, raw)
    sender.close()
    raw.close()
    return taken, await asyncio.wait_for(lost, 10)


def test_request_arrives_as_it_was() -> None:
    taken, error = asyncio.run(exchange(wire.ToEngine, lambda channel, _: channel.send(Submit.of(REQUEST))))
    assert error is None
    there = taken[0].request()
    assert [getattr(there, name) for name in Request.__slots__] == [
        getattr(REQUEST, name) for name in Request.__slots__
    ]


def test_status_arrives_as_it_was() -> None:
    cache = CacheFigures(num_active=9, num_hits=8, num_moves=1, num_moved=2, num_failed_moves=0, moved_bytes=64)
    neurons = NeuronFigures(num_neurons=99, num_active=9, num_rows=50, num_rows_read=5, cache=cache)
    stats = EngineStats(num_steps=3, kv_bytes={Tier.GPU: 5}, seconds={"total": 0.5}, neurons=neurons)
    stats.lane_bytes[Lane.CPU] += 7
    stats.fallbacks[Fallback.NO_AVX2] += 1
    status = EngineStatus(
        stats=stats,
        num_waiting=1,
        num_running=2,
        capacity_bytes={Tier.DRAM: 9},
        weights_bytes={},
        beat=Beat(Stage.EXECUTE, 1.5),
        last_token_s=None,
    )
    taken, _ = asyncio.run(exchange(wire.ToServer, lambda channel, _: channel.send(StatusIs(1, status))))
    assert taken == [StatusIs(1, status)]
    assert taken[0].status.stats.lane_bytes[Lane.GPU] == 0


def test_outputs_in_pieces_are_the_outputs() -> None:
    rng = random.Random(4)
    writer, reader = PieceWriter(), PieceReader(REQUEST)
    text, ids, logprobs = "", [], []
    for step in range(50):
        new = [rng.randrange(1000) for _ in range(rng.randint(0, 3))]
        delta = rng.choice(("", "a", "å\N{GRINNING FACE}"))
        text, ids = text + delta, ids + new
        logprobs += [SampledToken(token_id=i, logprob=-0.5, top_logprobs=((i, float("-inf")),)) for i in new]
        output = RequestOutput(
            request_id=REQUEST.request_id,
            prompt_token_ids=REQUEST.prompt_token_ids,
            text=text,
            delta=delta,
            token_ids=tuple(ids),
            finish_reason=FinishReason.LENGTH if step == 49 else None,
            logprobs=tuple(logprobs),
            num_cached_tokens=2,
        )
        sent = msgspec.msgpack.encode(Pieces((writer.piece(output),)))
        there = msgspec.msgpack.decode(sent, type=wire.ToServer)
        assert isinstance(there, Pieces)
        assert reader.output(there.pieces[0]) == output


def test_messages_in_odd_cuts_are_whole() -> None:
    message = msgspec.msgpack.encode(Submit.of(REQUEST))
    data = (len(message).to_bytes(4) + message) * 20
    taken: list[Any] = []
    channel = Channel(wire.ToEngine, taken.append, lambda _: None)
    rng, start = random.Random(2), 0
    while start < len(data):
        end = start + rng.randint(1, 300)
        channel.data_received(data[start:end])
        start = end
    assert taken == [Submit.of(REQUEST)] * 20


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xff\xff\xff\xff", "a message of 4294967295 bytes"),
        (b"\x00\x00\x00\x01\xc1", "malformed"),
        (b"\x00\x00\x00\x01\x80", "type"),
        (len(b := msgspec.msgpack.encode({"type": "Leave", "request_id": 3})).to_bytes(4) + b, "request_id"),
        (len(b := msgspec.msgpack.encode({"type": "System", "command": "x"})).to_bytes(4) + b, "System"),
        (
            len(b := msgspec.msgpack.encode(Submit.of(REQUEST)).replace(b"priority", b"priorit_")).to_bytes(4) + b,
            "prio",
        ),
    ],
)
def test_what_is_no_message_ends_the_connection(data: bytes, reason: str) -> None:
    taken, error = asyncio.run(exchange(wire.ToEngine, lambda _, raw: raw.sendall(data)))
    assert taken == []
    assert reason in str(error)


def test_message_above_the_limit_is_not_sent() -> None:
    channel = Channel(wire.ToEngine, lambda _: None, lambda _: None, max_bytes=10)
    with pytest.raises(InternalError, match="at most 10"):
        channel.send(Submit.of(REQUEST))


def test_wrong_sampling_value_is_refused_on_arrival() -> None:
    data = msgspec.to_builtins(Submit.of(REQUEST))
    data["params"]["temperature"] = -1.0
    with pytest.raises(RequestError, match="temperature"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(data), type=wire.ToEngine)


@pytest.mark.parametrize(
    "error",
    [RequestError("a"), errors.TierFullError("b"), errors.ModelNotFoundError("c"), errors.RequestFailedError("d")],
)
def test_error_arrives_as_it_was(error: Exception) -> None:
    there = SentError.of(error).error()
    assert (type(there), str(there)) == (type(error), str(error))


def test_error_that_is_not_ours_or_takes_more_becomes_the_nearest() -> None:
    assert type(SentError.of(ContextLengthError(5, 4)).error()) is RequestError
    there = SentError.of(ZeroDivisionError("x")).error()
    assert (type(there), str(there)) == (InternalError, "ZeroDivisionError: x")

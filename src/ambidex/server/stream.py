"""Server-sent events, and work that ends when its client goes away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ambidex.server.connection import Connection, find_connection

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"

_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

_encode = msgspec.json.Encoder().encode  # once: it is called for each token


SEND = "ambidex.send"
"""Where the gate leaves its own `send`: the layers between only look at whether a response has begun, and every chunk
of every stream would go through all of them."""


class ClientGoneError(Exception):
    """The client closed the connection; nobody is there to be answered."""


def event(value: object) -> bytes:
    """One event."""
    return b"data: " + _encode(value) + b"\n\n"


class ChunkFrame:
    """What all chunks of one answer have in common, written once: only their choices differ.

    Args:
        before, after: fields of a chunk before and behind its `choices`.
    """

    def __init__(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        self._head = b"data: " + _encode(before)[:-1] + b',"choices":['
        self._tail = b"]" + (b"," if after else b"") + _encode(after)[1:] + b"\n\n"

    def event(self, choice: Mapping[str, Any]) -> bytes:
        """One event, of one choice."""
        return self._head + _encode(choice) + self._tail


class LastFrame(bytes):
    """The last frame of a stream: it leaves together with what ends the response."""


def comment(text: str) -> bytes:
    """A line that clients skip and proxies count as life."""
    return f": {text}\n\n".encode()


async def while_connected(scope: Scope, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do some work; cancel it when the client goes away. The request's body must have been read.

    Raises:
        ClientGoneError: the client went away first.
    """
    connection, task = find_connection(scope), asyncio.current_task()
    if connection is None or task is None:
        return await _while_watched(receive, work)
    if connection.is_gone:
        work.close()
        raise ClientGoneError
    connection.when_gone = task.cancel
    try:
        return await work
    except asyncio.CancelledError:
        if not connection.is_gone:
            raise
        task.uncancel()
        raise ClientGoneError from None
    finally:
        connection.when_gone = None


async def _while_watched(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The same where only a message tells that the client has gone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for other in (task, watch):
            other.cancel()
            with contextlib.suppress(BaseException):
                await other


class EventStream(Response):
    """A response of events; `frames` is closed as soon as the client goes away.

    Args:
        frames: whole events as bytes; a `LastFrame` is followed by none.
    """

    def __init__(self, frames: AsyncIterator[bytes]) -> None:  # `Response` would make headers of a body anew each time
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = list(_HEADERS)
        self._frames = frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the frames as they come."""
        connection = find_connection(scope)
        if connection is not None:
            connection.takes_comments = True
        with contextlib.suppress(ClientGoneError):
            await while_connected(scope, receive, self._send_all(scope.get(SEND, send), connection))

    async def _send_all(self, send: Send, connection: Connection | None) -> None:
        async with contextlib.aclosing(self._frames) as frames:  # type: ignore[type-var]
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            is_open = True
            async for frame in frames:
                is_open = not isinstance(frame, LastFrame)
                if is_open and connection is not None and connection.can_write:
                    connection.write_chunk(frame)
                    continue
                if connection is not None:
                    connection.flush()
                await send({"type": "http.response.body", "body": frame, "more_body": is_open})
            if is_open:
                await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

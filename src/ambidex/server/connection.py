"""`Connection`: uvicorn's HTTP connection, with three things more.

**Half-closed clients.** `printf 'POST …' | nc -N HOST PORT`, or a socket after `shutdown(SHUT_WR)`: the server reads
the end of the client's words, and a client that has gone altogether looks just the same. The two are told apart by
writing, since the system of a client that is gone answers with a reset, which the next write finds. What is written is
nothing to a client: before the answer an interim response (RFC 9110, 15.2: clients skip those that they do not expect),
in a stream of events a comment.

**Told of the end.** Who answers says what to call when the client goes: no task has to wait for that.

**Chunks.** A piece of a stream goes to the socket in one call, without a message to the layers between, once the event
loop has done what else there is: a step of the engine brings a token to every stream, and each write may give the
processor to a client.
"""

from collections.abc import Callable
from typing import Final

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CONNECTION: Final = "ambidex.connection"
"""Where the scope of a request has its connection."""
_INTERIM: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT: Final = b"3\r\n:\n\n\r\n"  # as a chunk
_FIRST_S: Final = 0.02
"""Between the first two writes; the time doubles up to the last, so that a reset from far away is found, too."""
_LAST_S: Final = 1.0


class Connection(HttpToolsProtocol):
    """One connection of a client; of its requests one is answered at a time."""

    when_gone: Callable[[], object] | None = None
    """Called once when the client has gone, unless it is None then."""
    is_gone = False
    _pending = b""
    takes_comments = False
    """The response is a stream of events, in which a comment may stand between two writes."""

    def on_message_begin(self) -> None:
        """httptools: a request begins."""
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]
        self.takes_comments = False

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: there is no connection any more."""
        super().connection_lost(exc)
        self.is_gone = True
        self._pending = b""
        if self.when_gone is not None:
            self.when_gone()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own: true keeps the sending half open
        """asyncio: the client says no more."""
        cycle = self.cycle
        is_answered = cycle is None or cycle.response_complete
        if is_answered or cycle.more_body or self.pipeline or self.scope["http_version"] != "1.1":
            return False
        cycle.keep_alive = False
        self._probe(_FIRST_S)
        return True

    @property
    def can_write(self) -> bool:
        """A piece of the response that is running may go to the socket at once."""
        cycle = self.cycle
        return not (self.flow.write_paused or cycle.disconnected or self.pipeline) and bool(cycle.chunked_encoding)

    def write_chunk(self, data: bytes) -> None:
        """Send a piece of the response that is running, at least one byte, if `can_write`."""
        if not self._pending:
            self.loop.call_soon(self.flush)
        self._pending += data

    def flush(self) -> None:
        """Give the socket what `write_chunk` has taken; to be called before anything else is sent."""
        data, self._pending = self._pending, b""
        if data:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _probe(self, wait_s: float) -> None:
        """Write something that is nothing, and again after a while, until the answer is complete or the write fails."""
        cycle = self.cycle
        if cycle.response_complete or self.transport.is_closing():
            return
        self.flush()
        if not cycle.response_started:
            self.transport.write(_INTERIM)
        elif self.takes_comments and cycle.chunked_encoding:
            self.transport.write(_COMMENT)
        self.loop.call_later(wait_s, self._probe, min(2 * wait_s, _LAST_S))


def find_connection(scope: Scope) -> Connection | None:
    """The connection that a request came by; None: another server than ours took it in."""
    connection: Connection | None = scope.get(CONNECTION)
    return connection

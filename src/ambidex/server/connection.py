"""`Connection`: uvicorn's HTTP connection, which also answers clients that have closed their sending half.

`printf 'POST …' | nc -N HOST PORT`, or a socket after `shutdown(SHUT_WR)`: the server reads the end of the client's
words, and a client that has gone altogether looks just the same. The two are told apart by writing, since the system of
a client that is gone answers with a reset, which the next write finds. What is written is nothing to a client: before
the answer an interim response (RFC 9110, 15.2: clients skip those that they do not expect), in a stream of events a
comment.
"""

from typing import Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

IS_EVENTS: Final = "ambidex.is_events"
"""In the scope: the response is a stream of events, in which a comment may stand between two writes."""
_INTERIM: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT: Final = b"3\r\n:\n\n\r\n"  # as a chunk
_FIRST_S: Final = 0.02
"""Between the first two writes; the time doubles up to the last, so that a reset from far away is found, too."""
_LAST_S: Final = 1.0


class Connection(HttpToolsProtocol):
    """One connection of a client."""

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio's own: true keeps the sending half open
        """The client says no more."""
        cycle = self.cycle
        is_answered = cycle is None or cycle.response_complete
        if is_answered or cycle.more_body or self.pipeline or self.scope["http_version"] != "1.1":
            return False
        cycle.keep_alive = False
        self._probe(_FIRST_S)
        return True

    def _probe(self, wait_s: float) -> None:
        """Write something that is nothing, and again after a while, until the answer is complete or the write fails."""
        cycle = self.cycle
        if cycle.response_complete or self.transport.is_closing():
            return
        if not cycle.response_started:
            self.transport.write(_INTERIM)
        elif self.scope.get(IS_EVENTS) and cycle.chunked_encoding:
            self.transport.write(_COMMENT)
        self.loop.call_later(wait_s, self._probe, min(2 * wait_s, _LAST_S))

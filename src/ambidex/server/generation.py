"""From a checked body to an answer: queue the choices, then write them whole or as a stream of events."""

import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from ambidex.core.errors import AmbidexError
from ambidex.engine.outputs import RequestOutput
from ambidex.server.answers import Answer, Answers
from ambidex.server.connection import find_connection
from ambidex.server.errors import answer_for
from ambidex.server.gate import record_of
from ambidex.server.metrics import Metrics
from ambidex.server.stream import DONE, ChunkFrame, EventStream, LastFrame, comment, event, while_connected
from ambidex.server.writers import Writer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request for an answer, checked and ready to run."""

    answer: Answer
    writer: Writer
    model: str
    num_choices: int
    num_each: int
    """Choices of each prompt, side by side."""
    num_prompt_tokens: int
    """Each prompt counted once, however many choices it has."""
    is_stream: bool
    has_usage: bool
    warnings: tuple[str, ...]
    ping_s: float
    created_s: int = field(default_factory=lambda: int(time.time()))

    async def respond(self, http: HttpRequest, answers: Answers, metrics: Metrics) -> Response:
        """Run it.

        Raises:
            AmbidexError: the engine is not ready or has failed; in a stream it becomes an event.
        """
        answers.add(self.answer, self._names(http), self.num_choices)
        try:
            self.answer.start()
        except BaseException:
            answers.remove(self.answer, self._names(http), self.num_choices)
            raise
        metrics.prompt_tokens.inc(self.num_prompt_tokens)
        if self.is_stream:
            return EventStream(self._events(http, answers, metrics))
        try:
            outputs = await while_connected(http.scope, http.receive, self._collect())
        finally:
            self._close(http, answers, metrics)
        return JSONResponse(self._whole(outputs))

    def _names(self, http: HttpRequest) -> list[tuple[str, str]]:
        """By what it can be aborted: its own id, and the request's; each with the client's name."""
        record = record_of(http)
        return [(record.client, self.answer.id), (record.client, record.request_id)]

    async def _collect(self) -> list[RequestOutput]:
        outputs: dict[int, RequestOutput] = {}
        while not self.answer.is_finished:
            outputs.update(await self.answer.next())
        return [outputs[idx] for idx in range(self.num_choices)]

    async def _events(self, http: HttpRequest, answers: Answers, metrics: Metrics) -> AsyncIterator[bytes]:
        last: dict[int, RequestOutput] = {}
        warnings: dict[str, Any] = {"warnings": list(self.warnings)} if self.warnings else {}
        usage: dict[str, Any] = {"usage": None} if self.has_usage else {}
        first = ChunkFrame(self._head(), usage | warnings)
        frame = first if self.writer.kind == "text_completion" else ChunkFrame(self._head(), usage)
        tail = b""
        connection = find_connection(http.scope)

        def push(idx: int, output: RequestOutput) -> bool:
            if connection is None or not connection.can_write:
                return False
            events = b"".join(map(frame.event, self.writer.advance(idx, output)))
            if events:
                connection.write_chunk(events)
            return True

        try:
            for idx in range(self.num_choices):
                for choice in self.writer.begin(idx):
                    yield first.event(choice)
            while not self.answer.is_finished:
                news = await self.answer.next(self.ping_s or None)
                if not news:
                    done, total = await self.answer.progress()
                    yield comment(f"{done} of {total} prompt tokens are computed" if done < total else "ping")
                events = b""
                for idx, output in news:
                    last[idx] = output
                    for choice in self.writer.advance(idx, output):
                        events += frame.event(choice)
                if self.answer.is_finished:
                    tail = events
                elif events:
                    yield events
                    self.answer.push_to(push)  # what has begun
            if self.has_usage:
                outputs = [last[idx] for idx in range(self.num_choices)]
                tail += event(self._head() | {"choices": [], "usage": self._usage(outputs)})
            yield LastFrame(tail + DONE)  # all of it is there at once: one write
        except Exception as error:  # the status has been sent: all that is left is an event
            answer = answer_for(error)
            if not isinstance(error, AmbidexError):
                logger.exception("answer %s cannot be written", self.answer.id)
            elif answer.status >= 500:
                logger.warning("answer %s ends with an error: %s", self.answer.id, answer.message)
            record_of(http).status = answer.status
            yield LastFrame(event(answer.body()))
        finally:
            self._close(http, answers, metrics)

    def _head(self) -> dict[str, Any]:
        """What every chunk begins with."""
        return {
            "id": self.answer.id,
            "object": self.writer.chunk_kind,
            "created": self.created_s,
            "model": self.model,
        }

    def _whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        body = {
            "id": self.answer.id,
            "object": self.writer.kind,
            "created": self.created_s,
            "model": self.model,
            "choices": [self.writer.whole(idx, output) for idx, output in enumerate(outputs)],
            "usage": self._usage(outputs),
        }
        return {**body, "warnings": list(self.warnings)} if self.warnings else body

    def _usage(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        num_output = sum(len(output.token_ids) for output in outputs)
        num_cached = sum(output.num_cached_tokens for output in outputs[:: self.num_each])
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_output,
            "total_tokens": self.num_prompt_tokens + num_output,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }

    def _close(self, http: HttpRequest, answers: Answers, metrics: Metrics) -> None:
        """End what still runs, and book what has come."""
        answer = self.answer
        answer.end()
        answers.remove(answer, self._names(http), self.num_choices)
        metrics.answer_tokens.inc(answer.num_output_tokens)
        reasons = ["gone" if reason == "open" else reason for reason in answer.finish_reasons]
        for reason in reasons:
            metrics.finished.labels(reason).inc()
        record_of(http).stages = [
            (name, since_s)
            for name, since_s in (("queued", answer.begun_s), ("first token", answer.first_token_s))
            if since_s is not None
        ]
        first_s = None if answer.first_token_s is None else round(answer.first_token_s - answer.begun_s, 4)
        record_of(http).fields.update(
            answer=answer.id,
            prompt_tokens=self.num_prompt_tokens,
            output_tokens=answer.num_output_tokens,
            first_token_s=first_s,
            finish=",".join(reasons),
        )

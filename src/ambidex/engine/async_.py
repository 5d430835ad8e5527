"""`AsyncLLM`: the engine in a thread of its own, answers as asynchronous streams."""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ambidex.core.config import EngineConfig
from ambidex.core.errors import AmbidexError, CallerError, InternalError
from ambidex.core.ids import RequestId
from ambidex.core.request import SamplingParams
from ambidex.engine.build import build_engine
from ambidex.engine.engine import Engine, Prompt
from ambidex.engine.outputs import RequestOutput

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Reader:
    """Where the replies of one request go: a queue that belongs to the caller's event loop."""

    loop: asyncio.AbstractEventLoop
    replies: "asyncio.Queue[RequestOutput | AmbidexError]"
    is_left: threading.Event
    request_id: RequestId | None = None  # set and read by the engine thread alone

    def put(self, reply: RequestOutput | AmbidexError) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.replies.put_nowait, reply)


class AsyncLLM:
    """The asynchronous form of `LLM`; the same arguments and errors. Safe to use from several tasks at once."""

    def __init__(
        self, model: str | EngineConfig, *, progress: Callable[[int, int], None] | None = None, **settings: Any
    ) -> None:
        config = EngineConfig.of(model, settings)
        self._engine: Engine = build_engine(config, progress=progress)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._readers: dict[RequestId, _Reader] = {}
        self._fatal: AmbidexError | None = None
        self._thread = threading.Thread(target=self._run, name="ambidex-engine", daemon=True)
        self._thread.start()

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """Answer one prompt, piece by piece. Leaving the loop, or cancelling the task, ends the request.

        Raises:
            RequestError: the prompt or its parameters are wrong.
        """
        own = params or SamplingParams()
        async for output in self._ask(lambda: self._engine.add(prompt, own)):
            yield output

    async def chat(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation, piece by piece."""
        own = params or SamplingParams()
        async for output in self._ask(lambda: self._engine.add(self._engine.render_chat(messages), own)):
            yield output

    async def abort(self, request_id: RequestId) -> None:
        """End a request; its stream ends with finish reason `abort`."""
        self._inbox.put(lambda: self._abort(request_id))

    async def close(self) -> None:
        """End all requests and the engine's thread."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, add: Callable[[], RequestId]) -> AsyncIterator[RequestOutput]:
        reader = _Reader(asyncio.get_running_loop(), asyncio.Queue(), threading.Event())
        self._inbox.put(lambda: self._add(add, reader))
        if self._fatal is not None:  # looked at after the put: see `_end`
            raise self._fatal
        is_finished = False
        try:
            while not is_finished:
                reply = await reader.replies.get()
                if isinstance(reply, AmbidexError):
                    is_finished = True
                    raise reply
                is_finished = reply.is_finished
                yield reply
        finally:
            if not is_finished:
                reader.is_left.set()
                self._inbox.put(lambda: self._leave(reader))

    def _add(self, add: Callable[[], RequestId], reader: _Reader) -> None:
        """Queue a request; whatever is wrong with it is its own caller's affair."""
        if self._fatal is not None:
            reader.put(self._fatal)
        if reader.is_left.is_set() or self._fatal is not None:
            return
        try:
            reader.request_id = add()
        except CallerError as error:
            reader.put(error)
        except Exception as error:  # one request never ends the others
            logger.exception("a request could not be queued")
            reader.put(InternalError(f"the request could not be queued: {type(error).__name__}: {error}"))
        else:
            self._readers[reader.request_id] = reader

    def _abort(self, request_id: RequestId) -> None:
        output = self._engine.abort(request_id)
        reader = self._readers.pop(request_id, None)
        if reader is not None and output is not None:
            reader.put(output)

    def _leave(self, reader: _Reader) -> None:
        """The caller reads no more."""
        if reader.request_id is not None:
            self._readers.pop(reader.request_id, None)
            self._engine.abort(reader.request_id)

    def _run(self) -> None:
        """The engine thread: take in messages, step while there is work, hand out outputs."""
        try:
            while self._take_messages():
                for output in self._engine.step():
                    reader = self._readers.get(output.request_id)
                    if reader is not None:
                        reader.put(output)
                    if output.is_finished:
                        self._readers.pop(output.request_id, None)
            self._engine.abort_all()
            self._end(InternalError("the engine was closed"))
        except BaseException as error:
            # The engine's state is unknown now: every waiting caller is told, nobody hangs.
            logger.exception("the engine thread failed")
            self._end(InternalError(f"the engine failed: {error}"))

    def _take_messages(self) -> bool:
        """Carry out what the inbox holds; waits while the engine is idle. False: close."""
        while True:
            try:
                message = self._inbox.get(block=not self._engine.has_work)
            except queue.Empty:
                return True
            if message is None:
                return False
            message()

    def _end(self, error: AmbidexError) -> None:
        """Tell every caller, also those whose message is still in the inbox or comes later."""
        self._fatal = error
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._inbox.get_nowait()
                if message is not None:
                    message()
        for reader in self._readers.values():
            reader.put(error)
        self._readers.clear()

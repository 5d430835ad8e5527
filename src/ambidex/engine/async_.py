"""`AsyncLLM`: the engine in a thread of its own, answers as asynchronous streams."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from ambidex.core.config import EngineConfig
from ambidex.core.errors import AmbidexError, CallerError, InternalError
from ambidex.core.ids import RequestId
from ambidex.core.request import Request, SamplingParams
from ambidex.engine.client import Put, Reply
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.engine.outputs import RequestOutput
from ambidex.engine.pulse import Stage
from ambidex.engine.report import EngineReport
from ambidex.engine.run_plan import DecodeOutcome
from ambidex.engine.status import EngineStatus
from ambidex.engine.text_side import Prompt, TextSide
from ambidex.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_FAILED_STEPS: Final = 3
"""A step that fails harms the requests in it; after so many with no token computed between, the machine is to blame."""
CHORE_S: Final = 0.01
"""Before an idle engine looks again whether the disk takes more."""


@dataclass(slots=True, eq=False)
class _Reader:
    """Where the replies of one request go: `put` is called on the caller's event loop until the caller leaves."""

    loop: asyncio.AbstractEventLoop
    put: Put
    is_left: threading.Event
    request_id: RequestId | None = None  # set and read by the engine thread alone


class AsyncLLM:
    """The asynchronous form of `LLM`; the same arguments and errors. Safe to use from several tasks at once.

    Args:
        model: a folder, a `.gguf` file, a Hub id, `smollm2`, a whole `EngineConfig`, or an engine that is built.
    """

    def __init__(
        self,
        model: str | EngineConfig | Engine,
        *,
        progress: Callable[[int, int], None] | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(model, Engine):
            model = build_engine(EngineConfig.of(model, settings), progress=progress)
        self._engine: Engine = model
        self._stats = self._engine.stats.copy()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._readers: dict[RequestId, _Reader] = {}
        self._num_failed_steps = 0  # since tokens were last computed
        self._fatal: AmbidexError | None = None
        self._save_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="ambidex-engine", daemon=True)
        self._thread.start()

    @property
    def report(self) -> EngineReport:
        """What the settings became on this machine."""
        return self._engine.report

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._engine.tokenizer

    @property
    def max_context_len(self) -> int:
        """Tokens of prompt and answer together, at most."""
        return self._engine.max_context_len

    @property
    def text(self) -> TextSide:
        """What makes requests of prompts."""
        return self._engine.text

    @property
    def fault(self) -> AmbidexError | None:
        """Why the engine takes no requests any more; None while it does."""
        return self._fatal

    async def ended(self) -> AmbidexError:
        """Wait until the engine takes no requests any more; returns why."""
        await asyncio.to_thread(self._thread.join)
        assert self._fatal is not None, "the thread sets it before it ends"
        return self._fatal

    async def status(self) -> EngineStatus:
        """Counters and queue as of the last step, and where the engine's thread is now."""
        scheduler, pulse = self._engine.core.scheduler, self._engine.core.pulse
        return EngineStatus(
            stats=self._stats,
            num_waiting=scheduler.num_waiting,
            num_running=scheduler.num_running,
            capacity_bytes=self._engine.kv_capacity,
            weights_bytes=self._engine.weights_bytes,
            beat=pulse.now,
            last_token_s=pulse.last_token_s,
        )

    async def decode_outcome(self) -> DecodeOutcome | None:
        """Decode steps so far beside what was predicted of them; None: no decode step has run."""
        return self._engine.decode_outcome()

    async def probe(self) -> None:
        """Return when the engine's thread has taken in a message: at once if it is idle, else after the step.

        Raises:
            InternalError: the engine has ended.
        """
        loop, answer = asyncio.get_running_loop(), asyncio.Event()
        self._inbox.put(lambda: _call(loop, answer.set))
        if self._fatal is not None:
            raise self._fatal
        await answer.wait()

    async def check_guide(self, params: SamplingParams) -> None:
        """Compile the grammar of the parameters, if they have one, and keep it for the requests to come.

        Raises:
            RequestError: it is not valid, not known in all its parts, or too large.
        """
        await asyncio.to_thread(self._engine.check_guide, params)

    def submit(self, request: Request, put: Put) -> Callable[[], None]:
        """Queue a checked request.

        Args:
            put: called on the running event loop with every output and, if the engine cannot go on, with the error.
        Returns:
            A function that ends the request and the calls of `put`; to be called when the caller reads no more.
        Raises:
            InternalError: the engine has ended.
        """
        return self._open(lambda: self._engine.submit(request), put)

    async def num_computed_tokens(self, request_ids: Sequence[RequestId]) -> list[int]:
        """Tokens of live requests that are computed so far; 0 for one that is not known."""
        return [self._engine.num_computed_tokens(request_id) for request_id in request_ids]

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """Answer one prompt, piece by piece. Leaving the loop, or cancelling the task, ends the request.

        Raises:
            RequestError: the prompt or its parameters are wrong.
        """
        own = params or SamplingParams()
        async for output in self._ask(lambda: self._engine.add(prompt, own)):
            yield output

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Answer a conversation, piece by piece."""
        own = params or SamplingParams()
        async for output in self._ask(lambda: self._engine.add(self._engine.text.render_chat(messages), own)):
            yield output

    async def drop_cached(self, tenant: str | None = None) -> int:
        """Forget what the prefix cache holds, of one tenant or of all; returns the blocks that it held.

        Raises:
            InternalError: the engine has ended.
        """
        loop, dropped = asyncio.get_running_loop(), asyncio.Queue[int]()
        self._inbox.put(lambda: _call(loop, dropped.put_nowait, self._engine.drop_cached(tenant)))
        if self._fatal is not None:
            raise self._fatal
        return await dropped.get()

    async def abort(self, request_id: RequestId) -> None:
        """End a request; its stream ends with finish reason `abort`."""
        self._inbox.put(lambda: self._abort(request_id))

    async def close(self, save_s: float | None = None) -> None:
        """End all requests and the engine's thread.

        Args:
            save_s: most seconds for saving what is to outlive the process; None: as many as it takes.
        """
        self._save_s = save_s
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _ask(self, add: Callable[[], RequestId]) -> AsyncIterator[RequestOutput]:
        replies: asyncio.Queue[Reply] = asyncio.Queue()
        leave = self._open(add, replies.put_nowait)
        is_finished = False
        try:
            while not is_finished:
                reply = await replies.get()
                if isinstance(reply, AmbidexError):
                    is_finished = True
                    raise reply
                is_finished = reply.is_finished
                yield reply
        finally:
            if not is_finished:
                leave()

    def _open(self, add: Callable[[], RequestId], put: Put) -> Callable[[], None]:
        reader = _Reader(asyncio.get_running_loop(), put, threading.Event())
        self._inbox.put(lambda: self._add(add, reader))
        if self._fatal is not None:  # looked at after the put: see `_end`
            raise self._fatal

        def leave() -> None:
            reader.is_left.set()
            self._inbox.put(lambda: self._leave(reader))

        return leave

    def _add(self, add: Callable[[], RequestId], reader: _Reader) -> None:
        """Queue a request; whatever is wrong with it is its own caller's affair."""
        if self._fatal is not None:
            _hand_out([(reader, self._fatal)])
        if reader.is_left.is_set() or self._fatal is not None:
            return
        try:
            reader.request_id = add()
        except CallerError as error:
            _hand_out([(reader, error)])
        except Exception as error:  # one request never ends the others
            logger.exception("a request could not be queued")
            reason = InternalError(f"the request could not be queued: {type(error).__name__}: {error}")
            _hand_out([(reader, reason)])
        else:
            self._readers[reader.request_id] = reader

    def _abort(self, request_id: RequestId) -> None:
        output = self._engine.abort(request_id)
        reader = self._readers.pop(request_id, None)
        if reader is not None and output is not None:
            _hand_out([(reader, output)])

    def _leave(self, reader: _Reader) -> None:
        """The caller reads no more."""
        if reader.request_id is not None:
            self._readers.pop(reader.request_id, None)
            self._engine.abort(reader.request_id)

    def _run(self) -> None:
        """The engine thread: take in messages, step while there is work, hand out outputs."""
        try:
            while self._take_messages():
                self._deliver(self._step())
            self._engine.abort_all()
            self._engine.close(save_s=self._save_s)
            self._end(InternalError("the engine was closed"))
        except BaseException as error:
            # The engine's state is unknown now: every waiting caller is told, nobody hangs.
            logger.exception("the engine thread failed")
            with contextlib.suppress(Exception):
                self._engine.close(is_trusted=False)
            self._end(InternalError(f"the engine failed: {error}"))

    def _step(self) -> list[RequestOutput]:
        """One step; one that fails has closed its books, and the next tells its requests."""
        stats = self._engine.core.stats
        num_computed = stats.num_computed_tokens
        try:
            outputs = self._engine.step()
        except Exception:
            self._num_failed_steps += 1
            if self._num_failed_steps == MAX_FAILED_STEPS:
                raise
            logger.exception("a step failed: its requests end with an error, the others go on")
            return []
        if stats.num_computed_tokens > num_computed:
            self._num_failed_steps = 0
        return outputs

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        self._engine.core.pulse.enter(Stage.DELIVER)
        replies: list[tuple[_Reader, Reply]] = []
        for output in outputs:
            reader = self._readers.get(output.request_id)
            if reader is not None:
                replies.append((reader, output))
            if output.is_finished:
                self._readers.pop(output.request_id, None)
        self._stats = self._engine.stats.copy()
        _hand_out(replies)

    def _take_messages(self) -> bool:
        """Carry out what the inbox holds; waits while the engine is idle. False: close."""
        pulse = self._engine.core.pulse
        while True:
            is_idle = not self._engine.has_work
            if is_idle:
                self._stats = self._engine.stats.copy()
                pulse.enter(Stage.IDLE)
            try:
                message = self._inbox.get(block=is_idle and not self._engine.has_chores)
            except queue.Empty:
                if not is_idle:
                    return True
                if not self._engine.do_chore():
                    time.sleep(CHORE_S)
                continue
            if message is None:
                return False
            pulse.enter(Stage.MESSAGES)
            message()

    def _end(self, error: AmbidexError) -> None:
        """Tell every caller, also those whose message is still in the inbox or comes later."""
        self._fatal = error
        with contextlib.suppress(queue.Empty):
            while True:
                message = self._inbox.get_nowait()
                if message is not None:
                    message()
        _hand_out([(reader, error) for reader in self._readers.values()])
        self._readers.clear()
        self._stats = self._engine.stats.copy()


def _hand_out(replies: Sequence[tuple[_Reader, Reply]]) -> None:
    """Carry replies to their event loops, waking each loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Reader, Reply]]] = {}
    for reader, reply in replies:
        by_loop.setdefault(reader.loop, []).append((reader, reply))
    for loop, own in by_loop.items():
        _call(loop, _put_all, own)


def _put_all(replies: Sequence[tuple[_Reader, Reply]]) -> None:
    for reader, reply in replies:
        if not reader.is_left.is_set():
            reader.put(reply)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody listens
        loop.call_soon_threadsafe(function, *args)

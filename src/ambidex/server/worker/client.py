"""`WorkerEngine`: an engine in a process of its own, as the server sees it."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ambidex.core.config import EngineConfig
from ambidex.core.errors import AmbidexError, EngineLostError, InternalError
from ambidex.core.ids import RequestId
from ambidex.core.request import Request, SamplingParams
from ambidex.engine.client import Put
from ambidex.engine.report import EngineReport
from ambidex.engine.run_plan import DecodeOutcome
from ambidex.engine.status import EngineStatus
from ambidex.engine.text_side import TextSide, read_text_side
from ambidex.server.worker.wire import (
    Abort,
    Ask,
    AskComputed,
    AskDecode,
    AskDrop,
    AskGuide,
    AskProbe,
    AskStatus,
    Channel,
    Close,
    Counts,
    DecodeIs,
    Done,
    Ended,
    Leave,
    Loading,
    PieceReader,
    Pieces,
    Ready,
    Refused,
    Start,
    StatusIs,
    Submit,
    ToServer,
)

logger = logging.getLogger(__name__)

CLOSE_S: Final = 5.0
"""For the engine to end its requests and itself, beyond the time for saving; then it is killed."""
BEAT_S: Final = 1.0
"""Between two questions that only ask for a sign of life."""
_MALLOC: Final = {"MALLOC_MMAP_THRESHOLD_": str(4 * 1024**2), "MALLOC_TRIM_THRESHOLD_": str(64 * 1024**2)}
"""What glibc's malloc gives back. Steps of changing shapes leave holes of changing sizes, and by default blocks of up
to 32 MiB come out of them: with 64 clients the process grew by 4 % in 40 s, so it does by 1 %, at the same speed
(2 cores, SmolLM2, `bench/serve_load.py`)."""
_SECRETS: Final = ("AMBIDEX_API_KEY",)
"""Variables that the engine has no use for."""


@dataclass(slots=True)
class _Open:
    """One request: where its outputs go, and what they are made of."""

    put: Put
    pieces: PieceReader


class WorkerEngine:
    """An `EngineClient`; `start` makes one.

    Args:
        silence_s: a process that answers nothing for so long is killed; time in which this process itself stood still
            (stopped, suspended) does not count.
    """

    def __init__(self, *, progress: Callable[[int, int], None], silence_s: float) -> None:
        self._progress = progress
        self._max_missed = max(2, round(silence_s / BEAT_S))
        self._channel = Channel(ToServer, self._take, self._lost)
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._open: dict[RequestId, _Open] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0
        self._is_closing = False
        self._beats: asyncio.Task[None] | None = None
        self._text: TextSide | None = None
        self._report: EngineReport | None = None
        self.fault: AmbidexError | None = None
        self._has_ended = asyncio.Event()

    @classmethod
    async def start(
        cls, config: EngineConfig, *, progress: Callable[[int, int], None], silence_s: float
    ) -> "WorkerEngine":
        """Start a process, build the engine there, and return when it is ready.

        Args:
            progress: called with (bytes read, bytes in all) while weights load.
        Raises:
            ConfigError, ModelError, MachineError: as `build_engine`.
            EngineLostError: the process ended while it built the engine.
        """
        engine = cls(progress=progress, silence_s=silence_s)
        try:
            await engine._build(config)
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        assert self._process is not None, "`start` made it"
        return self._process.pid

    @property
    def text(self) -> TextSide:
        """What makes requests of prompts; it is in this process."""
        assert self._text is not None, "`start` made it"
        return self._text

    @property
    def report(self) -> EngineReport:
        """What the settings became on this machine."""
        assert self._report is not None, "`start` made it"
        return self._report

    async def ended(self) -> AmbidexError:
        """Wait until the engine takes no requests any more; returns why."""
        await self._has_ended.wait()
        assert self.fault is not None, "it is set before the event"
        return self.fault

    async def check_guide(self, params: SamplingParams) -> None:
        """Compile the grammar of the parameters, if they have one.

        Raises:
            RequestError: it cannot be used.
        """
        if params.guide is not None:
            await self._call(lambda call: AskGuide(call, params))

    def submit(self, request: Request, put: Put) -> Callable[[], None]:
        """Queue a checked request; see `EngineClient`."""
        if self.fault is not None:
            raise self.fault
        request_id = request.request_id
        self._channel.send(Submit.of(request))
        self._open[request_id] = _Open(put, PieceReader(request))

        def leave() -> None:
            if self._open.pop(request_id, None) is not None and self.fault is None:
                self._channel.send(Leave(request_id))

        return leave

    async def abort(self, request_id: RequestId) -> None:
        """End a request; its last output has finish reason `abort`."""
        self._channel.send(Abort(request_id))

    async def drop_cached(self, tenant: str | None = None) -> int:
        """Forget what the prefix cache holds, of one tenant or of all; returns the blocks that it held."""
        counts: tuple[int, ...] = await self._call(lambda call: AskDrop(call, tenant))
        return sum(counts)

    async def probe(self) -> None:
        """Return when the engine has taken in a message: at once if it is idle, else after the step."""
        await self._call(AskProbe)

    async def status(self) -> EngineStatus:
        """Counters and queue as of the last step, and where the engine is now."""
        status: EngineStatus = await self._call(AskStatus)
        return status

    async def decode_outcome(self) -> DecodeOutcome | None:
        """Decode steps so far beside what was predicted of them; None: no decode step has run."""
        outcome: DecodeOutcome | None = await self._call(AskDecode)
        return outcome

    async def num_computed_tokens(self, request_ids: Sequence[RequestId]) -> list[int]:
        """Tokens of live requests that are computed so far; 0 for one that is not known."""
        counts: tuple[int, ...] = await self._call(lambda call: AskComputed(call, tuple(request_ids)))
        return list(counts)

    async def close(self, save_s: float | None = None) -> None:
        """End the engine and its process, and wait until its memory is free; see `EngineClient`."""
        if self._beats is not None:
            self._beats.cancel()
        self._is_closing = True
        process = self._process
        if process is None:
            return
        if self._text is not None and self.fault is None:
            self._channel.send(Close(save_s))
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, None if save_s is None else save_s + CLOSE_S)
        if process.poll() is None:
            process.kill()
        await asyncio.to_thread(process.wait)
        self._channel.close()
        self._end(InternalError("the engine was closed"))

    async def _build(self, config: EngineConfig) -> None:
        own, others = socket.socketpair()
        with others:
            self._process = _spawn(others.fileno())
        await asyncio.get_running_loop().create_unix_connection(lambda: self._channel, sock=own)
        self._channel.send(Start(config))
        ready = await self._ready
        self._report = ready.report
        self._text = await asyncio.to_thread(read_text_side, ready.facts, chat_template=config.chat_template)
        self._beats = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Ask for a sign of life again and again; kill a process that gives none."""
        num_missed, answer = 0, None
        while self.fault is None and num_missed < self._max_missed:
            if answer is None or answer.done():
                num_missed, answer = 0, asyncio.ensure_future(self.status())
                answer.add_done_callback(_read_outcome)
            else:
                num_missed += 1
            await asyncio.sleep(BEAT_S)
        if self.fault is None:
            self._kill(EngineLostError(f"the engine's process has said nothing for {num_missed * BEAT_S:g} s"))

    async def _call(self, make: Callable[[int], Ask]) -> Any:
        if self.fault is not None:
            raise self.fault
        self._num_calls += 1
        call = self._num_calls
        answer = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(make(call))
            return await answer
        finally:
            self._calls.pop(call, None)

    def _take(self, message: ToServer) -> None:
        match message:
            case Pieces():
                for piece in message.pieces:
                    request = self._open.get(piece.request_id)
                    if request is not None:
                        if piece.finish_reason is not None:
                            del self._open[piece.request_id]
                        request.put(request.pieces.output(piece))
            case Refused():
                refused = self._open.pop(message.request_id, None)
                if refused is not None:
                    refused.put(message.error.error())
            case Done():
                self._settle(message.call, None, None if message.error is None else message.error.error())
            case StatusIs():
                self._settle(message.call, message.status)
            case Counts():
                self._settle(message.call, message.counts)
            case DecodeIs():
                self._settle(message.call, message.outcome)
            case Loading():
                self._progress(message.done, message.total)
            case Ready():
                self._ready.set_result(message)
            case Ended():
                self._end(message.error.error())

    def _settle(self, call: int, value: Any, error: AmbidexError | None = None) -> None:
        answer = self._calls.get(call)
        if answer is None or answer.done():  # who asked waits no more
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def _lost(self, error: Exception | None) -> None:
        """The connection has ended."""
        if self._is_closing or self.fault is not None:
            return
        if error is not None:
            self._kill(EngineLostError(f"the engine's process cannot be understood: {error}"))
        else:
            self._kill(EngineLostError(f"the engine's process ended: {self._exit_reason()}"))

    def _exit_reason(self) -> str:
        assert self._process is not None, "it was connected"
        try:
            code = self._process.wait(timeout=0.5)  # the connection ends a moment before the process
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        if code >= 0:
            return f"exit code {code}"
        hint = ", which is what the kernel does when memory runs out" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"

    def _kill(self, reason: EngineLostError) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._end(reason)

    def _end(self, error: AmbidexError) -> None:
        """Tell everybody who waits."""
        if self.fault is not None:
            return
        self.fault = error
        self._has_ended.set()
        if not self._ready.done():
            self._ready.set_exception(error)
            _read_outcome(self._ready)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
        opened, self._open = self._open, {}
        for request in opened.values():
            request.put(error)


def _spawn(descriptor: int) -> "subprocess.Popen[bytes]":
    """Start the engine's process with one end of the connection.

    It has a session of its own: Ctrl-C in a terminal is the server's affair alone.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "ambidex.server.worker.main", str(descriptor), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        start_new_session=True,
        env={name: value for name, value in (_MALLOC | dict(os.environ)).items() if name not in _SECRETS},
    )


def _read_outcome(answer: "asyncio.Future[Any]") -> None:
    """Take note of an error that nobody waits for, so that asyncio does not complain of it."""
    if not answer.cancelled():
        answer.exception()

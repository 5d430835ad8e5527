"""The engine's process: one engine, one connection. It ends when the server does, however that ends.

python -P -m ambidex.server.worker.main SOCKET PARENT
"""

import asyncio
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

import uvloop

from ambidex.core.errors import AmbidexError, CallerError
from ambidex.core.ids import RequestId
from ambidex.engine.async_ import AsyncLLM
from ambidex.engine.client import Reply
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
    Piece,
    Pieces,
    PieceWriter,
    Ready,
    Refused,
    SentError,
    Start,
    StatusIs,
    Submit,
    ToEngine,
    ToServer,
)

logger = logging.getLogger(__name__)

PROGRESS_S: Final = 0.2
"""Between two messages about loading."""
TRIM_S: Final = 20.0
"""Between two times that free memory inside malloc goes back to the system: steps of changing shapes leave tens of MB
there, which rise for many minutes. Giving 50 MB back takes some ms beside the steps."""
_PR_SET_PDEATHSIG: Final = 1


class Worker:
    """Speaks for an engine."""

    def __init__(self) -> None:
        self._channel = Channel(ToEngine, self._take, self._lost)
        self._loop = asyncio.get_running_loop()
        self._started: asyncio.Future[Start] = self._loop.create_future()
        self._is_closing = asyncio.Event()
        self._save_s: float | None = None
        self._llm: AsyncLLM | None = None
        self._leave: dict[RequestId, Callable[[], None]] = {}
        self._writers: dict[RequestId, PieceWriter] = {}
        self._pieces: list[Piece] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, connection: socket.socket) -> int:
        """Serve one connection; returns the exit code."""
        await self._loop.create_unix_connection(lambda: self._channel, sock=connection)
        config = (await self._started).config
        try:
            llm = await asyncio.to_thread(AsyncLLM, config, progress=_throttled(self._note_progress))
        except Exception as error:
            if not isinstance(error, AmbidexError):
                logger.exception("the engine could not be built")
            return self._end(error)
        self._llm = llm
        gc.collect()
        gc.freeze()  # see `server.service`: what has been loaded is looked through no more
        self._channel.send(Ready(llm.text.facts, llm.report))
        closing = self._loop.create_task(self._is_closing.wait())
        ended = self._loop.create_task(llm.ended())
        while not (closing.done() or ended.done()):
            done, _ = await asyncio.wait((closing, ended), timeout=TRIM_S, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                await asyncio.to_thread(give_back_memory)
        if ended.done():
            return self._end(ended.result())
        await llm.close(self._save_s)
        return 0

    def _end(self, error: BaseException) -> int:
        self._channel.send(Ended(SentError.of(error)))
        self._channel.close()
        return 1

    def _note_progress(self, done: int, total: int) -> None:
        self._loop.call_soon_threadsafe(self._channel.send, Loading(done, total))

    def _lost(self, error: Exception | None) -> None:
        """The server is gone: nobody is there to close anything for."""
        if not self._is_closing.is_set():
            if error is not None:
                logger.error("the server's messages cannot be read: %s", error)
            os._exit(1)

    def _take(self, message: ToEngine) -> None:
        match message:
            case Start():
                self._started.set_result(message)
            case Close():
                self._save_s = message.save_s
                self._is_closing.set()
            case Submit():
                self._submit(message)
            case Leave():
                self._writers.pop(message.request_id, None)
                leave = self._leave.pop(message.request_id, None)
                if leave is not None:
                    leave()
            case Abort():
                self._keep(self._engine().abort(message.request_id))
            case _:
                self._keep(self._answer(message))

    def _engine(self) -> AsyncLLM:
        assert self._llm is not None, "the server asks nothing before the engine is ready"
        return self._llm

    def _submit(self, message: Submit) -> None:
        request_id = message.request_id
        self._writers[request_id] = PieceWriter()
        try:
            self._leave[request_id] = self._engine().submit(
                message.request(), lambda reply: self._put(request_id, reply)
            )
        except AmbidexError:  # the engine has ended: `run` says so
            return

    def _put(self, request_id: RequestId, reply: Reply) -> None:
        """Called for each output of a step; all of them leave in one message."""
        if isinstance(reply, AmbidexError):
            if reply is not self._engine().fault:  # `run` tells the fault, once for all
                self._channel.send(Refused(request_id, SentError.of(reply)))
                self._forget(request_id)
            return
        writer = self._writers.get(request_id)
        if writer is None:
            return
        if not self._pieces:
            self._loop.call_soon(self._flush)
        self._pieces.append(writer.piece(reply))
        if reply.is_finished:
            self._forget(request_id)

    def _forget(self, request_id: RequestId) -> None:
        self._writers.pop(request_id, None)
        self._leave.pop(request_id, None)

    def _flush(self) -> None:
        pieces, self._pieces = tuple(self._pieces), []
        self._channel.send(Pieces(pieces))

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Ask) -> None:
        try:
            self._channel.send(await self._reply(message))
        except Exception as error:
            if not isinstance(error, CallerError):
                logger.exception("the engine could not answer %s", type(message).__name__)
            self._channel.send(Done(message.call, SentError.of(error)))

    async def _reply(self, message: Ask) -> ToServer:
        llm = self._engine()
        match message:
            case AskStatus():
                return StatusIs(message.call, await llm.status())
            case AskProbe():
                await llm.probe()
                return Done(message.call)
            case AskGuide():
                await llm.check_guide(message.params)
                return Done(message.call)
            case AskComputed():
                return Counts(message.call, tuple(await llm.num_computed_tokens(message.request_ids)))
            case AskDecode():
                return DecodeIs(message.call, await llm.decode_outcome())
            case AskDrop():
                return Counts(message.call, (await llm.drop_cached(message.tenant),))


def _throttled(note: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """The same, called at most every `PROGRESS_S` and at the end."""
    last_s = 0.0

    def throttled(done: int, total: int) -> None:
        nonlocal last_s
        now = time.monotonic()
        if done >= total or now - last_s >= PROGRESS_S:
            last_s = now
            note(done, total)

    return throttled


def give_back_memory() -> None:
    """Let malloc return what is free inside it, where it can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def die_with(parent: int) -> None:
    """See that the kernel kills this process when the thread that started it ends; a lost connection says the same."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main() -> int:
    """Run the process."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the server, which says what follows from them
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)

    async def run() -> int:
        return await Worker().run(socket.socket(fileno=descriptor))

    return uvloop.run(run())


if __name__ == "__main__":
    sys.exit(main())

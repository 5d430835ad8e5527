"""`EngineService`: the engine of a server while it loads, runs, fails and is built anew; and whether it is ready.

loading ──▶ ready ──▶ restarting ──▶ ready
   │                      │
   └──────▶ failed ◀──────┘   the server ends with exit code 1: whoever supervises it starts it again
"""

import asyncio
import contextlib
import gc
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ambidex.core.errors import AmbidexError, EngineLostError
from ambidex.engine.client import EngineClient
from ambidex.engine.pulse import Stage
from ambidex.engine.report import EngineReport
from ambidex.engine.run_plan import DecodeOutcome
from ambidex.engine.status import EngineStatus
from ambidex.server.errors import unavailable

logger = logging.getLogger(__name__)

MAX_RESTARTS: Final = 3
"""Within `RESTART_WINDOW_S`: an engine that fails more often is not healed by building it anew."""
RESTART_WINDOW_S: Final = 300.0
FIRST_DELAY_S: Final = 0.5
"""Before the second restart in a row; it doubles with each. The first comes at once."""
POLL_S: Final = 0.1
STATUS_S: Final = 2.0
"""An engine says where it stands at once, also in the middle of a step; one that does not stands still."""
PROBE_S: Final = 2.0
"""An idle engine answers a message at once; one that computes is judged by the age of its stage."""

GARBAGE: Final = 20_000
"""Objects that have come and not gone between two looks for garbage: a request leaves some hundred for a while, and
most of Python's looks, one in 700 objects, would find nothing."""

Progress = Callable[[int, int], None]
MakeEngine = Callable[[Progress], Awaitable[EngineClient]]


class EngineState(StrEnum):
    """Where the engine of a server stands."""

    LOADING = "loading"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Whether a token can be produced; if not, which stage stands still and for how long."""

    is_ready: bool
    status: str
    stage: str | None = None
    stage_s: float | None = None
    last_token_age_s: float | None = None


class EngineService:
    """Builds the engine, watches it, and builds it anew when it has failed.

    Args:
        make: builds the engine; called with what takes (bytes read, bytes in all).
        stall_s: a stage that lasts longer is a stall.
        on_ready: called with what the settings became, whenever an engine is ready.
        on_end: called with what became of its decode steps, before the last one is closed.
    """

    def __init__(
        self,
        make: MakeEngine,
        *,
        stall_s: float,
        on_ready: Callable[[EngineReport], None] = lambda _: None,
        on_end: Callable[[DecodeOutcome | None], None] = lambda _: None,
    ) -> None:
        self._make = make
        self._on_ready = on_ready
        self._on_end = on_end
        self._stall_s = stall_s
        self._llm: EngineClient | None = None
        self._changed = asyncio.Event()
        self._starts: list[float] = []
        self._state = EngineState.LOADING
        self.error: AmbidexError | Exception | None = None
        self.loaded_bytes = (0, 0)
        self.num_restarts = 0
        self.end_s: float | None = None
        """When whoever ends the server wants it ended, as `time.monotonic` has it: until then blocks are saved."""

    @property
    def state(self) -> EngineState:
        """Where the engine stands now."""
        is_lost = self._state is EngineState.READY and self._llm is not None and self._llm.fault is not None
        return EngineState.RESTARTING if is_lost else self._state

    async def run(self) -> None:
        """Load, then watch until the engine cannot be mended or the task is cancelled."""
        try:
            while await self._run_engine() and await self._begin_restart():
                pass
        finally:
            await self._close()

    def engine(self) -> EngineClient:
        """The engine.

        Raises:
            RefusedError: it is not ready; 503.
        """
        if self._llm is not None and self.state is EngineState.READY:
            return self._llm
        done, total = self.loaded_bytes
        share = f" ({100 * done // total} %)" if total else ""
        texts = {
            EngineState.LOADING: f"the model is loading{share}: try again soon",
            EngineState.RESTARTING: f"the engine failed and is being built anew{share}: try again soon",
            EngineState.FAILED: f"the engine failed: {self.error}",
        }
        message = texts.get(self.state, "the server is shutting down")
        raise unavailable(message, code=f"engine_{self.state}")

    async def wait(self) -> EngineClient:
        """The engine, once it is there.

        Raises:
            RefusedError: it never will be.
        """
        while self.state in (EngineState.LOADING, EngineState.RESTARTING):
            await asyncio.sleep(POLL_S)
        return self.engine()

    async def status(self) -> EngineStatus:
        """Counters and queue of the engine.

        Raises:
            RefusedError: it is not ready, or says nothing; 503.
        """
        try:
            return await asyncio.wait_for(self.engine().status(), STATUS_S)
        except TimeoutError:
            raise unavailable("the engine does not answer: try again soon", code="engine_stalled") from None
        except EngineLostError as error:
            raise unavailable(f"{error}: try again soon", code="engine_restarting") from None

    async def find_status(self) -> EngineStatus | None:
        """The same, None in place of an error."""
        with contextlib.suppress(AmbidexError):
            return await self.status()
        return None

    async def readiness(self) -> Readiness:
        """Whether a token was produced lately or can be."""
        llm = self._llm
        if llm is None or self.state is not EngineState.READY:
            return Readiness(is_ready=False, status=self.state)
        status = await self.find_status()
        if status is not None and status.beat.stage is Stage.IDLE:
            with contextlib.suppress(TimeoutError, AmbidexError):  # what the stage says decides
                await asyncio.wait_for(llm.probe(), PROBE_S)
            status = await self.find_status()
        if status is None:
            is_silent = self.state is EngineState.READY
            return Readiness(
                is_ready=False,
                status="stalled" if is_silent else self.state,
                stage="answering nothing" if is_silent else None,
            )
        now = time.monotonic()
        age = None if status.last_token_s is None else now - status.last_token_s
        stage_s = now - status.beat.since_s
        is_stalled = status.beat.stage is not Stage.IDLE and stage_s > self._stall_s
        return Readiness(
            is_ready=not is_stalled,
            status="stalled" if is_stalled else "ready",
            stage=status.beat.stage,
            stage_s=round(stage_s, 3),
            last_token_age_s=None if age is None else round(age, 3),
        )

    async def _run_engine(self) -> bool:
        """Build the engine and watch it until it fails; false if it cannot be built."""
        self._starts.append(time.monotonic())
        try:
            llm = self._llm = await self._make(self._note_progress)
            _freeze_heap()
        except Exception as error:
            self.error = error
            if isinstance(error, EngineLostError) and self._state is EngineState.RESTARTING:
                return True  # it has been built before
            self._state = EngineState.FAILED
            if not isinstance(error, AmbidexError):
                logger.exception("the engine could not be built")
            return False
        self._state, self.error = EngineState.READY, None  # what ended an engine before is mended
        logger.info("the model is ready after %.1f s", time.monotonic() - self._starts[-1])
        self._on_ready(llm.report)
        self.error = await llm.ended()
        return True

    async def _begin_restart(self) -> bool:
        llm, self._llm = self._llm, None
        recent = [start for start in self._starts if time.monotonic() - start < RESTART_WINDOW_S]
        is_last = len(recent) > MAX_RESTARTS
        self._state = EngineState.FAILED if is_last else EngineState.RESTARTING
        if llm is not None:
            await llm.close()  # its memory is needed for the next one
        del llm
        if is_last:
            logger.error(
                "the engine failed %d times in %.0f s: giving up: %s", len(recent), RESTART_WINDOW_S, self.error
            )
            return False
        self.num_restarts += 1
        self.loaded_bytes = (0, 0)  # the last engine's
        delay_s = 0.0 if len(recent) == 1 else FIRST_DELAY_S * 2 ** (len(recent) - 2)
        logger.error("the engine failed and is built anew in %g s: %s", delay_s, self.error)
        gc.unfreeze()
        gc.collect()
        await asyncio.sleep(delay_s)
        return True

    def _note_progress(self, done: int, total: int) -> None:
        self.loaded_bytes = (done, total)

    async def _close(self) -> None:
        if self._state is not EngineState.FAILED:
            self._state = EngineState.CLOSED
        if self._llm is not None:
            if self._llm.fault is None:
                with contextlib.suppress(TimeoutError, AmbidexError):  # a figure is not worth waiting for
                    self._on_end(await asyncio.wait_for(self._llm.decode_outcome(), STATUS_S))
            await self._llm.close(None if self.end_s is None else max(0.0, self.end_s - time.monotonic()))


def _freeze_heap() -> None:
    """Take what has been loaded out of Python's garbage collection: libraries and model are some hundred thousand
    objects, and every look through them stops all streams for a third of a second.

    Measured: 2 cores, profile of 64 streams: 0.3 to 0.7 of 10 s in full collections.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE, 20, 50)

"""`EngineClient`: what a server needs of an engine, in its own process (`AsyncLLM`) or in another one."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ambidex.core.errors import AmbidexError
from ambidex.core.ids import RequestId
from ambidex.core.request import Request, SamplingParams
from ambidex.engine.outputs import RequestOutput
from ambidex.engine.report import EngineReport
from ambidex.engine.run_plan import DecodeOutcome
from ambidex.engine.status import EngineStatus
from ambidex.engine.text_side import TextSide

Reply = RequestOutput | AmbidexError
Put = Callable[[Reply], None]


class EngineClient(Protocol):
    """An engine that is built. All is called on one event loop, `text` from any thread."""

    @property
    def text(self) -> TextSide:
        """What makes requests of prompts."""

    @property
    def report(self) -> EngineReport:
        """What the settings became on this machine."""

    @property
    def fault(self) -> AmbidexError | None:
        """Why the engine takes no requests any more; None while it does."""

    async def ended(self) -> AmbidexError:
        """Wait until the engine takes no requests any more; returns why."""

    async def check_guide(self, params: SamplingParams) -> None:
        """Compile the grammar of the parameters, if they have one.

        Raises:
            RequestError: it cannot be used.
        """

    def submit(self, request: Request, put: Put) -> Callable[[], None]:
        """Queue a checked request.

        Args:
            put: called with every output and, if the engine cannot go on, with the error.
        Returns:
            A function that ends the request and the calls of `put`; to be called when the caller reads no more.
        Raises:
            AmbidexError: the engine has ended.
        """

    async def abort(self, request_id: RequestId) -> None:
        """End a request; its last output has finish reason `abort`."""

    async def drop_cached(self, tenant: str | None = None) -> int:
        """Forget what the prefix cache holds, of one tenant or of all; returns the blocks that it held."""

    async def probe(self) -> None:
        """Return when the engine has taken in a message: at once if it is idle, else after the step."""

    async def status(self) -> EngineStatus:
        """Counters and queue as of the last step, and where the engine is now; does not wait for the step."""

    async def decode_outcome(self) -> DecodeOutcome | None:
        """Decode steps so far beside what was predicted of them; None: no decode step has run."""

    async def num_computed_tokens(self, request_ids: Sequence[RequestId]) -> list[int]:
        """Tokens of live requests that are computed so far; 0 for one that is not known."""

    async def close(self, save_s: float | None = None) -> None:
        """End all requests and the engine, and free its memory.

        Args:
            save_s: most seconds for saving what is to outlive the process; None: as many as it takes.
        """

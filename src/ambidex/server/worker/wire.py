"""What server and engine process say to each other: typed messages as msgpack, each behind its length.

Every message is checked against its type when it comes in; nothing that arrives can name code. A message that does not
fit ends the connection, and with it the engine's process.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, TypeVar, cast, get_origin

import msgspec

from ambidex.core import errors
from ambidex.core.config import EngineConfig
from ambidex.core.errors import AmbidexError, InternalError
from ambidex.core.ids import RequestId
from ambidex.core.request import FinishReason, Request, SamplingParams
from ambidex.core.step import SampledToken
from ambidex.engine.outputs import RequestOutput
from ambidex.engine.report import EngineReport
from ambidex.engine.run_plan import DecodeOutcome
from ambidex.engine.status import EngineStatus
from ambidex.engine.text_side import TextFacts

M = TypeVar("M")

MAX_MESSAGE_BYTES: Final = 64 * 1024**2
"""Twice the largest prompt that a request body of the default size can hold."""
_LENGTH_BYTES: Final = 4

_ERRORS: Final = {
    kind.__name__: kind
    for kind in (
        errors.ConfigError,
        errors.RequestError,
        errors.ModelError,
        errors.ModelNotFoundError,
        errors.ModelFileError,
        errors.UnsupportedModelError,
        errors.WeightsError,
        errors.MachineError,
        errors.TierFullError,
        errors.NativeModuleError,
        errors.CopyError,
        errors.IntegrityError,
        errors.LaneError,
        errors.RequestFailedError,
        errors.InternalError,
    )
}


class SentError(msgspec.Struct, frozen=True, array_like=True):
    """An error of `core/errors.py` by the name of its class."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> "SentError":
        """Any error; one that is not of ours becomes an internal one that names it."""
        kind = next((base.__name__ for base in type(error).__mro__ if base.__name__ in _ERRORS), None)
        if isinstance(error, AmbidexError) and kind is not None:
            return cls(kind, str(error))
        return cls("InternalError", f"{type(error).__name__}: {error}")

    def error(self) -> AmbidexError:
        """The error again."""
        return _ERRORS.get(self.kind, InternalError)(self.message)


# ---- from the server to the engine


class Start(msgspec.Struct, frozen=True, tag=True):
    """The first message: what to load."""

    config: EngineConfig


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Queue a request that the text side has checked."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_total_tokens: int
    stop_ids: frozenset[int]
    tenant: str
    cache_salt: str
    priority: int

    @classmethod
    def of(cls, request: Request) -> "Submit":
        """A request that has not run."""
        return cls(
            request.request_id,
            request.prompt_token_ids,
            request.params,
            request.max_total_tokens,
            request.stop_ids,
            request.tenant,
            request.cache_salt,
            request.priority,
        )

    def request(self) -> Request:
        """The request again."""
        return Request(
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            max_total_tokens=self.max_total_tokens,
            stop_ids=self.stop_ids,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            priority=self.priority,
        )


class Leave(msgspec.Struct, frozen=True, tag=True):
    """End a request; nobody reads what it still would say."""

    request_id: RequestId


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request; its last output says so."""

    request_id: RequestId


class AskGuide(msgspec.Struct, frozen=True, tag=True):
    """Is the grammar of these parameters usable? Answered by `Done`."""

    call: int
    params: SamplingParams


class AskStatus(msgspec.Struct, frozen=True, tag=True):
    """Answered by `StatusIs`, at once."""

    call: int


class AskProbe(msgspec.Struct, frozen=True, tag=True):
    """Answered by `Done`, after the step."""

    call: int


class AskComputed(msgspec.Struct, frozen=True, tag=True):
    """How many tokens of these requests are computed? Answered by `Counts`, at once."""

    call: int
    request_ids: tuple[RequestId, ...]


class AskDecode(msgspec.Struct, frozen=True, tag=True):
    """How long do decode steps take, and what was predicted? Answered by `DecodeIs`, at once."""

    call: int


class AskDrop(msgspec.Struct, frozen=True, tag=True):
    """Forget what the prefix cache holds; answered by `Counts`, after the step."""

    call: int
    tenant: str | None


class Close(msgspec.Struct, frozen=True, tag=True):
    """End all requests and the process.

    `save_s` seconds are left for saving what is to outlive it; None: as many as it takes.
    """

    save_s: float | None = None


Ask = AskGuide | AskStatus | AskProbe | AskComputed | AskDecode | AskDrop
ToEngine = Start | Submit | Leave | Abort | Ask | Close


# ---- from the engine to the server


class Loading(msgspec.Struct, frozen=True, tag=True):
    """Bytes of weights that are read, and all of them."""

    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is built."""

    facts: TextFacts
    report: EngineReport


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """What came to an answer since its last piece."""

    request_id: RequestId
    delta: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: tuple[SampledToken, ...] | None = None
    num_cached_tokens: int = 0


class Pieces(msgspec.Struct, frozen=True, tag=True):
    """Those of one step, one message for all of them."""

    pieces: tuple[Piece, ...]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that could not be queued."""

    request_id: RequestId
    error: SentError


class Done(msgspec.Struct, frozen=True, tag=True):
    """The answer of a call that gives nothing, or that failed."""

    call: int
    error: SentError | None = None


class StatusIs(msgspec.Struct, frozen=True, tag=True):
    """The answer to `AskStatus`."""

    call: int
    status: EngineStatus


class Counts(msgspec.Struct, frozen=True, tag=True):
    """The answer of a call that counts."""

    call: int
    counts: tuple[int, ...]


class DecodeIs(msgspec.Struct, frozen=True, tag=True):
    """The answer to `AskDecode`; None: no decode step has run."""

    call: int
    outcome: DecodeOutcome | None


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The last message: the engine could not be built, or cannot go on."""

    error: SentError


ToServer = Loading | Ready | Pieces | Refused | Done | StatusIs | Counts | DecodeIs | Ended


class PieceWriter:
    """Cuts the outputs of one answer into pieces."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_logprobs = 0

    def piece(self, output: RequestOutput) -> Piece:
        """What is new in an output."""
        token_ids, logprobs = output.token_ids[self._num_tokens :], output.logprobs
        self._num_tokens += len(token_ids)
        if logprobs is not None:
            logprobs = logprobs[self._num_logprobs :]
            self._num_logprobs += len(logprobs)
        return Piece(
            output.request_id,
            output.delta,
            token_ids,
            output.finish_reason,
            output.error,
            logprobs,
            output.num_cached_tokens,
        )


class PieceReader:
    """Makes outputs of the pieces of one answer."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[SampledToken] = []

    def output(self, piece: Piece) -> RequestOutput:
        """The answer as it stands."""
        self._text += piece.delta
        self._token_ids += piece.token_ids
        self._logprobs += piece.logprobs or ()
        return RequestOutput(
            request_id=piece.request_id,
            prompt_token_ids=self._request.prompt_token_ids,
            text=self._text,
            delta=piece.delta,
            token_ids=tuple(self._token_ids),
            finish_reason=piece.finish_reason,
            error=piece.error,
            logprobs=None if piece.logprobs is None else tuple(self._logprobs),
            num_cached_tokens=piece.num_cached_tokens,
        )


class Channel(asyncio.Protocol):
    """One end of the connection, on an event loop.

    Args:
        take: called with each message.
        on_lost: called once when there is no connection any more; with the reason, if it was this end that gave it up.
        received: the union of messages that may come.
        max_bytes: of a message, in both directions.
    """

    def __init__(
        self,
        received: Any,
        take: Callable[[Any], None],
        on_lost: Callable[[Exception | None], None],
        *,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._decoder = msgspec.msgpack.Decoder(received, dec_hook=_decode_counter)
        self._encoder = msgspec.msgpack.Encoder()
        self._take = take
        self._on_lost = on_lost
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._error: Exception | None = None

    def send(self, message: ToEngine | ToServer) -> None:
        """Send a message; nothing happens when the connection is lost.

        Raises:
            InternalError: it is larger than a message may be.
        """
        data = self._encoder.encode(message)
        if len(data) > self._max_bytes:
            raise InternalError(f"a message of {len(data)} bytes to or from the engine: at most {self._max_bytes}")
        if self._transport is not None and not self._transport.is_closing():
            if not self._unsent:
                asyncio.get_running_loop().call_soon(self._flush)
            self._unsent += (len(data).to_bytes(_LENGTH_BYTES), data)

    def close(self) -> None:
        """End the connection when all is sent."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        """Write what was sent in this turn of the event loop: each write may give the processor to the other end."""
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None:
            self._transport.write(b"".join(unsent))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: the connection is there."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by name

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes came."""
        self._buffer += data
        start, size = 0, len(self._buffer)
        try:
            while size - start >= _LENGTH_BYTES:
                length = int.from_bytes(self._buffer[start : start + _LENGTH_BYTES])
                if length > self._max_bytes:
                    raise InternalError(f"a message of {length} bytes has been announced: at most {self._max_bytes}")
                begin, end = start + _LENGTH_BYTES, start + _LENGTH_BYTES + length
                if end > size:
                    break
                message = self._decoder.decode(memoryview(self._buffer)[begin:end])
                start = end
                self._take(message)
        except (AmbidexError, msgspec.MsgspecError) as error:
            self._error = error
            if self._transport is not None:
                self._transport.abort()
        finally:
            del self._buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: there is no connection any more."""
        del exc  # a process that was killed resets its connection: why it ended says more
        self._transport = None
        self._on_lost(self._error)


def _decode_counter(kind: type, value: Any) -> Any:
    """`Counter`, which msgspec does not know; its keys are members of string enumerations, equal to their text."""
    if get_origin(kind) is Counter or kind is Counter:
        return Counter(msgspec.convert(value, dict[str, int]))
    raise NotImplementedError(f"no message holds a {kind}")

"""What a client asks for: sampling parameters, the request and its one counter of progress."""

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Final, TypeVar

from ambidex.core.errors import RequestError
from ambidex.core.ids import RequestId

T = TypeVar("T")

MAX_LOGPROBS = 20
"""Alternatives per token that may be asked for (the OpenAI API's limit)."""
MAX_STOP_STRINGS = 16
MAX_COUNT = 2**31 - 1
"""Of tokens and ranks: what a signed 32-bit number holds."""
MAX_LOGIT_BIAS = 1024
MAX_PRIORITY = 100


MAX_GUIDE_BYTES = 65536
"""Of a JSON schema, regular expression or grammar, as UTF-8."""


class GuideKind(StrEnum):
    """What an answer may be held to; each is a field of `SamplingParams`."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(StrEnum):
    """Where a request stands; prefill and decode are derived from its progress, never stored."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the answer's tokens are chosen.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. Penalties follow the OpenAI API
    (`presence`, `frequency`: subtracted from logits of tokens in the answer) and arXiv:1909.05858 (`repetition`:
    divides positive and multiplies negative logits of tokens in prompt and answer). `seed` None: derived from the
    engine's seed. `logprobs` None is off, n gives the chosen token's log-probability and the n most likely
    alternatives, before penalties and temperature. At most one of `json_schema` (JSON text), `regex` and `grammar` (in
    the Lark form of llguidance) may be given: the answer then fits it, unless its length limit cuts it off.

    Raises:
        RequestError: a value is out of its range.
    """

    max_output_tokens: int | None = 16
    min_output_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None

    @property
    def guide(self) -> tuple[GuideKind, str] | None:
        """What the answer is held to, if to anything."""
        return next(((kind, text) for kind in _GUIDES if (text := getattr(self, kind)) is not None), None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple("stop", self.stop, str))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids, int))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        for name, default in _DEFAULTS:
            if (value := getattr(self, name)) is not default:
                _check_type(name, value, default)
        _check("max_output_tokens", self.max_output_tokens, low=1, high=MAX_COUNT)
        _check("min_output_tokens", self.min_output_tokens, low=0, high=MAX_COUNT)
        if self.max_output_tokens is not None and self.min_output_tokens > self.max_output_tokens:
            raise RequestError(
                f"min_output_tokens {self.min_output_tokens} is above max_output_tokens {self.max_output_tokens}"
            )
        _check("temperature", self.temperature, low=0, high=100)
        _check("top_k", self.top_k, low=0, high=MAX_COUNT)
        _check("top_p", self.top_p, low=0, high=1)
        if self.top_p == 0:
            raise RequestError("top_p is 0: it must be above 0 (use temperature 0 for greedy)")
        _check("min_p", self.min_p, low=0, high=1)
        _check("presence_penalty", self.presence_penalty, low=-2, high=2)
        _check("frequency_penalty", self.frequency_penalty, low=-2, high=2)
        _check("repetition_penalty", self.repetition_penalty, low=0.01, high=100)
        _check("seed", self.seed, low=0, high=2**63 - 1)
        _check("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"{len(self.stop)} stop strings: at most {MAX_STOP_STRINGS}")
        if any(not text for text in self.stop):
            raise RequestError("a stop string is empty: leave it out")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias has {len(self.logit_bias)} entries: at most {MAX_LOGIT_BIAS}")
        _check_guides({kind: getattr(self, kind) for kind in _GUIDES})
        for token_id, bias in self.logit_bias:
            if not -100 <= bias <= 100:
                raise RequestError(f"logit_bias of token {token_id} is {bias}: it must lie in [-100, 100]")


_GUIDES: Final = tuple(GuideKind)
_DEFAULTS: Final = tuple((item.name, item.default) for item in fields(SamplingParams))
"""Both read once: a server makes parameters for each request."""


def _check_guides(guides: Mapping[GuideKind, object]) -> None:
    given = {kind: text for kind, text in guides.items() if text is not None}
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} exclude each other: give one")
    for kind, text in given.items():
        if not isinstance(text, str) or not text:
            raise RequestError(f"{kind} is {_show(text)}: it must be text")
        size = len(text.encode(errors="surrogatepass"))
        if size > MAX_GUIDE_BYTES:
            raise RequestError(f"{kind} has {size} bytes: at most {MAX_GUIDE_BYTES}")


_INT_OR_NONE: Final = ("max_output_tokens", "seed", "logprobs")


def _check_type(name: str, value: object, default: object) -> None:
    """Refuse a value of another type than the default's; whole numbers pass as numbers."""
    if isinstance(default, bool):
        wanted, is_right = "true or false", isinstance(value, bool)
    elif name in _INT_OR_NONE or isinstance(default, int):
        is_none = value is None and name in _INT_OR_NONE
        wanted, is_right = "a whole number", is_none or (isinstance(value, int) and not isinstance(value, bool))
    elif isinstance(default, float):
        wanted, is_right = "a number", isinstance(value, int | float) and not isinstance(value, bool)
        if isinstance(value, float) and not math.isfinite(value):
            raise RequestError(f"{name} is {value}: it must be finite")
    else:
        return
    if not is_right:
        raise RequestError(f"{name} is {_show(value)}: it must be {wanted}")


def _as_tuple(name: str, values: Iterable[T], kind: type[T]) -> tuple[T, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise RequestError(f"{name} is {_show(values)}: it must be a list")
    items = tuple(values)
    for item in items:
        if not isinstance(item, kind) or isinstance(item, bool):
            raise RequestError(
                f"{name} holds {_show(item)}: each must be {'text' if kind is str else 'a whole number'}"
            )
    return items


def _as_bias(values: Mapping[int, float] | Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    try:
        items = list(values.items() if isinstance(values, Mapping) else values)
        pairs = tuple((operator.index(token_id), float(bias)) for token_id, bias in items)
    except (TypeError, ValueError, OverflowError):
        raise RequestError(f"logit_bias is {_show(values)}: it must map token ids to numbers") from None
    if len(dict(pairs)) < len(pairs):
        raise RequestError("logit_bias names a token id twice: give each id once")
    return pairs


def _show(value: object) -> str:
    """A value in an error message, cut short."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__} too long to show"
    return text if len(text) <= 60 else text[:57] + "..."


def _check(name: str, value: float | None, *, low: float, high: float = math.inf) -> None:
    if value is not None and not low <= value <= high:
        limit = f"at least {low}" if high == math.inf else f"in [{low}, {high}]"
        raise RequestError(f"{name} is {_show(value)}: it must be {limit}")


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One request until it finishes; the scheduler owns and changes it.

    `num_computed_tokens` catches up with `num_tokens`; preemption sets it back to 0.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    max_total_tokens: int
    """Prompt and answer together never exceed this."""
    stop_ids: frozenset[int] = frozenset()
    """Token ids that end the answer (end-of-text ids unless ignored, and `stop_token_ids`)."""
    tenant: str = ""
    """Whose request it is: those of two tenants never share KV blocks."""
    cache_salt: str = ""
    """Requests of one tenant share KV blocks only if they bring the same salt."""
    priority: int = 0
    """Lower goes sooner, among the waiting requests of its tenant; −`MAX_PRIORITY` … `MAX_PRIORITY`."""
    output_token_ids: list[int] = field(default_factory=list)
    allowed_tokens: bytes | None = None
    """Bit mask of the tokens that may come next (see `ScheduledRequest`); None: any."""
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Tokens of the prompt that were not computed for it, because the prefix cache had their K and V."""
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and answer so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_ids(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens at positions start … end - 1."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        tail = tuple(self.output_token_ids[max(0, start - num_prompt) : end - num_prompt])
        return self.prompt_token_ids[start:num_prompt] + tail

"""Request bodies: JSON text → a model of `protocol.py`, or a refusal that names each wrong field."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json, to_json
from starlette.requests import Request

from ambidex.server.errors import bad_request
from ambidex.server.protocol import UNSUPPORTED_PART
from ambidex.server.stream import ClientGoneError

B = TypeVar("B", bound=BaseModel)

_MAX_NAMED: Final = 5
"""Wrong fields that one error names."""
_MAX_QUOTED: Final = 60
_MAX_NAME: Final = 200
"""Characters of a field's name that an error shows."""


@dataclass(frozen=True, slots=True)
class Parsed(Generic[B]):
    """A body, and what was left out of it in lenient mode."""

    body: B
    warnings: tuple[str, ...] = ()


async def read_body(request: Request, model: type[B], *, is_lenient: bool) -> Parsed[B]:
    """Read and check the body of a request.

    Raises:
        RefusedError: it is no JSON, or a field is unknown or wrong.
    """
    data = await _read_all(request)
    try:
        return Parsed(model.model_validate_json(data))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False)
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    if is_lenient and unknown:
        return _without(data, model, unknown)
    raise _refusal(problems)


async def _read_all(request: Request) -> bytes:
    """The body; most come in one message."""
    parts: list[bytes] = []
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _without(data: bytes, model: type[B], unknown: Iterable[ErrorDetails]) -> Parsed[B]:
    """Leave the unknown fields out."""
    value = from_json(data)
    dropped = [problem["loc"] for problem in unknown if _drop(value, problem["loc"])]
    warnings = tuple(f"{_shorten(_path(loc), _MAX_NAME)} is unknown and was left out" for loc in dropped)
    try:
        return Parsed(model.model_validate_json(to_json(value)), warnings)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_context=False)) from None


def _drop(value: Any, path: tuple[int | str, ...]) -> bool:
    """Remove what a path names; false if it is not there."""
    for step in _steps(path)[:-1]:
        try:
            value = value[step]
        except (LookupError, TypeError):
            continue
    if isinstance(value, dict) and path[-1] in value:
        del value[path[-1]]
        return True
    return False


def _refusal(problems: list[ErrorDetails]) -> Exception:
    for problem in problems:
        if problem["type"] == UNSUPPORTED_PART:
            path = _path(problem["loc"])
            return bad_request(
                f"{path} {problem['msg']}: this engine runs text models, which read no images, sound or files: send "
                f"parts of type text alone",
                param=path,
                code="unsupported_content",
            )
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    if unknown:
        names = [_shorten(_path(problem["loc"]), _MAX_NAME) for problem in unknown]
        plural = "s" * (len(names) > 1)
        shown = ", ".join(names[:_MAX_NAMED]) + (", …" if len(names) > _MAX_NAMED else "")
        return bad_request(
            f"unknown field{plural}: {shown}: leave out what this server does not know",
            param=names[0],
            code="unknown_field",
        )
    first = problems[0]
    if first["type"] == "json_invalid":
        return bad_request(f"the body is no JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    shown = "; ".join(_describe(problem) for problem in problems[:_MAX_NAMED])
    return bad_request(shown, param=_path(first["loc"]) or None, code="invalid_value")


def _describe(problem: ErrorDetails) -> str:
    path = _path(problem["loc"]) or "the body"
    if problem["type"] == "missing":
        return f"{path} is missing"
    shown = _shorten(repr(problem["input"]), _MAX_QUOTED)
    return f"{path} is {shown}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"


def _shorten(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else text[: max_chars - 1] + "…"


def _path(loc: tuple[int | str, ...]) -> str:
    """`("messages", 0, "content", "str")` → `messages[0].content`."""
    text = ""
    for step in _steps(loc):
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _steps(loc: tuple[int | str, ...]) -> list[int | str]:
    """The steps of a path that are in the body: names of types and branches are not."""
    return [
        step
        for idx, step in enumerate(loc)
        if isinstance(step, int)
        or (step.isidentifier() and step not in _TYPE_NAMES and (idx == 0 or loc[idx - 1] != "response_format"))
    ]


_TYPE_NAMES: Final = frozenset({"str", "int", "float", "bool", "TextPart", "NamedTool"})

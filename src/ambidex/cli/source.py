"""Text that comes from outside: arguments, files, stdin. Invalid UTF-8 is refused with its place."""

import json
import sys
from pathlib import Path
from typing import Any, Final

from ambidex.core.errors import RequestError
from ambidex.core.units import MIB
from ambidex.formats.bounded_file import read_file, read_stream

_MAX_PROMPT_BYTES: Final = 256 * MIB
"""Some sixty million tokens."""
_MAX_QUOTED: Final = 80
"""Characters of a value that an error shows: it stays one line of a terminal or two."""


def decode(data: bytes, *, name: str) -> str:
    """Read bytes as UTF-8.

    Raises:
        RequestError: they are not; names the first wrong byte and its offset.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{name} is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}: "
            f"convert it, for example with iconv -t UTF-8"
        ) from None


def parse_json(text: str) -> Any:
    """Read JSON; unlike Python's reader it takes no key twice.

    Raises:
        RequestError: it is none, it is nested too deeply, or a key comes twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_object_of)
    except RecursionError:
        raise RequestError("no JSON: it is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"no JSON: {error}") from None


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise RequestError(f"key {quote(key)} comes twice: leave one out")
        table[key] = value
    return table


def quote(value: object) -> str:
    """A wrong value as an error shows it: cut if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits than Python writes, or nested as deeply as it reads
        return "too long to show"
    return text if len(text) <= _MAX_QUOTED else f"{text[: _MAX_QUOTED - 1]}…"


def check_text(text: str, *, name: str) -> str:
    """A text that may hold half characters: an argument with stray bytes, or JSON with a lone surrogate.

    Raises:
        RequestError: it does; names the place.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not valid Unicode: half a character at offset {error.start}") from None
    return text


def read_prompt_file(path: Path) -> str:
    """The prompt in a file.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        data = read_file(path, max_bytes=_MAX_PROMPT_BYTES)
    except OSError as error:
        raise RequestError(f"--file {path} cannot be read: {error.strerror or error}") from error
    return _without_final_newline(decode(data, name=str(path)))


def read_prompt_stdin() -> str:
    """The prompt on stdin, up to its end.

    Raises:
        RequestError: it cannot be read.
    """
    try:
        data = read_stream(sys.stdin.buffer, max_bytes=_MAX_PROMPT_BYTES)
    except OSError as error:
        raise RequestError(f"stdin cannot be read: {error.strerror or error}") from error
    return _without_final_newline(decode(data, name="stdin"))


def is_stdin_terminal() -> bool:
    """A person types there (or nobody does)."""
    return sys.stdin is None or sys.stdin.isatty()


def _without_final_newline(text: str) -> str:
    """Editors and `echo` end a text with a newline that is no part of the prompt."""
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")

"""Text that comes from outside: arguments, files, stdin. Invalid UTF-8 is refused with its place."""

import sys
from pathlib import Path

from ambidex.core.errors import RequestError


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
        data = path.read_bytes()
    except OSError as error:
        raise RequestError(f"--file {path} cannot be read: {error.strerror}") from error
    return _without_final_newline(decode(data, name=str(path)))


def read_prompt_stdin() -> str:
    """The prompt on stdin, up to its end."""
    return _without_final_newline(decode(sys.stdin.buffer.read(), name="stdin"))


def is_stdin_terminal() -> bool:
    """A person types there (or nobody does)."""
    return sys.stdin is None or sys.stdin.isatty()


def _without_final_newline(text: str) -> str:
    """Editors and `echo` end a text with a newline that is no part of the prompt."""
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")

"""JSON that comes with models: read with a limit, and never trusted."""

import json
import reprlib
from pathlib import Path
from typing import Final

from ambidex.core.errors import ModelFileError
from ambidex.core.units import MIB, format_size
from ambidex.formats.bounded_file import read_file

_MAX_BYTES: Final = 256 * MIB  # the largest index in the wild has some 10 MB
_MAX_SHOWN: Final = 200  # characters: names of tensors are shown whole


def read_json_object(path: Path) -> dict[str, object]:
    """Read a file that holds one JSON object.

    Raises:
        ModelFileError: it cannot be read, is too large, is no JSON object, or names a key twice.
    """
    try:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise ModelFileError(f"{path} has {format_size(size)}: at most {format_size(_MAX_BYTES)} are read")
        text = read_file(path, max_bytes=_MAX_BYTES)  # what is no regular file has no size
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_json_object(text, where=str(path))


def parse_json_object(text: bytes, *, where: str) -> dict[str, object]:
    """Parse one JSON object; `where` names it in the error.

    Raises:
        ModelFileError: it is no JSON object, or names a key twice.
    """
    try:
        value = json.loads(text, object_pairs_hook=_reject_repeated_keys)
    except (ValueError, RecursionError) as error:  # ValueError: also bad UTF-8, and numbers of thousands of digits
        raise ModelFileError(f"{where} is not valid JSON ({error}): download it again") from error
    if not isinstance(value, dict):
        raise ModelFileError(f"{where} is {show(value)}: it must be a JSON object")
    return value


def show(value: object) -> str:
    """A value from a file for an error message: not too long, and nothing that a terminal would obey."""
    return repr(value) if isinstance(value, str) and len(value) <= _MAX_SHOWN else reprlib.repr(value)


def _reject_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key, value in pairs:
        if key in values:
            raise ValueError(f"the key {show(key)} is there twice")
        values[key] = value
    return values

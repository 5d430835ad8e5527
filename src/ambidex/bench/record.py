"""The file of records: one JSON line a run, appended."""

import json
from collections.abc import Mapping
from pathlib import Path

from ambidex.core.errors import ConfigError


def check_output(path: Path) -> None:
    """See to it before a long run that records can be appended; creates the file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise _unwritable(path, error) from error


def append_record(path: Path, record: Mapping[str, object]) -> str:
    """Append one JSON line to a file that only ever grows, and return the line.

    Raises:
        ValueError: the record holds a value that is not finite or not JSON.
        ConfigError: the file cannot be written (any more): the disk is full.
    """
    line = json.dumps(record, allow_nan=False, ensure_ascii=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        raise _unwritable(path, error) from error
    return line


def _unwritable(path: Path, error: OSError | ValueError) -> ConfigError:
    reason = getattr(error, "strerror", None) or error
    return ConfigError(f"--output {path} cannot be written: {reason}: name another file")

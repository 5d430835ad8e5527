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
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--output {path} cannot be written: {reason}: name another file") from error


def append_record(path: Path, record: Mapping[str, object]) -> str:
    """Append one JSON line to a file that only ever grows, and return the line.

    Raises:
        ValueError: the record holds a value that is not finite or not JSON.
    """
    line = json.dumps(record, allow_nan=False, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    return line

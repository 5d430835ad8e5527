"""The file of answers to a JSONL file of prompts: appended to, and taken up again by the next run.

    {"id": null, "index": 1, "text": "Hello!", "finish_reason": "stop", …}
    {"id": "a", "index": 0, "error": "…"}

A line of the input is done when its id is here, or, if it has none, its index. Delete a line to have it asked again.
"""

import fcntl
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from ambidex.cli.jsonl_in import BadLine, Line, LineId
from ambidex.core.errors import ConfigError

_RECORD_START: Final = b'{"id": '

Key = tuple[str, str | int]
"""("id", its id) of a line that has one, else ("index", its index)."""


class ResultFile:
    """Appends answers; each is one write, so a kill tears at most the last line."""

    def __init__(self, file: IO[bytes], done: frozenset[Key]) -> None:
        self._file = file
        self._done = done
        self.num_answered = 0
        self.num_failed = 0

    def is_done(self, line: Line | BadLine) -> bool:
        """An earlier run has dealt with the line."""
        return _key(line.line_id, line.index) in self._done

    def write_answer(self, line: Line, answer: Mapping[str, Any]) -> None:
        """Append an answer."""
        self.num_answered += 1
        self._append({"id": line.line_id, "index": line.index, **answer})

    def write_error(self, line: Line | BadLine, error: str) -> None:
        """Append why there is no answer."""
        self.num_failed += 1
        self._append({"id": line.line_id, "index": line.index, "error": error})

    def _append(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()


@contextmanager
def open_results(name: str) -> Iterator[ResultFile]:
    """Open a file of answers (`-`: stdout) for this run alone.

    Raises:
        ConfigError: it cannot be written, another run has it, or it holds something else; it is unchanged then.
    """
    if name == "-":
        yield ResultFile(sys.stdout.buffer, frozenset())
        return
    try:
        file = Path(name).open("a+b")  # noqa: SIM115 - closed by the with below; the try is for opening alone
    except OSError as error:
        raise ConfigError(f"--output {name} cannot be written: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"--output {name} is being written by another run: wait for it or stop it") from None
        yield ResultFile(file, _take_up(name, file))


def _take_up(name: str, file: IO[bytes]) -> frozenset[Key]:
    """Check what an earlier run left, mend its last line, and tell what is done."""
    file.seek(0)
    data = file.read()
    *lines, tail = data.split(b"\n")
    keys = []
    for number, line in enumerate(lines, start=1):
        key = _read_key(line)
        if key is None:
            raise ConfigError(f"--output {name}: line {number} is no answer of this program: name another file")
        keys.append(key)
    if tail:
        keys += _mend_tail(name, file, tail, start=len(data) - len(tail))
    return frozenset(keys)


def _mend_tail(name: str, file: IO[bytes], tail: bytes, *, start: int) -> list[Key]:
    """End a last line that lacks only its newline, cut off a torn one."""
    key = _read_key(tail)
    if key is not None:
        file.write(b"\n")
        return [key]
    if tail[: len(_RECORD_START)] != _RECORD_START[: len(tail)]:
        raise ConfigError(f"--output {name}: its last line is no answer of this program: name another file")
    file.truncate(start)
    return []


def _read_key(line: bytes) -> Key | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("index"), int) or "id" not in record:
        return None
    return _key(record["id"], record["index"])


def _key(line_id: LineId, index: int) -> Key:
    return ("index", index) if line_id is None else ("id", line_id)

"""The file of answers to a JSONL file of prompts: appended to, and taken up again by the next run.

    {"id": null, "index": 1, "hash": "5d0…", "text": "Hello!", "finish_reason": "stop", …}
    {"id": "a", "index": 0, "hash": "f3a…", "error": "…"}

A line of the input is done when its id is here, or, if it has none, its index; `hash` must still be its fingerprint.
Delete a line to have it asked again.
"""

import fcntl
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from ambidex.cli.jsonl_in import BadLine, Line, LineId
from ambidex.cli.source import quote
from ambidex.core.errors import ConfigError, MachineError

_RECORD_START: Final = b'{"id": '

Key = tuple[str, str | int]
"""("id", its id) of a line that has one, else ("index", its index)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What an earlier run has written about a line."""

    key: Key
    fingerprint: str
    is_error: bool


class ResultFile:
    """Appends answers; each is one write, so a kill tears at most the last line.

    `todo` are the lines that no earlier run has dealt with; `num_failed_before` are those that one gave an error.
    """

    def __init__(
        self, file: IO[bytes], name: str, lines: Sequence[Line | BadLine], earlier: Mapping[Key, Record]
    ) -> None:
        self._file = file
        self._name = name
        self.todo = [line for line in lines if _key_of(line) not in earlier]
        done = [earlier[_key_of(line)] for line in lines if _key_of(line) in earlier]
        self.num_failed_before = sum(record.is_error for record in done)
        self.num_answered = 0
        self.num_failed = 0

    def write_answer(self, line: Line, answer: Mapping[str, Any]) -> None:
        """Append an answer.

        Raises:
            MachineError: the file takes no more, such as when the disk is full.
        """
        self._append(line, answer)
        self.num_answered += 1

    def write_error(self, line: Line | BadLine, error: str) -> None:
        """Append why there is no answer.

        Raises:
            MachineError: as `write_answer`.
        """
        self._append(line, {"error": error})
        self.num_failed += 1

    def _append(self, line: Line | BadLine, result: Mapping[str, Any]) -> None:
        record = {"id": line.line_id, "index": line.index, "hash": line.fingerprint, **result}
        data = memoryview(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        try:
            while data:
                data = data[self._file.write(data) :]
            self._file.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            reason = error.strerror or error
            raise MachineError(
                f"{self._name} cannot be written: {reason}: mend that and run the same command again"
            ) from error


@contextmanager
def open_results(name: str, lines: Sequence[Line | BadLine]) -> Iterator[ResultFile]:
    """Open a file of answers to `lines` for this run alone; `-` (stdout), a pipe or a device is only written.

    Raises:
        ConfigError: it cannot be written, another run has it, it holds something else, or answers to lines that have
            changed since; it is unchanged then.
    """
    if name == "-":
        yield ResultFile(sys.stdout.buffer, "standard output", lines, {})
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(Path(name).open("ab", buffering=0))
            is_regular = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
            earlier = _take_up(name, file, lines) if is_regular else {}
        except OSError as error:
            raise ConfigError(f"--output {name} cannot be written: {error.strerror or error}") from error
        yield ResultFile(file, f"--output {name}", lines, earlier)


def _take_up(name: str, file: IO[bytes], lines: Sequence[Line | BadLine]) -> dict[Key, Record]:
    """Check what an earlier run left, then mend its last line: add its newline, or cut it off if it is torn."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(f"--output {name} is being written by another run: wait for it or stop it") from None
    data = Path(name).read_bytes()
    *rows, tail = data.split(b"\n")
    records = [_read_record(row) or _refuse(name, f"line {number}") for number, row in enumerate(rows, start=1)]
    last = _read_record(tail)
    if last is not None:
        records.append(last)
    elif tail[: len(_RECORD_START)] != _RECORD_START[: len(tail)]:
        _refuse(name, "its last line")
    earlier = {record.key: record for record in records}
    _refuse_changed_lines(name, lines, earlier)
    if last is not None:
        file.write(b"\n")
    elif tail:
        file.truncate(len(data) - len(tail))
    return earlier


def _refuse(name: str, place: str) -> NoReturn:
    raise ConfigError(f"--output {name}: {place} is no answer of this program: name another file")


def _refuse_changed_lines(name: str, lines: Sequence[Line | BadLine], earlier: Mapping[Key, Record]) -> None:
    for line in lines:
        key = _key_of(line)
        if key in earlier and earlier[key].fingerprint != line.fingerprint:
            raise ConfigError(
                f"--output {name}: the line of {key[0]} {quote(key[1])} has changed since an earlier run dealt with it "
                f"(prompt or settings): name another --output, go back to the old input and settings, or delete its "
                f"record to have it asked again"
            )


def _read_record(row: bytes) -> Record | None:
    try:
        record = json.loads(row)
    except (ValueError, RecursionError):
        return None
    match record:
        case {"id": None | str() | int() as line_id, "index": int(index), "hash": str(fingerprint)} if not (
            isinstance(line_id, bool) or isinstance(index, bool)
        ):
            return Record(key=_key(line_id, index), fingerprint=fingerprint, is_error="error" in record)
    return None


def _key_of(line: Line | BadLine) -> Key:
    return _key(line.line_id, line.index)


def _key(line_id: LineId, index: int) -> Key:
    return ("index", index) if line_id is None else ("id", line_id)

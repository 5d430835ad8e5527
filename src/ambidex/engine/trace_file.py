"""`TraceFile`: a timeline for Perfetto or chrome://tracing, as a JSON array of trace events.

    [
    {"name": "process_name", "ph": "M", …},        names of process and tracks
    {"name": "step 0", "ph": "X", "ts": 12.5, …},  a span; microseconds since the file was opened
    {"name": "KV bytes", "ph": "C", …}             counters
    ]

Each step is one write that replaces the closing bracket, so the file is valid JSON between any two steps, also if the
process is killed there. Source: "Trace Event Format" (Chromium project), JSON array format.
"""

import fcntl
import json
import logging
import os
import stat
import time
import weakref
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Final

from ambidex.core.errors import ConfigError
from ambidex.core.trace import NullTracer, Tracer, Track
from ambidex.core.units import MIB, format_size

logger = logging.getLogger(__name__)

MAX_BYTES: Final = 256 * MIB
"""Of the file; then no more is written. A step of 30 layers with two lanes takes 9 KiB, and viewers in a browser
slow down beyond some hundred MiB."""
_OPENING: Final = b'[\n{"name": "process_name"'
_CLOSING: Final = b"\n]\n"


def open_tracer(name: str | None) -> Tracer:
    """The tracer of a setting: of a file, or the silent one.

    Raises:
        ConfigError: see `TraceFile`.
    """
    return NullTracer() if name is None else TraceFile(name)


class TraceFile:
    """Writes what it is told, a step at a time; between two steps it holds the step's events in memory.

    If the file takes no more (a full disk, or `max_bytes`), a warning says so and the engine goes on without it.

    Args:
        name: a file of its own; an earlier timeline there is replaced.
    Raises:
        ConfigError: it cannot be written, is in use, is no regular file, or holds something else.
    """

    def __init__(self, name: str, *, max_bytes: int = MAX_BYTES) -> None:
        self._name = name
        self._max_bytes = max_bytes
        self._file = _open(name)
        weakref.finalize(self, self._file.close)
        self._start_ns = time.perf_counter_ns()
        self._events: list[bytes] = []
        self._end = 0
        self._is_full = False
        self._add_metadata("process_name", 0, {"name": "ambidex"})
        for number, track in enumerate(Track, start=1):
            self._add_metadata("thread_name", number, {"name": track.value})
            self._add_metadata("thread_sort_index", number, {"sort_index": number})
        self._numbers = {track: number for number, track in enumerate(Track, start=1)}
        try:
            self._file.truncate(0)
            self._write(b"[\n" + b",\n".join(self._events))
        except OSError as error:
            raise ConfigError(f"`trace` {name} cannot be written: {error.strerror or error}") from error
        self._events.clear()

    @property
    def is_on(self) -> bool:
        """Someone keeps what is said."""
        return True

    def add_span(
        self, track: Track, name: str, start_ns: int, end_ns: int, args: Mapping[str, int | str] | None = None
    ) -> None:
        """Something took from `start_ns` to `end_ns`."""
        if self._is_full:
            return
        event: dict[str, Any] = {
            "name": name, "ph": "X", "pid": os.getpid(), "tid": self._numbers[track],
            "ts": (start_ns - self._start_ns) / 1e3, "dur": (end_ns - start_ns) / 1e3,
        }  # fmt: skip
        if args:
            event["args"] = dict(args)
        self._add(event)

    def add_counters(self, name: str, at_ns: int, values: Mapping[str, int]) -> None:
        """Values that hold from now on, drawn as one chart."""
        if not self._is_full:
            ts = (at_ns - self._start_ns) / 1e3
            self._add({"name": name, "ph": "C", "pid": os.getpid(), "ts": ts, "args": dict(values)})

    def flush(self) -> None:
        """Write the events of a step."""
        if self._is_full or not self._events:
            return
        data = b",\n" + b",\n".join(self._events)
        self._events.clear()
        if self._end + len(data) + len(_CLOSING) > self._max_bytes:
            self._give_up(f"it would be larger than {format_size(self._max_bytes)}")
            return
        try:
            self._write(data)
        except OSError as error:
            self._give_up(error.strerror or str(error))

    def _write(self, data: bytes) -> None:
        """Put data in place of the closing bracket, and the bracket behind it."""
        rest = memoryview(data + _CLOSING)
        self._file.seek(self._end)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._end += len(data)

    def _give_up(self, reason: str) -> None:
        self._is_full = True
        logger.warning("`trace` %s ends here: %s; the engine goes on", self._name, reason)

    def _add_metadata(self, kind: str, track_number: int, args: Mapping[str, int | str]) -> None:
        self._add({"name": kind, "ph": "M", "pid": os.getpid(), "tid": track_number, "args": dict(args)})

    def _add(self, event: Mapping[str, Any]) -> None:
        self._events.append(json.dumps(event, ensure_ascii=False).encode())


def _open(name: str) -> FileIO:
    """Open for reading and writing, created if it is not there, and see to it that nothing else is lost."""
    if not name:
        raise ConfigError("`trace` names no file: give a file name, or leave it out")
    try:
        Path(name).open("ab").close()
        file = FileIO(name, "r+")
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"`trace` {name} cannot be written: {reason}: name another file") from error
    problem = _find_problem(file)
    if problem is not None:
        file.close()
        raise ConfigError(f"`trace` {name} {problem}: name another file")
    return file


def _find_problem(file: FileIO) -> str | None:
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        return "is no regular file, as a timeline that is valid at any time needs"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "is in use, as the output of this run or by another engine"
    beginning = file.read(len(_OPENING)) or b""
    return None if beginning in (b"", _OPENING) else "holds something else than an earlier timeline"

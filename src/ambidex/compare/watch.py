"""Watching a worker's process: what it tells, that it ends, and why where it does not."""

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

from ambidex.compare.cells import Cell
from ambidex.compare.process import TELL_PLACE
from ambidex.core.config import EngineConfig

POLL_S: Final = 0.2
END_S: Final = 10.0
"""For a worker to end once it has told everything; and for the system to clear up after one that was killed, which
takes a while where it held a GPU."""
PLACE_S: Final = 0.5
"""For a worker that takes too long to say where it is."""
RATES_S: Final = 600.0
"""So long the rates of memories and links hold: measuring them takes longer than a small model's steps, and a shared
machine's are others an hour later."""
MAX_REASON: Final = 600
"""Characters of a reason in a record."""
_ERROR: Final = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b.*|Fatal Python error: .*")
_FRAME: Final = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)')
Rates = Mapping[str, float | None]


class KnownRates:
    """Rates that a worker has measured, for those after it."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int | None], tuple[float, Rates]] = {}

    def find(self, config: EngineConfig) -> Rates | None:
        """Those of such an engine, unless they are old."""
        since, rates = self._known.get(_place(config), (-RATES_S, None))
        return rates if time.monotonic() - since < RATES_S else None

    def keep(self, config: EngineConfig, rates: Rates) -> None:
        """Remember them."""
        self._known[_place(config)] = time.monotonic(), rates


def _place(config: EngineConfig) -> tuple[str, int | None]:
    """What rates depend on."""
    return config.device, config.num_threads


def follow(
    process: BaseProcess,
    cells: Sequence[Cell],
    results: Path,
    errors: Path,
    cell_timeout_s: float,
    *,
    keep_rates: Callable[[Rates], None],
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Hand on what a worker tells, until it has told everything or ends, or a cell takes too long."""
    told: set[int] = set()
    begun, since, num_read = 0, time.monotonic(), 0
    while True:
        is_over = process.exitcode is not None
        lines = results.read_text(encoding="utf-8").split("\n")[:-1]
        for line in lines[num_read:]:
            num_read += 1
            event = json.loads(line)
            since = time.monotonic()
            if "begun" in event:
                begun = event["begun"]
            elif "rates" in event:
                keep_rates(event["rates"])
            elif "failed" in event:
                told.add(event["index"])
                yield cells[event["index"]], {"status": "failed", "reason": event["failed"]}
            else:
                told.add(event["index"])
                yield cells[event["index"]], {"status": "done", "figures": event["figures"]}
        if len(told) == len(cells):
            process.join(END_S)  # how it ends, and whether, is no cell's business
            return
        if is_over:
            if (process.exitcode != 0 or not told) and begun not in told:
                reason = explain_exit(process.exitcode or 0, errors.read_text(encoding="utf-8", errors="replace"))
                yield cells[begun], {"status": "failed", "reason": reason}
            return
        if time.monotonic() - since > cell_timeout_s:
            stuck = next(index for index in (begun, *range(len(cells))) if index not in told)
            where = _ask_place(process, errors)
            reason = f"it took longer than {cell_timeout_s:g} s (--cell-timeout){where}"
            yield cells[stuck], {"status": "failed", "reason": reason}
            return
        time.sleep(POLL_S)


def explain_exit(code: int, stderr: str) -> str:
    """One line on how a process failed: its last one that names an error, else its last one."""
    lines = stderr.strip().splitlines() or ["no message"]
    last = next((line for line in reversed(lines) if _ERROR.fullmatch(line)), lines[-1])[:MAX_REASON]
    return f"killed by {signal.Signals(-code).name}: {last}" if code < 0 else f"exit code {code}: {last}"


def _ask_place(process: BaseProcess, errors: Path) -> str:
    """Where a worker is that takes too long; empty if it does not say."""
    num_before = errors.stat().st_size
    if process.pid is None or process.exitcode is not None:
        return ""
    os.kill(process.pid, TELL_PLACE)
    time.sleep(PLACE_S)
    return find_place(errors.read_bytes()[num_before:].decode(errors="replace"))


def find_place(stack: str) -> str:
    """Words on the innermost line of this package in a stack as `faulthandler` writes it."""
    frames = [frame for line in stack.splitlines() if (frame := _FRAME.match(line))]
    for frame in frames:
        path = Path(frame["file"])
        if "ambidex" in path.parts:
            inner = "" if frame is frames[0] else f" (inside {Path(frames[0]['file']).name} {frames[0]['name']})"
            return f", in {path.name} line {frame['line']}, {frame['name']}{inner}"
    return ""


__all__ = ["END_S", "KnownRates", "explain_exit", "find_place", "follow"]

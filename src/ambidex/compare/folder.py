"""`ReportFolder`: where a comparison keeps what it measured.

compare.json    says that the folder is a comparison's; locked while one runs
cells.jsonl     a line for each measured cell, appended as soon as it is there
report.html     everything, with plots; needs nothing from elsewhere
report.md       the tables
"""

import fcntl
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from ambidex.compare.cells import Cell
from ambidex.core.errors import ConfigError

MARKER: Final = "compare.json"
_FORMAT: Final = {"format": "ambidex compare", "version": 1}
Line = Mapping[str, Any]


class ReportFolder:
    """The folder of one comparison, held alone until it is closed.

    Args:
        path: is made if it is not there; may hold an earlier run, which is gone on with.
    Raises:
        ConfigError: it holds something else, is in use, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            names = [entry.name for entry in path.iterdir()]
            if names and MARKER not in names:
                raise ConfigError(
                    f"--report {path} is no folder of a comparison (it holds {', '.join(sorted(names)[:3])}): name an "
                    f"empty or new one"
                )
            self._marker = (path / MARKER).open("a+", encoding="utf-8")
            try:
                self._take()
                (path / "cells.jsonl").open("a").close()
            except BaseException:
                self._marker.close()
                raise
        except (OSError, ValueError) as error:  # ValueError: a name with a null byte, a marker that is no text
            raise ConfigError(f"--report {path} cannot be used: {error}: name another folder") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._marker.close()

    def lines(self) -> list[Line]:
        """What was measured so far, the last line of each cell; a line that a kill has cut off is left out.

        Raises:
            ConfigError: a line is none of a comparison.
        """
        found: dict[str, Line] = {}
        text = (self.path / "cells.jsonl").read_text(encoding="utf-8")
        rows = text.splitlines()
        for number, row in enumerate(rows, 1):
            try:
                line = json.loads(row)
                key = Cell.of(line["cell"]).key
                if line["status"] not in ("done", "failed"):
                    raise ValueError(f"status {line['status']!r}")
            except (ValueError, KeyError, TypeError) as error:
                if number == len(rows) and not text.endswith("\n"):
                    break
                raise ConfigError(
                    f"{self.path / 'cells.jsonl'}, line {number} is no cell of a comparison ({error}): remove the line"
                ) from None
            found.pop(key, None)
            found[key] = line
        return list(found.values())

    def append(self, line: Line) -> None:
        """Keep a line for good.

        Raises:
            ValueError: it holds a value that is not finite or not JSON.
        """
        text = json.dumps(line, allow_nan=False, ensure_ascii=False)
        with (self.path / "cells.jsonl").open("r+b") as file:
            size = file.seek(0, 2)
            torn = b""
            if size:
                file.seek(size - 1)
                torn = b"" if file.read(1) == b"\n" else b"\n"
            if torn:  # a kill cut the last line off: drop what is left of it
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
                file.seek(0, 2)
            file.write(text.encode() + b"\n")

    def write_report(self, html: str, markdown: str) -> None:
        """Replace both forms of the report at once."""
        for name, text in (("report.html", html), ("report.md", markdown)):
            part = self.path / f".{name}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(self.path / name)

    def _take(self) -> None:
        """Lock the marker, and write it or see that it is ours."""
        try:
            fcntl.flock(self._marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"--report {self.path} is in use by another comparison: wait for it") from None
        self._marker.seek(0)
        text = self._marker.read()
        if not text:
            self._marker.write(json.dumps(_FORMAT) + "\n")
            self._marker.flush()
            return
        if json.loads(text) != _FORMAT:
            raise ConfigError(f"--report {self.path}: {MARKER} there is not of this version of ambidex: name another")


def split_done(groups: Sequence[Sequence[Cell]], lines: Sequence[Line], *, retry: bool) -> list[list[Cell]]:
    """The cells that are still to be measured, in groups; failed ones count as measured unless `retry`."""
    known = {Cell.of(line["cell"]).key for line in lines if line["status"] == "done" or not retry}
    left = [[cell for cell in group if cell.key not in known] for group in groups]
    return [group for group in left if group]

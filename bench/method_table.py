"""What did each method cost and bring at one point of a comparison? A Markdown table, as README.md and docs have it.

    python bench/method_table.py bench/results/compare_quick.jsonl --context 512
    python bench/method_table.py REPORT/cells.jsonl --model llama-3.1-8b --context 16384

Reads what `ambidex bench compare` and `peers/compare.py` wrote and measures nothing. *KV read* is over what `exact`
read at the same point, all lanes together. Methods that were measured twice are there with the last figures.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from ambidex.compare.folder import Line
from ambidex.compare.tables import DASH, Entry, find_entries, models_of, quality_cells

HEAD: Final = ("method", "steps", "ms a step", "times exact's speed", "KV read", "likeliest token equal", "KL")
REFERENCE: Final = "exact"


def main() -> int:
    """Print the table; exit code 2: nothing was measured at such a point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("cells", type=Path, help="cells.jsonl of a report, or a record of one")
    parser.add_argument("--model", help="default: the first of the file")
    parser.add_argument("--context", type=int, required=True, help="tokens")
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    lines = [json.loads(row) for row in args.cells.read_text(encoding="utf-8").splitlines()]
    rows = make_rows(lines, model=args.model, context=args.context, batch=args.batch)
    if not rows:
        print(f"{args.cells} has no speed of context {args.context}, batch {args.batch} of such a model: it has "
              f"{', '.join(models_of(lines)) or 'none'}", file=sys.stderr)  # fmt: skip
        return 2
    for row in (HEAD, ["---"] * len(HEAD), *rows):
        print(f"| {' | '.join(row)} |")
    return 0


def make_rows(lines: Sequence[Line], *, model: str | None, context: int, batch: int) -> list[list[str]]:
    """A row for each method at the point, in the order of the lines; see `HEAD`."""
    entries = {
        entry.name: entry
        for entry in find_entries(lines)
        if entry.cell.model == (model or models_of(lines)[0])
        and (entry.cell.context, entry.cell.batch) == (context, batch)
    }
    exact = entries.get(REFERENCE)
    return [_row(entry, exact) for entry in entries.values()]


def _row(entry: Entry, exact: Entry | None) -> list[str]:
    top1, divergence, *_ = quality_cells(entry.quality)
    return [
        f"`{entry.name}`",
        entry.form,
        f"{entry.step_ms:.3g}",
        DASH if exact is None else f"{exact.step_ms / entry.step_ms:.2f}",
        _share(entry.speed.get("lane_bytes"), None if exact is None else exact.speed.get("lane_bytes")),
        top1,
        divergence,
    ]


def _share(own: Mapping[str, int] | None, whole: Mapping[str, int] | None) -> str:
    if not own or not whole:
        return DASH
    return f"{100 * sum(own.values()) / sum(whole.values()):.0f} %"


if __name__ == "__main__":
    sys.exit(main())

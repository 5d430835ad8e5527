"""A whole comparison: cells that are not there yet, each group in a process of its own, and the report at the end."""

import dataclasses
import json
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from ambidex.bench.machine import environment
from ambidex.compare.cells import Cell, CellKind, Grid
from ambidex.compare.folder import Line, ReportFolder, split_done
from ambidex.compare.page import make_html
from ambidex.compare.process import start_worker
from ambidex.compare.tables import make_markdown
from ambidex.compare.watch import END_S, KnownRates, explain_exit, follow
from ambidex.core.config import EngineConfig

Tell = Callable[[str], None]


def run_grid(
    grid: Grid, base: EngineConfig, folder: ReportFolder, *, text: str, retry: bool, cell_timeout_s: float, tell: Tell
) -> int:
    """Measure what the folder does not hold yet; returns how many cells of the grid have failed.

    Args:
        base: settings that all engines share.
        text: what predictions are made on.
        retry: measure failed cells again.
        cell_timeout_s: a cell that takes longer has failed.
        tell: is told what is done, a line at a time.
    Raises:
        KeyboardInterrupt: Ctrl-C; what has been measured is kept, and in the report.
    """
    groups = grid.cells(base)
    lines = folder.lines()
    left = split_done(groups, lines, retry=retry)
    num_cells, num_left = (sum(map(len, some)) for some in (groups, left))
    if num_left < num_cells:
        tell(f"{num_cells - num_left} of {num_cells} cells are in {folder.path} already")
    opening = environment()
    variants = {variant.name: variant for variant in grid.variants}
    number = num_cells - num_left
    rates = KnownRates()
    before = signal.signal(signal.SIGTERM, _interrupt)  # ended from outside, it ends its worker and writes the report
    try:
        for group in left:
            first = group[0]
            config = variants[first.variant].config(base, model=first.model, kv_gpu_tokens=first.kv_gpu_tokens)
            for cell, outcome in measure_group(config, group, text=text, cell_timeout_s=cell_timeout_s, rates=rates):
                number += 1
                folder.append({"cell": cell.record(), **outcome, **opening})
                tell(f"[{number}/{num_cells}] {cell.words()}: {describe(cell, outcome)}")
    finally:
        signal.signal(signal.SIGTERM, before)
        write_report(folder)
    keys = {cell.key for group in groups for cell in group}
    return sum(line["status"] == "failed" and Cell.of(line["cell"]).key in keys for line in folder.lines())


def _interrupt(_signum: int, _frame: object) -> None:
    raise KeyboardInterrupt


def write_report(folder: ReportFolder) -> None:
    """Make both forms of the report from what the folder holds."""
    lines = folder.lines()
    folder.write_report(make_html(lines), make_markdown(lines))


def measure_group(
    config: EngineConfig, cells: Sequence[Cell], *, text: str, cell_timeout_s: float, rates: KnownRates | None = None
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Measure cells that share an engine; each with {"status", "reason" or "figures"}."""
    left, rates = list(cells), rates or KnownRates()
    while left:
        given = len(left)
        for cell, outcome in _run_worker(config, tuple(left), rates, text=text, cell_timeout_s=cell_timeout_s):
            left.remove(cell)
            yield cell, outcome
        if len(left) == given:  # the process ended without a word on any cell
            raise AssertionError("a worker that tells nothing fails its first cell")


def _run_worker(
    config: EngineConfig, cells: Sequence[Cell], rates: KnownRates, *, text: str, cell_timeout_s: float
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    part = {
        "config": {
            field.name: str(value) if isinstance(value := getattr(config, field.name), StrEnum) else value
            for field in dataclasses.fields(config)
        },
        "cells": [cell.record() for cell in cells],
        "text": None if cells[0].kind is CellKind.TIMELINE else text,
        "rates": rates.find(config),
    }
    with tempfile.TemporaryDirectory() as folder:
        part_file, results, errors = (Path(folder, name) for name in ("part.json", "results.jsonl", "stderr"))
        part_file.write_text(json.dumps(part), encoding="utf-8")
        results.touch()
        errors.touch()
        process = start_worker(part_file, results, errors)
        try:
            yield from follow(
                process, cells, results, errors, cell_timeout_s, keep_rates=lambda found: rates.keep(config, found)
            )
        finally:
            process.kill()
            process.join(END_S)


def describe(cell: Cell, outcome: Mapping[str, Any]) -> str:
    """A measured cell in a few words."""
    if outcome["status"] == "failed":
        return f"failed: {outcome['reason']}"
    figures = outcome["figures"]
    match cell.kind:
        case CellKind.SPEED:
            return f"{figures['step_s']['median'] * 1e3:.3g} ms a step"
        case CellKind.QUALITY:
            return f"{100 * figures['agreement']['top1_equal']:.1f} % of tokens as with all keys"
        case CellKind.TIMELINE:
            return f"{len(figures['spans'])} spans"


__all__ = ["Line", "describe", "explain_exit", "measure_group", "run_grid", "write_report"]

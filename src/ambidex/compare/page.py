"""The report as one HTML file: tables and plots, no script, nothing from elsewhere."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, Template

from ambidex.compare.cells import Cell, CellKind
from ambidex.compare.folder import Line
from ambidex.compare.tables import (
    COLUMNS,
    FORM_NOTE,
    FRONT_COLUMNS,
    FRONT_NOTE,
    RATIO_NOTE,
    Entry,
    busy_note,
    find_entries,
    find_failed,
    find_front,
    find_fronts,
    find_ratios,
    machines_of,
    models_of,
)
from ambidex.plot.chart import Chart, Series, Span, Timeline


def make_html(lines: Sequence[Line]) -> str:
    """The report of a comparison's lines."""
    entries = find_entries(lines)
    models = [
        {
            "name": model,
            "plots": make_plots([entry for entry in entries if entry.cell.model == model])
            + _timelines([line for line in lines if line["cell"]["model"] == model]),
            "rows": [entry.row() for entry in entries if entry.cell.model == model],
            "fronts": find_fronts([entry for entry in entries if entry.cell.model == model]),
            "ratios": find_ratios([entry for entry in entries if entry.cell.model == model]),
        }
        for model in models_of(lines)
    ]
    return _template().render(
        machines=machines_of(lines),
        dates=sorted({line["date"] for line in lines}),
        note=busy_note(lines),
        columns=COLUMNS,
        forms=any(entry.is_op_by_op for entry in entries),
        front_columns=FRONT_COLUMNS,
        front_note=FRONT_NOTE,
        form_note=FORM_NOTE,
        models=models,
        ratio_note=RATIO_NOTE,
        failed=find_failed(lines),
    )


def make_plots(entries: Sequence[Entry]) -> list[str]:
    """SVG of each plot of one model, for each KV budget."""
    plots = []
    for budget in dict.fromkeys(entry.cell.kv_gpu_tokens for entry in entries):
        own = [entry for entry in entries if entry.cell.kv_gpu_tokens == budget]
        contexts = sorted({entry.cell.context for entry in own})
        batches = sorted({entry.cell.batch or 0 for entry in own})
        words = "" if budget is None else f", {budget} tokens of KV on the accelerator"
        alone = [entry for entry in own if entry.cell.batch == batches[0]]
        plots += [
            plot
            for context in contexts
            if (plot := _speed_against_quality([entry for entry in alone if entry.cell.context == context], words))
        ]
        if len(contexts) > 1:
            plots.append(
                Chart(
                    title=f"Latency against context, batch {batches[0]}{words}",
                    x_name="context, tokens",
                    y_name="ms a step",
                    series=_series(alone, _context, lambda entry: entry.step_ms),
                    is_x_log=True,
                    is_y_log=True,
                    x_ticks=contexts,
                ).svg()
            )
        if len(batches) > 1:
            longest = [entry for entry in own if entry.cell.context == contexts[-1]]
            plots.append(
                Chart(
                    title=f"Throughput against batch, context {contexts[-1]}{words}",
                    x_name="requests in a step",
                    y_name="tokens/s",
                    series=_series(longest, _batch, _tokens_per_s),
                    is_x_log=True,
                    x_ticks=batches,
                ).svg()
            )
    return plots


def _speed_against_quality(entries: Sequence[Entry], words: str) -> str:
    """Of one context and batch, with the front; empty if no quality was measured."""
    known = [entry for entry in entries if entry.top1_equal is not None]
    if not known:
        return ""
    cell = known[0].cell
    corners = [(_quality(entry), _tokens_per_s(entry)) for entry in find_front(known)]
    front = [Series(name="front", points=corners, is_dashed=True, has_marks=False)] if len(corners) > 1 else []
    return Chart(
        title=f"Speed against quality, context {cell.context}, batch {cell.batch}{words}",
        x_name="likeliest token equal to full attention's, %",
        y_name="tokens/s",
        series=[*_series(known, _quality, _tokens_per_s, is_line=False), *front],
        is_y_log=True,
    ).svg()


def _quality(entry: Entry) -> float:
    return 100 * (entry.top1_equal or 0.0)


def _context(entry: Entry) -> float:
    return float(entry.cell.context)


def _batch(entry: Entry) -> float:
    return float(entry.cell.batch or 0)


def _tokens_per_s(entry: Entry) -> float:
    return float(entry.speed["tokens_per_s"])


def _series(
    entries: Sequence[Entry], x: Callable[[Entry], float], y: Callable[[Entry], float], *, is_line: bool = True
) -> list[Series]:
    """A series for each method, its points in the order of x."""
    names = dict.fromkeys(entry.name for entry in entries)
    series = []
    for name in names:
        own = sorted((entry for entry in entries if entry.name == name), key=x)
        notes = [
            f"context {entry.cell.context}, batch {entry.cell.batch}: {entry.step_ms:.3g} ms, "
            f"{_tokens_per_s(entry):.3g} tokens/s"
            for entry in own
        ]
        series.append(Series(name=name, points=[(x(entry), y(entry)) for entry in own], notes=notes, is_line=is_line))
    return series


def _timelines(lines: Sequence[Line]) -> list[str]:
    plots = []
    for line in lines:
        cell = Cell.of(line["cell"])
        if line["status"] != "done" or cell.kind is not CellKind.TIMELINE:
            continue
        spans = [_span(*span) for span in line["figures"]["spans"]]
        budget = "" if cell.kv_gpu_tokens is None else f", {cell.kv_gpu_tokens} tokens of KV on the accelerator"
        title = f"Lanes in two steps of {cell.variant}, context {cell.context}, batch {cell.batch}{budget}"
        plots.append(Timeline(title=title, spans=[span for span in spans if span.kind not in _OUTER]).svg())
    return plots


_OUTER = ("step", "execute")
"""Spans that hold others: drawn, they would hide them."""


def _span(track: str, name: str, start_ms: float, end_ms: float) -> Span:
    kind = re.sub(r"\s*\d+.*", "", name)  # `attend layer 3` and `step 7` are of a kind with their neighbours
    return Span(track=track, kind=kind, start_ms=start_ms, end_ms=end_ms, note=f"{name}: {end_ms - start_ms:.3g} ms")


@cache
def _template() -> Template:
    source: Any = files("ambidex.compare") / "report.html.j2"
    return Environment(autoescape=True).from_string(source.read_text(encoding="utf-8"))

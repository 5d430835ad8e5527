"""Plots as SVG texts: lines over numbers, dots with names, and spans on tracks. Nothing but the standard library, no
script, no font and no address of another place in the result."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from ambidex.plot.axis import MAX_TICKS, Axis, number_text

WIDTH: Final = 720
HEIGHT: Final = 380
LEFT, RIGHT, TOP, BOTTOM = 66, 176, 34, 48
LEGEND_LINE: Final = 17
LETTER: Final = 6.7
"""Width of a letter of the legend, which makes a plot wider if its names are long."""
COLOURS: Final = (
    "#4269d0", "#e8590c", "#2b8a3e", "#c2255c", "#7048e8", "#0b7285", "#8a6d00", "#5f3dc4", "#495057", "#d6336c",
)  # fmt: skip
"""Told apart on white; the legend's marks differ in shape besides."""
MARKS: Final = ("circle", "square", "diamond", "triangle")
_STYLE: Final = "font: 12px system-ui, sans-serif"
_GRID, _AXIS, _INK = "#e9ecef", "#868e96", "#212529"


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A name and its points (x, y), with a text for each that a pointer over it shows; joined by a line if `is_line`,
    which is dashed if `is_dashed`. Without `has_marks` there is the line alone, in grey."""

    name: str
    points: Sequence[tuple[float, float]]
    notes: Sequence[str] = ()
    is_line: bool = True
    is_dashed: bool = False
    has_marks: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Series over two axes. `x_ticks`: numbers that are written at the x axis, where they are few; None: round ones."""

    title: str
    x_name: str
    y_name: str
    series: Sequence[Series]
    is_x_log: bool = False
    is_y_log: bool = False
    y_from_zero: bool = True
    x_ticks: Sequence[float] | None = None

    def svg(self) -> str:
        """The chart; without a point a sentence that says so."""
        drawn = [line for line in self.series if line.points]
        height = max(HEIGHT, TOP + BOTTOM + LEGEND_LINE * len(drawn))
        parts = [_text(LEFT, 20, self.title, weight=600)]
        if not drawn:
            return _document(WIDTH, 60, self.title, [*parts, _text(LEFT, 44, "nothing was measured for this plot")])
        x = Axis.over(
            [point[0] for line in drawn for point in line.points],
            start=LEFT, end=WIDTH - RIGHT, is_log=self.is_x_log,
        )  # fmt: skip
        y = Axis.over(
            [point[1] for line in drawn for point in line.points],
            start=height - BOTTOM, end=TOP, is_log=self.is_y_log, from_zero=self.y_from_zero and not self.is_y_log,
        )  # fmt: skip
        parts += self._frame(x, y, height)
        for number, line in enumerate(drawn):
            parts += _series(line, number, x, y)
            at = TOP + 8 + LEGEND_LINE * number
            left = WIDTH - RIGHT + 12
            parts.append(_mark(number, left + 8, at - 4, "") if line.has_marks else _dash(left, at - 4))
            parts.append(_text(WIDTH - RIGHT + 32, at, line.name))
        return _document(_width([line.name for line in drawn]), height, self.title, parts)

    def _frame(self, x: Axis, y: Axis, height: int) -> list[str]:
        parts = []
        own = self.x_ticks if self.x_ticks is not None and len(self.x_ticks) <= MAX_TICKS + 1 else None
        for tick in own or x.ticks():
            at = x.place(tick)
            parts.append(_line(at, TOP, at, height - BOTTOM, _GRID))
            parts.append(_text(at, height - BOTTOM + 17, number_text(tick), anchor="middle"))
        for tick in y.ticks():
            at = y.place(tick)
            parts.append(_line(LEFT, at, WIDTH - RIGHT, at, _GRID))
            parts.append(_text(LEFT - 8, at + 4, number_text(tick), anchor="end"))
        parts.append(_line(LEFT, TOP, LEFT, height - BOTTOM, _AXIS))
        parts.append(_line(LEFT, height - BOTTOM, WIDTH - RIGHT, height - BOTTOM, _AXIS))
        parts.append(_text((LEFT + WIDTH - RIGHT) / 2, height - 10, self.x_name, anchor="middle"))
        middle = (TOP + height - BOTTOM) / 2
        parts.append(
            f'<text x="14" y="{middle:.1f}" fill="{_INK}" text-anchor="middle" '
            f'transform="rotate(-90 14 {middle:.1f})">{escape(self.y_name)}</text>'
        )
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time on a track, in milliseconds, with the kind of thing that it is."""

    track: str
    kind: str
    start_ms: float
    end_ms: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Spans on tracks, over time."""

    title: str
    spans: Sequence[Span]

    def svg(self) -> str:
        """The timeline; without a span a sentence that says so."""
        title = _text(LEFT, 20, self.title, weight=600)
        if not self.spans:
            return _document(WIDTH, 60, self.title, [title, _text(LEFT, 44, "nothing was traced for this plot")])
        tracks = list(dict.fromkeys(span.track for span in self.spans))
        kinds = list(dict.fromkeys(span.kind for span in self.spans))
        lane, left = 26, 130
        height = max(TOP + BOTTOM + lane * len(tracks), TOP + BOTTOM + LEGEND_LINE * len(kinds))
        x = Axis(
            low=0.0, high=max(span.end_ms for span in self.spans) or 1.0, start=left, end=WIDTH - RIGHT, is_log=False
        )  # fmt: skip
        bottom = TOP + lane * len(tracks)
        parts = [title]
        for tick in x.ticks():
            at = x.place(tick)
            parts.append(_line(at, TOP, at, bottom, _GRID))
            parts.append(_text(at, bottom + 17, number_text(tick), anchor="middle"))
        for number, track in enumerate(tracks):
            parts.append(_text(left - 8, TOP + lane * number + 17, track, anchor="end"))
        for span in self.spans:
            start, end = x.place(span.start_ms), x.place(span.end_ms)
            top = TOP + lane * tracks.index(span.track) + 4
            colour = COLOURS[kinds.index(span.kind) % len(COLOURS)]
            note = f"<title>{escape(span.note or span.kind)}</title>"
            parts.append(
                f'<rect x="{start:.2f}" y="{top}" width="{max(0.4, end - start):.2f}" height="{lane - 8}" '
                f'fill="{colour}" fill-opacity="0.8">{note}</rect>'
            )
        for number, kind in enumerate(kinds):
            at = TOP + 8 + LEGEND_LINE * number
            colour = COLOURS[number % len(COLOURS)]
            parts.append(f'<rect x="{WIDTH - RIGHT + 15}" y="{at - 9}" width="10" height="10" fill="{colour}"/>')
            parts.append(_text(WIDTH - RIGHT + 32, at, kind))
        parts.append(_text((left + WIDTH - RIGHT) / 2, bottom + 36, "milliseconds", anchor="middle"))
        return _document(_width(kinds), height, self.title, parts)


def _width(names: Sequence[str]) -> int:
    """Of a plot with such names beside it."""
    return WIDTH - RIGHT + max(RIGHT, int(40 + LETTER * max(map(len, names))))


def _dash(x: float, y: float) -> str:
    """The sign of a line without marks."""
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x + 16:.1f}" y2="{y:.1f}" stroke="{_AXIS}" stroke-dasharray="5 4"/>'


def _series(line: Series, number: int, x: Axis, y: Axis) -> list[str]:
    colour = COLOURS[number % len(COLOURS)] if line.has_marks else _AXIS
    placed = [(x.place(a), y.place(b)) for a, b in line.points]
    parts = []
    if line.is_line and len(placed) > 1:
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in placed)
        dash = ' stroke-dasharray="5 4"' if line.is_dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')
    for place, (a, b) in enumerate(placed if line.has_marks else ()):
        value = (
            line.notes[place] if place < len(line.notes) else f"{line.points[place][0]:g}, {line.points[place][1]:.4g}"
        )
        parts.append(_mark(number, a, b, f"{line.name}: {value}"))
    return parts


def _mark(number: int, x: float, y: float, note: str) -> str:
    colour, size = COLOURS[number % len(COLOURS)], 4.2
    title = f"<title>{escape(note)}</title>" if note else ""
    match MARKS[number // len(COLOURS) % len(MARKS)] if number >= len(COLOURS) else MARKS[number % len(MARKS)]:
        case "circle":
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" fill="{colour}">{title}</circle>'
        case "square":
            corners = [(-size, -size), (size, -size), (size, size), (-size, size)]
        case "diamond":
            corners = [(0, -1.3 * size), (1.3 * size, 0), (0, 1.3 * size), (-1.3 * size, 0)]
        case _:
            corners = [(0, -1.2 * size), (1.2 * size, size), (-1.2 * size, size)]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" fill="{colour}">{title}</polygon>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: int = 400) -> str:
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{_INK}" text-anchor="{anchor}"{bold}>{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _document(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}" style="{_STYLE}; background: #fff">\n{body}\n</svg>\n'
    )

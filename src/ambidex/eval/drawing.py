"""The plot of evaluations: a line for each policy over contexts, and one for full attention."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ambidex.core.errors import ConfigError
from ambidex.plot.chart import Chart, Series

Record = Mapping[str, Any]

_FIGURES: Final[Mapping[str, tuple[str, str, str | None]]] = {
    "agreement": ("top1_equal", "likeliest token equal to full attention's, %", None),
    "perplexity": ("perplexity", "perplexity", "exact_perplexity"),
    "needle": ("right_first", "right digit first, %", "exact_right_first"),
    "multikey": ("found", "secrets found, %", "exact_found"),
    "variables": ("found", "variables found, %", "exact_found"),
    "counting": ("found", "common words found, %", "exact_found"),
    "choice": ("right", "questions answered rightly, %", "exact_right"),
}
"""Evaluation → the figure that is drawn, its name, and the same of full attention."""


def draw(records: Sequence[Record]) -> str:
    """The SVG of records of one evaluation and model: the figure over the context, or for `choice`, which has no
    context, over the share of keys that were attended."""
    kind = str(records[0]["eval"])
    figure, name, exact = _FIGURES[kind]
    factor = 1.0 if kind == "perplexity" else 100.0
    series = []
    for policy, own in _by_policy(records).items():
        if policy == "exact" and exact is not None and any(point.get(exact) is not None for point in _points(records)):
            continue  # the line of full attention says it already
        series.append(Series(name=policy, points=_mean_points(_points(own), kind, figure, factor)))
    if exact is not None:
        points = _mean_points(_points(records), kind, exact, factor)
        series.append(Series(name="exact", points=points, is_dashed=True))
    return Chart(
        title=f"{kind}: {Path(str(records[0]['model'])).name}",
        x_name="keys attended, %" if kind == "choice" else "context, tokens",
        y_name=name,
        series=series,
        is_x_log=kind != "choice",
    ).svg()


def earlier_records(path: Path, record: Record) -> list[Record]:
    """Records of the same evaluation and model that a file of JSON lines holds already; other lines are left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):  # there is none yet
        return []
    found: list[Record] = []
    for line in lines:
        try:
            other = json.loads(line)
        except ValueError:
            continue
        if isinstance(other, dict) and all(other.get(key) == record[key] for key in ("eval", "model", "settings")):
            found.append(other)
    return found


def write_plot(path: Path, svg: str) -> None:
    """Write the file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(svg, encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from error


def _by_policy(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by policy, named with its settings where one policy comes with several."""
    words = {(record["policy"], record["policy_settings"]) for record in records}
    names = [name for name, _ in words]
    groups: dict[str, list[Record]] = {}
    for record in records:
        name = str(record["policy"])
        if names.count(name) > 1:
            name += f" ({record['policy_settings']})"
        groups.setdefault(name, []).append(record)
    return groups


def _points(records: Sequence[Record]) -> list[Record]:
    return [point for record in records for point in record["points"]]


def _mean_points(points: Sequence[Record], kind: str, figure: str, factor: float) -> list[tuple[float, float]]:
    """Mean of a figure at each x."""
    values: dict[float, list[float]] = {}
    for point in points:
        if point.get(figure) is not None:
            x = float(point["context"]) if kind != "choice" else 100.0
            if kind == "choice" and not figure.startswith("exact"):
                x = 100 * point["attended_share"]
            values.setdefault(x, []).append(factor * point[figure])
    return [(x, sum(ys) / len(ys)) for x, ys in sorted(values.items())]

"""The figures of a comparison as rows: speeds with the quality of their context beside them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ambidex.compare.cells import Cell, CellKind
from ambidex.compare.folder import Line
from ambidex.core.policy import LANE_PRESETS, PolicyName
from ambidex.core.units import format_size
from ambidex.runner.decode import DecodeForm

COLUMNS: Final = (
    "method", "steps", "context", "batch", "KV on accelerator", "ms a step", "20–80 %", "tokens/s", "prompt tokens/s",
    "share of floor", "likeliest token equal", "KL", "perplexity", "secrets found", "KV read a step", "KV held",
    "host memory", "GPU memory",
)  # fmt: skip
DASH: Final = "–"
_QUANTILE_80: Final = 0.8416
"""Of the standard normal distribution."""
LEADERS: Final = (PolicyName.HYBRIDGEN, PolicyName.BOUNDED)
"""Policies whose variants are held against all others."""
RATIO_NOTE: Final = "Times as fast as the others; in brackets, likeliest tokens equal to full attention's, own : theirs"
FRONT_NOTE: Final = (
    "Methods than which no other is better in speed or likeliest tokens equal and as good in both, the fastest first "
    "(speeds whose 20–80 % overlap are as good, and so are shares of so few tokens whose 20–80 % do)"
)
FRONT_COLUMNS: Final = ("context", "batch", "KV on accelerator", "on the front")
FORM_NOTE: Final = (
    "Steps op by op are computed by Python, one operation after the other; recorded ones (captured on a GPU, programs "
    "on a CPU) are not. Between the two, milliseconds compare how methods are coded: compare the bytes that they read."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A measured speed and the quality that belongs to it, if that was measured."""

    cell: Cell
    speed: Mapping[str, Any]
    quality: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        """Variant, or the engine where it is another."""
        return self.cell.variant

    @property
    def step_ms(self) -> float:
        """Median of a decode step."""
        return float(self.speed["step_s"]["median"]) * 1e3

    @property
    def top1_equal(self) -> float | None:
        """Share of predictions whose likeliest token is full attention's."""
        return None if self.quality is None else self.quality["agreement"]["top1_equal"]

    @property
    def top1_range(self) -> tuple[float, float]:
        """The same, from its 20 to its 80 % quantile, by how many predictions it comes from; 0 to 0 if unmeasured.

        Normal approximation with one success and one failure added (Laplace), so that 0 and 1 are not certain.
        """
        if self.quality is None or self.top1_equal is None:
            return 0.0, 0.0
        num = int(self.quality["agreement"]["num_tokens"])
        share = (self.top1_equal * num + 1) / (num + 2)
        width = _QUANTILE_80 * math.sqrt(share * (1 - share) / (num + 2))
        return share - width, share + width

    @property
    def is_op_by_op(self) -> bool:
        """Its steps are computed one operation after the other."""
        return bool(self.speed.get("became", {}).get("compute.decode") == DecodeForm.ORDINARY)

    @property
    def form(self) -> str:
        """How its steps are computed, where that is known."""
        if "compute.decode" not in self.speed.get("became", {}):
            return DASH
        return "op by op" if self.is_op_by_op else "recorded"

    @property
    def point(self) -> tuple[int, int | None, int | None]:
        """Where it was measured: context, batch, tokens of KV on the accelerator."""
        return self.cell.context, self.cell.batch, self.cell.kv_gpu_tokens

    @property
    def point_cells(self) -> list[str]:
        """The same for a table."""
        budget = self.cell.kv_gpu_tokens
        return [
            str(self.cell.context), str(self.cell.batch), "all that fits" if budget is None else f"{budget} tokens",
        ]  # fmt: skip

    def row(self) -> list[str]:
        """For a table; see `COLUMNS`."""
        speed, memory = self.speed, self.speed.get("memory") or {}
        took = speed["step_s"]
        return [
            self.name,
            self.form,
            *self.point_cells,
            f"{self.step_ms:.3g}",
            f"{took['q20'] * 1e3:.3g}–{took['q80'] * 1e3:.3g}",
            f"{speed['tokens_per_s']:.4g}",
            _shown(speed.get("prefill_tokens_per_s"), lambda value: f"{value:.4g}"),
            _shown(speed.get("share_of_floor"), lambda value: f"{value:.2f}"),
            *quality_cells(self.quality),
            _sizes(speed.get("lane_bytes")),
            _sizes(speed.get("kv_bytes")),
            _shown(memory.get("host_peak_bytes"), format_size),
            _shown(memory.get("gpu_peak_bytes"), format_size),
        ]


def quality_cells(quality: Mapping[str, Any] | None) -> list[str]:
    """The four columns of quality."""
    if quality is None:
        return [DASH] * 4
    agreement, secrets = quality["agreement"], quality.get("secrets")
    change = 100 * (agreement["perplexity"] / agreement["exact_perplexity"] - 1)
    return [
        f"{100 * agreement['top1_equal']:.1f} %",
        f"{agreement['mean_kl']:.1e}" if agreement["mean_kl"] > 0 else "0",
        f"{change:+.2f} %",
        DASH if secrets is None else f"{100 * secrets['found']:.0f} % ({100 * secrets['exact_found']:.0f} %)",
    ]


def find_entries(lines: Sequence[Line]) -> list[Entry]:
    """Speeds that were measured, in the order of their lines. A method that attends all keys has the quality of `exact`
    where its own was not measured."""
    cells = [(Cell.of(line["cell"]), line) for line in lines if line["status"] == "done"]
    quality = {
        (cell.engine, cell.model, cell.variant, cell.context): line["figures"]
        for cell, line in cells
        if cell.kind is CellKind.QUALITY
    }

    def find(cell: Cell) -> Mapping[str, Any] | None:
        names = [cell.variant, *([PolicyName.EXACT] if cell.variant.split(":")[0] in LANE_PRESETS else [])]
        found = (quality.get((cell.engine, cell.model, name, cell.context)) for name in names)
        return next((figures for figures in found if figures is not None), None)

    return [
        Entry(cell=cell, speed=line["figures"], quality=find(cell))
        for cell, line in cells
        if cell.kind is CellKind.SPEED
    ]


def find_front(entries: Sequence[Entry]) -> list[Entry]:
    """Those of one point that none of the others beats, the fastest first.

    Another one does if it is as good in speed and quality and better in one of them; speeds and qualities whose 20 to
    80 % ranges overlap are the same.
    """
    known = sorted((entry for entry in entries if entry.top1_equal is not None), key=lambda entry: entry.step_ms)
    return [entry for entry in known if not any(_beats(other, entry) for other in known)]


def _beats(one: Entry, other: Entry) -> bool:
    (low, high), (other_low, other_high) = one.top1_range, other.top1_range
    ours, theirs = one.speed["step_s"], other.speed["step_s"]
    is_better, is_worse = low > other_high, high < other_low
    is_faster, is_slower = ours["q80"] < theirs["q20"], ours["q20"] > theirs["q80"]
    return bool((is_better and not is_slower) or (is_faster and not is_worse))


def find_fronts(entries: Sequence[Entry]) -> list[list[str]]:
    """A row for each point of one model at which quality is known; see `FRONT_COLUMNS`."""
    rows = []
    for point in dict.fromkeys(entry.point for entry in entries):
        front = find_front([entry for entry in entries if entry.point == point])
        if front:
            texts = (f"{own.name} ({own.step_ms:.3g} ms, {100 * (own.top1_equal or 0.0):.1f} %)" for own in front)
            rows.append([*front[0].point_cells, ", ".join(texts)])
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratios:
    """How many times as fast one method is as each other at the same point: `rows` of texts under `columns`."""

    leader: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def find_ratios(entries: Sequence[Entry]) -> list[Ratios]:
    """For each variant of `LEADERS`, the others' milliseconds over its own, and both agreements with full attention
    where they were measured; of one model's speeds."""
    found = []
    for leader in dict.fromkeys(entry.name for entry in entries if entry.name.split(":")[0] in LEADERS):
        others = [name for name in dict.fromkeys(entry.name for entry in entries) if name != leader]
        rows = []
        for own in entries:
            if own.name != leader:
                continue
            beside = {entry.name: entry for entry in entries if entry.point == own.point}
            if len(beside) > 1:
                rows.append([*own.point_cells, *(_ratio(own, beside.get(name)) for name in others)])
        if rows:
            found.append(Ratios(leader=leader, columns=("context", "batch", "KV on accelerator", *others), rows=rows))
    return found


def _ratio(own: Entry, other: Entry | None) -> str:
    if other is None:
        return DASH
    ratio = f"{other.step_ms / own.step_ms:.2f}"
    if own.top1_equal is None or other.top1_equal is None:
        return ratio
    return f"{ratio} ({100 * own.top1_equal:.1f} : {100 * other.top1_equal:.1f} %)"


def find_failed(lines: Sequence[Line]) -> list[tuple[str, str, str]]:
    """(model, cell in words, reason) of what failed."""
    failed = [(Cell.of(line["cell"]), line["reason"]) for line in lines if line["status"] == "failed"]
    return [(cell.model, cell.words(), reason) for cell, reason in failed]


def models_of(lines: Sequence[Line]) -> list[str]:
    """Models in the order in which they came."""
    return list(dict.fromkeys(line["cell"]["model"] for line in lines))


def machines_of(lines: Sequence[Line]) -> list[str]:
    """Where and with what the figures were taken, each once."""
    found = []
    for line in lines:
        versions = ", ".join(f"{name} {version}" for name, version in line["versions"].items() if version)
        commit = (line.get("commit") or "unknown commit")[:12] + (" with changes" if line.get("is_dirty") else "")
        found.append(f"{line['machine']['note']}; GPU {line['machine']['gpu'] or 'none'}; {commit}; {versions}")
    return list(dict.fromkeys(found))


def busy_note(lines: Sequence[Line]) -> str | None:
    """A sentence on how busy others kept the machine, if they did."""
    busy = [
        line["figures"]["others"]["busy_cores"] + line["figures"]["others"]["stolen_cores"]
        for line in lines
        if line["status"] == "done" and "others" in line["figures"]
    ]
    if not busy or max(busy) <= 0.15:
        return None
    return (
        f"Others used up to {max(busy):.2f} cores of the machine while speeds were measured "
        f"({sum(busy) / len(busy):.2f} on average): these figures are of a busy machine."
    )


def make_markdown(lines: Sequence[Line]) -> str:
    """The report as Markdown."""
    parts = ["# Comparison of KV methods", ""]
    parts += [f"- {machine}" for machine in machines_of(lines)]
    if note := busy_note(lines):
        parts.append(f"- {note}")
    entries = find_entries(lines)
    if any(entry.is_op_by_op for entry in entries):
        parts.append(f"- {FORM_NOTE}")
    for model in models_of(lines):
        rows = [entry.row() for entry in entries if entry.cell.model == model]
        parts += ["", f"## {_cell(model)}", "", _line(COLUMNS), _line(["---"] * len(COLUMNS)), *map(_line, rows)]
        if fronts := find_fronts([entry for entry in entries if entry.cell.model == model]):
            head = [_line(FRONT_COLUMNS), _line(["---"] * len(FRONT_COLUMNS))]
            parts += ["", f"{FRONT_NOTE}:", "", *head, *map(_line, fronts)]
        for ratios in find_ratios([entry for entry in entries if entry.cell.model == model]):
            head = [_line(ratios.columns), _line(["---"] * len(ratios.columns))]
            parts += ["", f"`{ratios.leader}`. {RATIO_NOTE}:", "", *head, *map(_line, ratios.rows)]
    failed = find_failed(lines)
    if failed:
        parts += ["", "## Failed", "", _line(("model", "cell", "reason")), _line(["---"] * 3), *map(_line, failed)]
    return "\n".join(parts) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _shown(value: Any, show: Callable[[Any], str]) -> str:
    return DASH if value is None else show(value)


def _sizes(sizes: Mapping[str, int] | None) -> str:
    return ", ".join(f"{name} {format_size(size)}" for name, size in (sizes or {}).items() if size) or DASH

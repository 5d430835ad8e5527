"""The process that measures cells which share an engine (`process.py`); a crash takes no other cell with it.

RESULTS gets a line `{"begun": index}` before a cell and `{"index", "figures"}` or `{"index", "failed"}` after it, and
`{"rates": …}` once they have been measured. The process ends after a cell that failed in the engine: what is left is
measured by a new one.
"""

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ambidex.bench.decode import check_decode, measure_decode
from ambidex.bench.floor import Rates
from ambidex.bench.links import measure_rates
from ambidex.bench.memory_use import MemoryWatch
from ambidex.bench.others import watch_others
from ambidex.bench.workload import Point, Prompts, check_point, decode_once, end, fill
from ambidex.compare.cells import Cell, CellKind
from ambidex.core.config import EngineConfig, Graphs, LoadFormat
from ambidex.core.errors import AmbidexError, CallerError
from ambidex.core.policy import LANE_PRESETS, PolicyName
from ambidex.engine.compose import build_engine, choose_num_threads
from ambidex.eval.agreement import Text, measure_agreement
from ambidex.eval.long_context import TASK_DEFAULTS, TASKS
from ambidex.eval.probe import measure_probes
from ambidex.eval.teacher import Teacher
from ambidex.eval.words import Hay
from ambidex.runner.device import choose_device

TIMELINE_STEPS: Final = 2
"""Of a timeline, after one that is left out: more would not be told apart on a page."""
MAX_SPANS: Final = 4000
"""Of a timeline: some 60 layers on three lanes; a page that draws more is slow."""
PROBE: Final = "multikey"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Cells of one kind that share an engine: its settings, the text that predictions are made on, and the rates of
    memories and links that floors are taken from; None: they are measured."""

    config: Mapping[str, Any]
    cells: Sequence[Mapping[str, Any]]
    text: str | None
    rates: Mapping[str, float | None] | None = None

    def engine_config(self) -> EngineConfig:
        """The engine's settings."""
        return EngineConfig(**self.config)


def run_part(part: Part) -> Iterator[tuple[int, dict[str, Any]]]:
    """Measure the cells, telling before each that it begins.

    Yields:
        (index of the cell, {"begun": index}), then (index, its line); {"rates": …} where they were measured.
    """
    cells = [Cell.of(record) for record in part.cells]
    config = part.engine_config()
    match cells[0].kind:
        case CellKind.SPEED:
            yield from _measure_speed(config, cells, part.text or "", part.rates)
        case CellKind.QUALITY:
            yield from _measure_quality(config, cells, part.text or "")
        case CellKind.TIMELINE:
            for index, cell in enumerate(cells):
                yield index, {"begun": index}
                yield index, {"index": index, "figures": _trace(config, cell)}


def _measure_speed(
    config: EngineConfig, cells: Sequence[Cell], text: str, known: Mapping[str, float | None] | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    yield 0, {"begun": 0}  # what fails before the first point fails it
    device = choose_device(config.device)
    if known is None:
        rates = measure_rates(device, num_threads=choose_num_threads(config, device)).rates()
        yield 0, {"rates": dataclasses.asdict(rates)}
    else:
        rates = Rates(**known)  # type: ignore[arg-type]  # as it was told
    watch = MemoryWatch(device)
    engine = build_engine(config)
    watch.engine_is_ready()
    # How many keys a policy keeps depends on what is said: random words only where weights are random, too.
    ids = [] if config.load_format is LoadFormat.DUMMY else engine.tokenizer.encode(text)
    for index, cell in enumerate(cells):
        yield index, {"begun": index}
        prompts = Prompts(engine.figures.spec.vocab_size, ids if len(ids) >= cell.context else None)
        point, steps = _point(cell), int(cell.settings["steps"])
        try:
            check_decode(engine, config, [point], prompts, steps=steps)
        except CallerError as error:  # this point cannot be measured, others can
            yield index, {"index": index, "failed": str(error)}
            continue
        with watch_others() as others:
            figures = measure_decode(engine, config, point, prompts, steps=steps, rates=rates)
        record = figures.record()
        record["prefill_tokens_per_s"] = point.context * point.batch / figures.fill_s
        record["memory"] = watch.read(engine.figures.ledger).record()
        record["peak_kv_bytes"] = dict(engine.stats.peak_kv_bytes)
        record["tokens"] = "text" if len(ids) >= cell.context else "random"
        record["others"] = dataclasses.asdict(others)
        record["rates"] = dataclasses.asdict(rates)
        record["became"] = {f"{s}.{n}": value for s, n, value, _ in engine.report.rows() if s != "settings"}
        yield index, {"index": index, "figures": record}


def _measure_quality(config: EngineConfig, cells: Sequence[Cell], text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    yield 0, {"begun": 0}
    if config.policy in LANE_PRESETS:  # all keys are attended, and op by op there may be nobody to read them its way
        config = dataclasses.replace(config, policy=PolicyName.EXACT)
    teacher = Teacher(config, as_answered=True)
    tokenizer = teacher.engine.tokenizer
    if config.load_format is LoadFormat.DUMMY:  # no words mean anything to random weights
        longest = Point(context=max(cell.context for cell in cells) + 1, batch=1)
        (ids,) = Prompts(teacher.engine.figures.spec.vocab_size).make(longest)
    else:
        ids = tokenizer.encode(text)
    for index, cell in enumerate(cells):
        yield index, {"begun": index}
        window = Text(token_ids=ids, context=cell.context, num_predicted=cell.settings["predict"], num_windows=1)
        try:
            agreement = measure_agreement(teacher, window, against_exact=True).record()
            record: dict[str, Any] = {"agreement": agreement, "secrets": None, "no_secrets": None, "form": teacher.form}
        except CallerError as error:
            yield index, {"index": index, "failed": str(error)}
            continue
        try:  # a model without a vocabulary of words has its agreement all the same
            make = TASKS[PROBE](tokenizer, Hay.of(tokenizer, None), cell.context, TASK_DEFAULTS[PROBE])
            secrets = measure_probes(
                teacher, make, context=cell.context, num_probes=cell.settings["rounds"], against_exact=True
            )
            record["secrets"] = secrets.record()
        except CallerError as error:
            record["no_secrets"] = str(error)
        yield index, {"index": index, "figures": record}


def _trace(config: EngineConfig, cell: Cell) -> dict[str, Any]:
    """Spans of a few decode steps, computed op by op: recorded steps do not say what happens in their layers."""
    with tempfile.TemporaryDirectory() as folder:
        name = str(Path(folder, "trace.json"))
        traced = dataclasses.replace(config, trace=name, graphs=Graphs.OFF)
        engine = build_engine(traced)
        point = _point(cell)
        check_point(engine, traced, point, num_answer=TIMELINE_STEPS + 4, flag="--contexts")
        prompt = Prompts(engine.figures.spec.vocab_size).make(point)
        requests, _ = fill(engine, prompt, num_answer=TIMELINE_STEPS + 3)
        for _ in range(TIMELINE_STEPS + 1):
            decode_once(engine, requests)
        end(engine, requests)
        events = json.loads(Path(name).read_text(encoding="utf-8"))
    return {"spans": find_spans(events)}


def find_spans(events: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """[track, name, start, end] in milliseconds of the last full decode steps of a timeline, from the first's start."""
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    steps = [event for event in spans if event["name"].startswith("step ")]
    decode = steps[-TIMELINE_STEPS - 1 : -1] or steps
    start, stop = decode[0]["ts"], decode[-1]["ts"] + decode[-1]["dur"]
    inside = [
        [tracks[event["tid"]], event["name"], (event["ts"] - start) / 1e3, (event["ts"] + event["dur"] - start) / 1e3]
        for event in spans
        if event["ts"] >= start and event["ts"] + event["dur"] <= stop
    ]
    return [[track, name, round(a, 4), round(b, 4)] for track, name, a, b in inside[:MAX_SPANS]]


def _point(cell: Cell) -> Point:
    assert cell.batch is not None, "a cell of speed has a batch"
    return Point(context=cell.context, batch=cell.batch)


def measure_file(part_file: str, results_file: str) -> None:
    """Measure the part in a file and tell it line by line in another."""
    part = Part(**json.loads(Path(part_file).read_text(encoding="utf-8")))
    if part.config["num_threads"] is not None:
        torch.set_num_threads(part.config["num_threads"])
    begun = 0
    with Path(results_file).open("a", encoding="utf-8") as results:

        def tell(line: Mapping[str, Any]) -> None:
            results.write(json.dumps(line, allow_nan=False) + "\n")
            results.flush()

        try:
            for index, line in run_part(part):
                begun = index
                tell(line)
        except (AmbidexError, torch.OutOfMemoryError, MemoryError) as error:
            tell({"index": begun, "failed": " ".join(f"{type(error).__name__}: {error}".split())[:600]})

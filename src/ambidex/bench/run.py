"""A whole run of a benchmark: rates before and after, the engine, the points, and the record that keeps it all."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from ambidex.bench.decode import COLUMNS as DECODE_COLUMNS
from ambidex.bench.decode import check_decode, measure_decode
from ambidex.bench.floor import Rates
from ambidex.bench.links import COLUMNS as LINK_COLUMNS
from ambidex.bench.links import Links, measure_links, measure_rates
from ambidex.bench.machine import environment
from ambidex.bench.memory_use import MemoryUse, MemoryWatch
from ambidex.bench.others import watch_others
from ambidex.bench.prefill import COLUMNS as PREFILL_COLUMNS
from ambidex.bench.prefill import check_prefill, gemm_rate, measure_prefill
from ambidex.bench.workload import WARMUP, Point, Prompts
from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError, MachineError
from ambidex.engine.compose import build_engine, choose_num_threads
from ambidex.engine.engine import Engine
from ambidex.formats.bounded_file import read_text_file
from ambidex.runner.device import choose_device

logger = logging.getLogger(__name__)

P = TypeVar("P")
F = TypeVar("F")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run's record and its table for people; if an engine was built, its memory use and what its settings became, as
    (section, name, value, why). `num_left_out` points were not measured because of Ctrl-C."""

    record: dict[str, Any]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    memory: MemoryUse | None = None
    num_left_out: int = 0
    report: Sequence[tuple[str, str, str, str]] = ()


def run_links(*, num_threads: int | None) -> Finished:
    """Measure memories and links alone.

    Raises:
        NativeModuleError, MachineError: see `measure_links`.
    """
    opening = environment()
    with watch_others() as others:
        links = measure_links(num_threads=num_threads)
    record = {"bench": "links", **opening, "links": links.record(), "others": asdict(others)}
    return Finished(record=record, columns=LINK_COLUMNS, rows=links.rows())


def run_decode(
    config: EngineConfig,
    points: Sequence[Point],
    *,
    steps: int,
    text: Path | None,
    progress: Progress | None,
) -> Finished:
    """Measure decode at each point with one engine.

    Args:
        text: file whose first tokens are the prompts; None: random tokens.
        progress: called with (bytes read, bytes in all) while weights load.
    Raises:
        ConfigError, ModelError: settings, model or points cannot be used; nothing was measured then.
        MachineError, RequestFailedError: a point could not be measured.
    """
    run = _Run.open(config, progress)
    prompts = _prompts(run.engine, text)
    check_decode(run.engine, config, points, prompts, steps=steps)
    with watch_others() as others:
        measured = _until_interrupted(
            points,
            lambda point: measure_decode(run.engine, config, point, prompts, steps=steps, rates=run.before.rates()),
        )
    memory, after = run.close()
    figures = [replace(point, rates=run.rates_with(after)) for point in measured]
    settings = {"steps": steps, "warmup": WARMUP}
    record: dict[str, Any] = {
        "bench": "decode", **run.opening, "settings": {**settings, **run.settings(text)},
        "rates": [links.record() for links in (run.before, after) if links is not None], "others": asdict(others),
        "memory": memory.record(), "became": run.became(), "points": [point.record() for point in figures],
        "num_left_out": len(points) - len(figures),
    }  # fmt: skip
    return Finished(
        record=record,
        columns=DECODE_COLUMNS,
        rows=[point.row() for point in figures],
        memory=memory,
        num_left_out=record["num_left_out"],
        report=run.report(),
    )


def run_prefill(
    config: EngineConfig,
    lengths: Sequence[int],
    *,
    rounds: int,
    text: Path | None,
    progress: Progress | None,
) -> Finished:
    """Measure the prefill of prompts of these lengths, each alone; arguments and errors as `run_decode`."""
    run = _Run.open(config, progress)
    prompts = _prompts(run.engine, text)
    check_prefill(run.engine, config, lengths, prompts)
    gemm = [gemm_rate(run.engine.figures, num_tokens=config.max_tokens_per_step)]
    with watch_others() as others:
        measured = _until_interrupted(
            lengths,
            lambda num_tokens: measure_prefill(
                run.engine, config, num_tokens, prompts, rounds=rounds, rates=run.before.rates(), gemm=gemm[0]
            ),
        )
    gemm.append(gemm_rate(run.engine.figures, num_tokens=config.max_tokens_per_step))
    memory, after = run.close()
    rates, flops_per_s = run.rates_with(after), max(rate.flops_per_s.median for rate in gemm)
    figures = [replace(point, rates=rates, flops_per_s=flops_per_s) for point in measured]
    settings = {"rounds": rounds, "warmup": "each prompt once"}
    record: dict[str, Any] = {
        "bench": "prefill", **run.opening, "settings": {**settings, **run.settings(text)},
        "rates": [links.record() for links in (run.before, after) if links is not None],
        "gemm": [rate.record() for rate in gemm], "others": asdict(others),
        "memory": memory.record(), "became": run.became(), "points": [point.record() for point in figures],
        "num_left_out": len(lengths) - len(figures),
    }  # fmt: skip
    return Finished(
        record=record,
        columns=PREFILL_COLUMNS,
        rows=[point.row() for point in figures],
        memory=memory,
        num_left_out=record["num_left_out"],
        report=run.report(),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """An engine, with what was measured before it was built."""

    config: EngineConfig
    opening: dict[str, object]
    num_threads: int
    before: Links
    watch: MemoryWatch
    engine: Engine

    @classmethod
    def open(cls, config: EngineConfig, progress: Progress | None) -> "_Run":
        opening = environment()
        device = choose_device(config.device)
        num_threads = choose_num_threads(config, device)
        before = measure_rates(device, num_threads=num_threads)
        watch = MemoryWatch(device)
        engine = build_engine(config, progress=progress)
        watch.engine_is_ready()
        return cls(config=config, opening=opening, num_threads=num_threads, before=before, watch=watch, engine=engine)

    def close(self) -> tuple[MemoryUse, Links | None]:
        """Memory use until now, and the rates once more, so that a reader sees whether the machine has changed; None if
        the engine has left too little memory to measure them: what was measured before that is not lost."""
        memory = self.watch.read(self.engine.figures.ledger)
        try:
            return memory, measure_rates(choose_device(self.config.device), num_threads=self.num_threads)
        except (MachineError, torch.OutOfMemoryError) as error:
            logger.warning("rates were not measured again after the run: %s", error)
            return memory, None

    def rates_with(self, after: Links | None) -> Rates:
        """What floors are taken from: the better rates of before and after."""
        before = self.before.rates()
        return before if after is None else before.best(after.rates())

    def report(self) -> list[tuple[str, str, str, str]]:
        """What the settings became on this machine."""
        return [row for row in self.engine.report.rows() if row[0] != "settings"]

    def became(self) -> dict[str, str]:
        """The same for the record."""
        return {f"{section}.{name}": value for section, name, value, _ in self.report()}

    def settings(self, text: Path | None) -> dict[str, Any]:
        """The engine's settings and where tokens came from."""
        values = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(self.config)}
        return {"tokens": "random" if text is None else text.name, "engine": values}


def _until_interrupted(points: Sequence[P], measure: Callable[[P], F]) -> list[F]:
    """Measure the points in their order; Ctrl-C ends that, but what has been measured is kept.

    Raises:
        KeyboardInterrupt: nothing has been measured yet.
    """
    measured: list[F] = []
    try:
        for point in points:
            measured.append(measure(point))  # noqa: PERF401  # what is there must outlive an interrupt
    except KeyboardInterrupt:
        if not measured:
            raise
    return measured


def _prompts(engine: Engine, text: Path | None) -> Prompts:
    if text is None:
        return Prompts(engine.figures.spec.vocab_size)
    try:
        words = read_text_file(text)
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, a null byte in the name
        raise ConfigError(f"--text {text} cannot be read as UTF-8 text: {error}") from error
    return Prompts(engine.figures.spec.vocab_size, engine.tokenizer.encode(words, add_special=False))

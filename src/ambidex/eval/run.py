"""A whole run of an evaluation: the engine, the points, and the record that keeps it all."""

import dataclasses
import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.policy import resolve_policy
from ambidex.eval.agreement import COLUMNS, Text, measure_agreement
from ambidex.eval.needle import NEEDLE_COLUMNS, measure_needle
from ambidex.eval.teacher import Progress, Teacher
from ambidex.formats.bounded_file import read_text_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A run's record, its table for people, and what the settings became, as (section, name, value, why)."""

    record: dict[str, Any]
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    report: Sequence[tuple[str, str, str, str]]


def run_agreement(
    config: EngineConfig,
    text: Path,
    *,
    kind: str,
    contexts: Sequence[int],
    num_predicted: int,
    num_windows: int,
    against_exact: bool,
    progress: Progress | None,
    tell: Callable[[str], None] = lambda _: None,
    against_kv_dtype: str | None = None,
) -> Evaluated:
    """Perplexity and agreement at each context.

    Args:
        kind: how the record is named: `agreement` or `perplexity`.
        against_kv_dtype: format of K and V of the run that is compared with, whose engine is another then; None: that
            of the same engine.
        progress: called with (bytes read, bytes in all) while weights load.
        tell: is told what is done, a line at a time.
    Raises:
        ConfigError, ModelError: settings, model or text cannot be used.
        MachineError, RequestFailedError: a point could not be measured.
    """
    words = read_text(text)
    other_config = None
    if against_kv_dtype is not None:
        other_config = dataclasses.replace(config, kv_dtype=against_kv_dtype)  # refused before weights are read
    teacher = Teacher(config, progress=progress)
    other = None if other_config is None else Teacher(other_config)
    ids = teacher.engine.tokenizer.encode(words)
    texts = [
        Text(token_ids=ids, context=context, num_predicted=num_predicted, num_windows=num_windows)
        for context in contexts
    ]
    for one in texts:  # a point that cannot be measured is refused before the first is
        one.windows()
        teacher.check_length(one.context, flag="--contexts")
    points = []
    for one in texts:
        tell(f"{kind} at {one.context} tokens …")
        points.append(measure_agreement(teacher, one, against_exact=against_exact, other=other))
    settings: dict[str, Any] = {"text": text.name, "num_predicted": num_predicted, "num_windows": num_windows}
    if other_config is not None:
        settings["against_kv_dtype"] = other_config.kv_dtype
    return Evaluated(
        record=make_record(kind, config, teacher, settings, [point.record() for point in points]),
        columns=COLUMNS,
        rows=[point.row() for point in points],
        report=report_rows(teacher),
    )


def run_needle(
    config: EngineConfig,
    text: Path,
    *,
    contexts: Sequence[int],
    depths: Sequence[int],
    num_rounds: int,
    against_exact: bool,
    progress: Progress | None,
    tell: Callable[[str], None] = lambda _: None,
) -> Evaluated:
    """Hidden digits at each context and depth (percent); arguments and errors as `run_agreement`."""
    words = read_text(text)
    teacher = Teacher(config, progress=progress)
    for context in contexts:
        teacher.check_length(context, flag="--contexts")
    points = []
    for context in contexts:
        for depth in depths:
            tell(f"needle at {depth} % of {context} tokens …")
            points.append(
                measure_needle(
                    teacher,
                    words,
                    context=context,
                    depth_percent=depth,
                    num_rounds=num_rounds,
                    against_exact=against_exact,
                )
            )
    settings = {"text": text.name, "depths": list(depths), "num_rounds": num_rounds}
    return Evaluated(
        record=make_record("needle", config, teacher, settings, [point.record() for point in points]),
        columns=NEEDLE_COLUMNS,
        rows=[point.row() for point in points],
        report=report_rows(teacher),
    )


def read_text(text: Path) -> str:
    """The text that `--text` names.

    Raises:
        ConfigError: it cannot be read, or is larger than any text needs to be.
    """
    try:
        return read_text_file(text)
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, a null byte in the name
        raise ConfigError(f"--text {text} cannot be read as UTF-8 text: {error}") from error


def make_record(
    kind: str, config: EngineConfig, teacher: Teacher, settings: dict[str, Any], points: list[dict[str, Any]]
) -> dict[str, Any]:
    """The JSON line of a run."""
    policy = resolve_policy(config)
    return {
        "eval": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": config.model,
        "policy": policy.name.value,
        "policy_settings": policy.words(),
        "settings": settings,
        "engine": {field.name: getattr(config, field.name) for field in dataclasses.fields(config)},
        "became": {f"{section}.{name}": value for section, name, value, _ in report_rows(teacher)},
        "points": points,
    }


def report_rows(teacher: Teacher) -> list[tuple[str, str, str, str]]:
    """What the settings became on this machine."""
    return [row for row in teacher.engine.report.rows() if row[0] != "settings"]

"""Whole runs of the tasks for long contexts and of multiple choice; see `eval.run`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ambidex.core.config import EngineConfig
from ambidex.eval.choice import CHOICE_COLUMNS, cut_shots, measure_choice
from ambidex.eval.items import read_items
from ambidex.eval.long_context import TASKS
from ambidex.eval.probe import PROBE_COLUMNS, measure_probes
from ambidex.eval.run import Evaluated, make_record, read_text, report_rows
from ambidex.eval.teacher import Progress, Teacher
from ambidex.eval.words import Hay


def run_task(
    config: EngineConfig,
    text: Path | None,
    *,
    task: str,
    contexts: Sequence[int],
    num_rounds: int,
    task_settings: Mapping[str, int],
    against_exact: bool,
    progress: Progress | None,
    tell: Callable[[str], None] = lambda _: None,
) -> Evaluated:
    """One of `TASKS` at each context.

    Args:
        text: what things are hidden in; None: the shipped text.
        task_settings: as `TASK_DEFAULTS` names them.
        progress: called with (bytes read, bytes in all) while weights load.
        tell: is told what is done, a line at a time.
    Raises:
        ConfigError, ModelError: settings, model or text cannot be used.
        MachineError, RequestFailedError: a point could not be measured.
    """
    words = None if text is None else read_text(text)
    teacher = Teacher(config, progress=progress)
    tokenizer = teacher.engine.tokenizer
    hay = Hay.of(tokenizer, words)
    makers = {context: TASKS[task](tokenizer, hay, context, task_settings) for context in contexts}
    for context, make in makers.items():  # a point that cannot be measured is refused before the first is
        teacher.check_length(context, flag="--contexts")
        make(0)
    points = []
    for context, make in makers.items():
        tell(f"{task} at {context} tokens …")
        points.append(
            measure_probes(teacher, make, context=context, num_probes=num_rounds, against_exact=against_exact)
        )
    settings = {"text": "shipped" if text is None else text.name, "num_rounds": num_rounds, **task_settings}
    return Evaluated(
        record=make_record(task, config, teacher, settings, [point.record() for point in points]),
        columns=PROBE_COLUMNS,
        rows=[point.row() for point in points],
        report=report_rows(teacher),
    )


def run_choice(
    config: EngineConfig,
    file: Path,
    *,
    shots: int,
    num_items: int | None,
    against_exact: bool,
    progress: Progress | None,
    tell: Callable[[str], None] = lambda _: None,
) -> Evaluated:
    """The questions of a file, after its first `shots` as examples; at most `num_items` of them. Other arguments and
    errors as `run_task`."""
    items = read_items(file)
    cut_shots(items, shots)
    if num_items is not None:
        items = items[: shots + num_items]
    teacher = Teacher(config, progress=progress)
    tell(f"{len(items) - shots} questions of {file.name} …")
    point = measure_choice(teacher, items, shots=shots, against_exact=against_exact)
    return Evaluated(
        record=make_record("choice", config, teacher, {"file": file.name, "shots": shots}, [point.record()]),
        columns=CHOICE_COLUMNS,
        rows=[point.row()],
        report=report_rows(teacher),
    )

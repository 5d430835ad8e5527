"""Multiple choice by likelihood: of each question's choices, the one whose text is likeliest behind it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from ambidex.core.errors import ConfigError
from ambidex.core.step import SelectionFigures
from ambidex.eval.agreement import selection_cells
from ambidex.eval.continuation import score_continuation, split_ids
from ambidex.eval.items import Item
from ambidex.eval.teacher import Teacher

CHOICE_COLUMNS: Final = (
    "questions", "right", "right a byte", "exact", "exact a byte", "by chance", "same choice", "keys attended",
    "dropped mass, most", "error bound, most",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFigures:
    """What a file of questions gave: shares of questions answered rightly, by the log-probability of a choice and by
    that over its UTF-8 bytes, which does not favour short ones. `same_choice` is the share of questions at which the
    policy chooses (by log-probability) as full attention does. The exact ones are None without such a run."""

    num_items: int
    right: float
    right_per_byte: float
    by_chance: float
    exact_right: float | None
    exact_right_per_byte: float | None
    same_choice: float | None
    selection: SelectionFigures | None

    def record(self) -> dict[str, Any]:
        """For a JSON line."""
        return {
            **asdict(self),
            "attended_share": self.selection.attended_share if self.selection is not None else 1.0,
        }

    def row(self) -> list[str]:
        """For a table; see `CHOICE_COLUMNS`."""
        shares = (
            self.right, self.right_per_byte, self.exact_right, self.exact_right_per_byte, self.by_chance,
            self.same_choice,
        )  # fmt: skip
        return [
            str(self.num_items),
            *("–" if share is None else f"{100 * share:.1f} %" for share in shares),
            *selection_cells(self.selection),
        ]


def cut_shots(items: Sequence[Item], shots: int) -> tuple[str, Sequence[Item]]:
    """The first `shots` items solved, to stand in front of each question, and the questions that are left.

    Raises:
        ConfigError: none is left.
    """
    if shots >= len(items):
        raise ConfigError(f"--shots is {shots}: the file has {len(items)} questions, one at least must be left to ask")
    return "".join(item.solved + "\n\n" for item in items[:shots]), items[shots:]


def measure_choice(
    teacher: Teacher,
    items: Sequence[Item],
    *,
    shots: int,
    against_exact: bool,
    progress: Callable[[], None] | None = None,
) -> ChoiceFigures:
    """Ask the questions under the engine's policy, and with all keys to compare.

    Args:
        shots: so many of the first items are examples in front of the others.
        progress: called after each question.
    Raises:
        ConfigError: too few questions, or one is longer than the context limit.
        RequestFailedError: the engine could not compute it.
    """
    before, asked = cut_shots(items, shots)
    chosen: list[tuple[int, int]] = []
    exact: list[tuple[int, int]] = []
    selection: SelectionFigures | None = None
    for item in asked:
        place, selected = _choose(teacher, item, before, is_exact=False)
        chosen.append(place)
        if selected is not None:
            selection = selected if selection is None else selection.join(selected)
        if against_exact:
            exact.append(_choose(teacher, item, before, is_exact=True)[0])
        if progress is not None:
            progress()
    rights = [item.right for item in asked]
    return ChoiceFigures(
        num_items=len(asked),
        right=_share([place for place, _ in chosen], rights),
        right_per_byte=_share([place for _, place in chosen], rights),
        by_chance=sum(1 / len(item.continuations) for item in asked) / len(asked),
        exact_right=_share([place for place, _ in exact], rights) if against_exact else None,
        exact_right_per_byte=_share([place for _, place in exact], rights) if against_exact else None,
        same_choice=_share([place for place, _ in chosen], [place for place, _ in exact]) if against_exact else None,
        selection=selection,
    )


def _choose(
    teacher: Teacher, item: Item, before: str, *, is_exact: bool
) -> tuple[tuple[int, int], SelectionFigures | None]:
    """Places of the likeliest choice and of the likeliest a byte."""
    logprobs, per_byte = [], []
    selection: SelectionFigures | None = None
    for context, continuation in zip(item.contexts, item.continuations, strict=True):
        ids = split_ids(teacher.engine.tokenizer, before + context, continuation)
        scored = score_continuation(teacher, *ids, is_exact=is_exact)
        logprobs.append(scored.logprob)
        per_byte.append(scored.logprob / len(continuation.encode()))
        if scored.selection is not None:
            selection = scored.selection if selection is None else selection.join(scored.selection)
    return (_best(logprobs), _best(per_byte)), selection


def _best(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _share(got: Sequence[int], wanted: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(got, wanted, strict=True)) / len(wanted)

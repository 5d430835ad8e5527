"""Whether a policy still finds what was said once, long ago: digits hidden in a text, asked for at its end.

The text with the digits in it is the prompt; the question and the right answer behind it are decode queries, computed
as known text. For each digit the engine's distribution is read: the right digit against the nine others. That is finer
than a right or wrong answer, and a small model, which answers such questions weakly, still shows a difference.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from torch import Tensor

from ambidex.core.errors import ConfigError
from ambidex.core.step import SelectionFigures
from ambidex.eval.agreement import selection_cells
from ambidex.eval.teacher import Teacher
from ambidex.text.tokenizer import Tokenizer

NUM_DIGITS: Final = 5
NEEDLE: Final = "\nThe secret code of the lighthouse is{digits}. Remember it.\n"
QUESTION: Final = "\nThe secret code of the lighthouse is"
NEEDLE_COLUMNS: Final = (
    "context", "depth", "digits", "right first", "exact", "log-odds", "exact log-odds", "keys attended",
    "dropped mass, most", "error bound, most",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Digits hidden at one depth of one context. `right_first` is the share of digits that were likelier than the nine
    others, `log_odds` the mean of log p(right) − log p(likeliest other)."""

    context: int
    depth_percent: int
    num_digits: int
    right_first: float
    log_odds: float
    exact_right_first: float | None
    exact_log_odds: float | None
    selection: SelectionFigures | None

    def record(self) -> dict[str, Any]:
        """For a JSON line."""
        return asdict(self)

    def row(self) -> list[str]:
        """For a table; see `NEEDLE_COLUMNS`."""
        exact = "–" if self.exact_right_first is None else f"{100 * self.exact_right_first:.0f} %"
        exact_odds = "–" if self.exact_log_odds is None else f"{self.exact_log_odds:+.2f}"
        return [
            str(self.context), f"{self.depth_percent} %", str(self.num_digits), f"{100 * self.right_first:.0f} %",
            exact, f"{self.log_odds:+.2f}", exact_odds, *selection_cells(self.selection),
        ]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Haystack:
    """A prompt of `context` tokens, question and answer included, with a needle at some depth.

    `ids` are all tokens but the answer's last, `num_prompt` of them the text; `places` are those whose next token is a
    digit, with the ten candidates there, the right one named by `right`.
    """

    ids: list[int]
    num_prompt: int
    places: list[int]
    candidates: list[list[int]]
    right: list[int]


def make_haystack(tokenizer: Tokenizer, text: str, *, context: int, depth_percent: int, seed: int) -> Haystack:
    """Hide a code in the beginning of a text.

    Raises:
        ConfigError: the text is too short, or the context too short for the question.
    """
    code = random.Random(seed * 101 + depth_percent).sample(range(10), NUM_DIGITS)
    needle = tokenizer.encode(NEEDLE.format(digits=_spoken(code)), add_special=False)
    question, places, candidates = _answer(tokenizer, code)
    num_hay = context - len(needle) - len(question)
    if num_hay < 1:
        raise ConfigError(f"--contexts {context} is too short: needle and question take {len(needle) + len(question)}")
    hay = tokenizer.encode(text)[:num_hay]
    if len(hay) < num_hay:
        raise ConfigError(f"--text has {len(hay)} tokens, a context of {context} needs {num_hay}: give a longer text")
    depth = max(1, num_hay * depth_percent // 100)
    prompt = [*hay[:depth], *needle, *hay[depth:]]
    return Haystack(
        ids=[*prompt, *question],
        num_prompt=len(prompt),
        places=[len(prompt) + place for place in places],
        candidates=candidates,
        right=code,
    )


def measure_needle(
    teacher: Teacher,
    text: str,
    *,
    context: int,
    depth_percent: int,
    num_rounds: int,
    against_exact: bool,
    progress: Callable[[], None] | None = None,
) -> Found:
    """Ask for the codes of some haystacks under the engine's policy, and with all keys to compare.

    Raises:
        ConfigError: the text or the context does not do.
        RequestFailedError: the engine could not compute it.
    """
    teacher.check_length(context, flag="--contexts")
    odds: list[float] = []
    exact_odds: list[float] = []
    selection: SelectionFigures | None = None
    for number in range(num_rounds):
        hay = make_haystack(
            teacher.engine.tokenizer, text, context=context, depth_percent=depth_percent, seed=number
        )  # fmt: skip
        got, chosen = teacher.with_policy(hay.ids, num_prompt=hay.num_prompt)
        odds += digit_odds(got, hay)
        if chosen is not None:
            selection = chosen if selection is None else selection.join(chosen)
        if against_exact:
            exact_odds += digit_odds(teacher.exact(hay.ids, first=hay.num_prompt), hay)
        if progress is not None:
            progress()
    return Found(
        context=context,
        depth_percent=depth_percent,
        num_digits=len(odds),
        right_first=_share_above_zero(odds),
        log_odds=sum(odds) / len(odds),
        exact_right_first=_share_above_zero(exact_odds) if against_exact else None,
        exact_log_odds=sum(exact_odds) / len(exact_odds) if against_exact else None,
        selection=selection,
    )


def _answer(tokenizer: Tokenizer, code: Sequence[int]) -> tuple[list[int], list[int], list[list[int]]]:
    """Tokens of question and answer but the last, the places whose next token is a digit, and the ten tokens there."""
    places, candidates = [], []
    for index in range(len(code)):
        begin = QUESTION + _spoken(code[:index])
        spellings = [tokenizer.encode(begin + _spoken([digit]), add_special=False) for digit in range(10)]
        tails = {spelling[-1] for spelling in spellings}
        if len({tuple(spelling[:-1]) for spelling in spellings}) != 1 or len(tails) != 10:
            raise ConfigError("needle needs a tokenizer in which ten digits differ in one token: this model's has none")
        places.append(len(spellings[0]) - 2)
        candidates.append([spelling[-1] for spelling in spellings])
    return tokenizer.encode(QUESTION + _spoken(code), add_special=False)[:-1], places, candidates


def _spoken(digits: Sequence[int]) -> str:
    return "".join(f" {digit}" for digit in digits)


def digit_odds(logprobs: Tensor, hay: Haystack) -> list[float]:
    """log p(right) − log p(likeliest other) of each digit."""
    odds = []
    for place, tokens, right in zip(hay.places, hay.candidates, hay.right, strict=True):
        row = logprobs[place - hay.num_prompt, tokens].tolist()
        odds.append(row[right] - max(value for digit, value in enumerate(row) if digit != right))
    return odds


def _share_above_zero(values: Sequence[float]) -> float:
    return sum(value > 0 for value in values) / len(values)

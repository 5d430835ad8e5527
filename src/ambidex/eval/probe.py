"""A question about a long prompt, answered by the next token's distribution: the right tokens against the wrong ones.

The prompt attends all keys; the question behind it is computed as decode queries under the engine's policy, and after
its last token the candidates are compared. That is finer than a right or wrong answer in words, and a small model,
which answers such questions weakly, still shows a difference.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from torch import Tensor

from ambidex.core.step import SelectionFigures
from ambidex.eval.agreement import selection_cells
from ambidex.eval.teacher import Teacher

PROBE_COLUMNS: Final = (
    "context", "questions", "found", "exact", "by chance", "log-odds", "exact log-odds", "keys attended",
    "dropped mass, most", "error bound, most",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """`prompt` and `question` are token ids; `candidates` are the tokens that are compared behind the question, each
    once, and `right` says which of them (places in the list) are answers."""

    prompt: list[int]
    question: list[int]
    candidates: list[int]
    right: frozenset[int]


MakeProbe = Callable[[int], Probe]
"""Makes the probe of a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFigures:
    """What some probes of one context gave.

    `found` is the share of right candidates among the likeliest, taking as many as are right; `by_chance` what guessing
    gives. `log_odds` is the mean of log p(least likely right one) − log p(likeliest wrong one): above 0 where all are
    found. The `exact_` ones are of a run that attends all keys; None without it.
    """

    context: int
    num_probes: int
    found: float
    by_chance: float
    log_odds: float
    exact_found: float | None
    exact_log_odds: float | None
    selection: SelectionFigures | None

    def record(self) -> dict[str, Any]:
        """For a JSON line."""
        return {
            **asdict(self),
            "attended_share": self.selection.attended_share if self.selection is not None else 1.0,
        }

    def row(self) -> list[str]:
        """For a table; see `PROBE_COLUMNS`."""
        exact = "–" if self.exact_found is None else f"{100 * self.exact_found:.0f} %"
        exact_odds = "–" if self.exact_log_odds is None else f"{self.exact_log_odds:+.2f}"
        return [
            str(self.context), str(self.num_probes), f"{100 * self.found:.0f} %", exact,
            f"{100 * self.by_chance:.0f} %", f"{self.log_odds:+.2f}", exact_odds, *selection_cells(self.selection),
        ]  # fmt: skip


def measure_probes(
    teacher: Teacher, make: MakeProbe, *, context: int, num_probes: int, against_exact: bool
) -> ProbeFigures:
    """Ask the probes of the first seeds under the engine's policy, and with all keys to compare.

    Raises:
        ConfigError: the context does not do for the engine or for the probes.
        RequestFailedError: the engine could not compute it.
    """
    teacher.check_length(context, flag="--contexts")
    found: list[float] = []
    odds: list[float] = []
    exact_found: list[float] = []
    exact_odds: list[float] = []
    chances: list[float] = []
    selection: SelectionFigures | None = None
    for seed in range(num_probes):
        probe = make(seed)
        ids, num_prompt = [*probe.prompt, *probe.question], len(probe.prompt)
        chances.append(len(probe.right) / len(probe.candidates))
        got, chosen = teacher.with_policy(ids, num_prompt=num_prompt)
        found.append(found_share(got[-1], probe))
        odds.append(_odds(got[-1], probe))
        if chosen is not None:
            selection = chosen if selection is None else selection.join(chosen)
        if against_exact:
            exact = teacher.exact(ids, first=len(ids) - 1)[-1]
            exact_found.append(found_share(exact, probe))
            exact_odds.append(_odds(exact, probe))
    return ProbeFigures(
        context=context,
        num_probes=num_probes,
        found=_mean(found),
        by_chance=_mean(chances),
        log_odds=_mean(odds),
        exact_found=_mean(exact_found) if against_exact else None,
        exact_log_odds=_mean(exact_odds) if against_exact else None,
        selection=selection,
    )


def found_share(logprobs: Tensor, probe: Probe) -> float:
    row = logprobs[probe.candidates].tolist()
    # A tie goes against the model: equal scores tell nothing apart.
    order = sorted(range(len(row)), key=lambda place: (-row[place], place in probe.right))
    return len(probe.right.intersection(order[: len(probe.right)])) / len(probe.right)


def _odds(logprobs: Tensor, probe: Probe) -> float:
    row = logprobs[probe.candidates].tolist()
    wrong = [value for place, value in enumerate(row) if place not in probe.right]
    return float(min(row[place] for place in probe.right) - max(wrong))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)

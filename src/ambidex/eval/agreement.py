"""How far a policy's predictions are from those of full attention, on text: perplexity, most likely token, KL."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from ambidex.core.errors import ConfigError
from ambidex.core.step import SelectionFigures
from ambidex.eval.teacher import Teacher


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text cut into windows of `context` tokens: prompts of all but `num_predicted`, which the policy computes; each
    window is followed by the token that its last one is to predict."""

    token_ids: Sequence[int]
    context: int
    num_predicted: int
    num_windows: int

    def windows(self) -> list[Sequence[int]]:
        """Windows one after the other, each of context + 1 tokens.

        Raises:
            ConfigError: the text is too short, or there is no room for a prompt.
        """
        if self.num_predicted >= self.context:
            raise ConfigError(f"--predict is {self.num_predicted}: it must be below --contexts {self.context}")
        needed = self.num_windows * self.context + 1
        if len(self.token_ids) < needed:
            raise ConfigError(
                f"--text has {len(self.token_ids)} tokens: {self.num_windows} windows of {self.context} need {needed}: "
                f"give a longer text, or lower --contexts or --windows"
            )
        starts = range(0, self.num_windows * self.context, self.context)
        return [self.token_ids[start : start + self.context + 1] for start in starts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What `num_tokens` predictions at one context gave. `exact_perplexity`, `top1_equal` (share) and the divergences
    KL(exact ‖ policy) in nats are None if there was no exact run; so is `change_error`, the standard error of
    perplexity / exact_perplexity − 1 if tokens were independent, which has none of a single token either."""

    context: int
    num_tokens: int
    perplexity: float
    exact_perplexity: float | None
    change_error: float | None
    top1_equal: float | None
    mean_kl: float | None
    max_kl: float | None
    selection: SelectionFigures | None

    def record(self) -> dict[str, Any]:
        """For a JSON line."""
        return {
            **asdict(self),
            "attended_share": self.selection.attended_share if self.selection is not None else 1.0,
            "mean_dropped_mass": self.selection.mean_dropped_mass if self.selection is not None else 0.0,
        }

    def row(self) -> list[str]:
        """For a table; see `COLUMNS`."""
        change = "–"
        if self.exact_perplexity is not None:
            change = f"{100 * (self.perplexity / self.exact_perplexity - 1):+.3f}"
            change += "" if self.change_error is None else f" ± {100 * self.change_error:.3f}"
            change += " %"
        return [
            str(self.context),
            str(self.num_tokens),
            f"{self.perplexity:.4f}",
            _shown(self.exact_perplexity, ".4f"),
            change,
            _shown(None if self.top1_equal is None else 100 * self.top1_equal, ".2f", " %"),
            _shown(self.mean_kl, ".2e"),
            *selection_cells(self.selection),
        ]


COLUMNS: Final = (
    "context", "tokens", "perplexity", "exact", "change", "top-1 equal", "KL", "keys attended", "dropped mass, most",
    "error bound, most",
)  # fmt: skip


def selection_cells(selection: SelectionFigures | None) -> list[str]:
    """Keys attended, and for policies that know it, the largest mass dropped and bound."""
    if selection is None:
        return ["100 %", "0", "0"]
    is_known = selection.num_bounded > 0
    return [
        f"{100 * selection.attended_share:.1f} %",
        f"{selection.max_dropped_mass:.2e}" if is_known else "unknown",
        f"{selection.max_error_bound:.2e}" if is_known else "unknown",
    ]


def measure_agreement(
    teacher: Teacher,
    text: Text,
    *,
    against_exact: bool,
    progress: Callable[[], None] | None = None,
    other: Teacher | None = None,
) -> Agreement:
    """Run a text's windows under the engine's policy, and with all keys to compare.

    Args:
        other: whose run with all keys that is; None: the teacher's.
        progress: called after each window.
    Raises:
        ConfigError: the text does not fit.
        RequestFailedError: the engine could not compute it.
    """
    windows = text.windows()
    teacher.check_length(text.context, flag="--contexts")
    num_prompt = text.context - text.num_predicted
    losses: list[float] = []
    exact_losses: list[float] = []
    equal: list[float] = []
    divergences: list[float] = []
    selection: SelectionFigures | None = None
    for window in windows:
        ids, targets = window[:-1], torch.tensor(window[num_prompt + 1 :])[:, None]
        got, chosen = teacher.with_policy(ids, num_prompt=num_prompt)  # [n, V]
        targets = targets.to(got.device)
        losses += (-got.gather(1, targets)[:, 0]).tolist()
        if chosen is not None:
            selection = chosen if selection is None else selection.join(chosen)
        if against_exact:
            exact = (other or teacher).exact(ids, first=num_prompt)
            exact_losses += (-exact.gather(1, targets)[:, 0]).tolist()
            equal += (got.argmax(1) == exact.argmax(1)).float().tolist()
            divergences += (exact.exp() * (exact - got)).sum(1).tolist()
        if progress is not None:
            progress()
    return Agreement(
        context=text.context,
        num_tokens=len(losses),
        perplexity=math.exp(_mean(losses)),
        exact_perplexity=math.exp(_mean(exact_losses)) if against_exact else None,
        change_error=_change_error(losses, exact_losses) if against_exact else None,
        top1_equal=_mean(equal) if against_exact else None,
        mean_kl=_mean(divergences) if against_exact else None,
        max_kl=max(divergences) if against_exact else None,
        selection=selection,
    )


def _change_error(losses: Sequence[float], exact_losses: Sequence[float]) -> float | None:
    """Standard error of exp(mean difference) − 1: what both runs lose alike at a token is no part of it."""
    differences = [loss - exact for loss, exact in zip(losses, exact_losses, strict=True)]
    if len(differences) < 2:
        return None
    return math.exp(_mean(differences)) * statistics.stdev(differences) / math.sqrt(len(differences))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "–" if value is None else f"{value:{form}}{unit}"

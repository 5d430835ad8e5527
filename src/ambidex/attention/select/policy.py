"""What a policy is to the executor: it chooses keys and does not act.

A `Policy` belongs to an engine. For each request and layer it opens a `Selector`, which is told what comes and asked,
at each decode step, which keys the step's query attends:

    add_rows   K and V of new tokens, prompt and answer, as late  needs Need.ROWS
               as `first_missing` allows
    see_prompt queries of the prompt and the keys they see       needs Need.PROMPT
    select     the keys that a decode step attends               each decode step
    attended   the probabilities that came of it                 needs Need.PROBS
    measure    what was left out, where that is known            each decode step

NOTE: a selector never changes a tensor that it holds in place (`Rows` alone may grow behind its end): a step that
breaks off is computed again from shallow copies that were made before it. Steps of fixed form have two copies of what
they change in turns, or make again what they have made (`page_boxes.py`).
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import ClassVar, Protocol, Self

import torch
from torch import Tensor

from ambidex.core.kv_spec import num_partial_columns
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import PolicySettings
from ambidex.core.selection import SelectionSetting


class Need(Enum):
    """What a policy must be told."""

    ROWS = "K and V of every token"
    PROMPT = "queries of the prompt"
    PROBS = "probabilities of decode steps"
    LOOK_AHEAD = "the query as the layer before would have it"
    TIMES = "stage times are measured, and what follows from them is applied"


class Positions(StrEnum):
    """Where selected keys stand for rotary positions: where they were, or side by side as they lie in the cache."""

    ORIGINAL = "original"
    IN_CACHE = "in_cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRequest:
    """What a policy knows of a request: `max_output_tokens` None is no limit; `max_tokens` are those of prompt and
    answer together, at most, 0 if that is not known."""

    num_prompt_tokens: int
    max_output_tokens: int | None
    max_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRows:
    """Queries of consecutive tokens of a prompt, and the keys up to the last of them.

    `q` [n, Hq, D], rotated; `k` [Hkv, S, D], positions 0 … S − 1, the last n of them the queries' own. Both in the
    policy's `prompt_dtype`.
    """

    q: Tensor
    k: Tensor
    scale: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """One query of a decode step.

    `q` [Hq, D] in the policy's format, rotated; `stale_q` the same, made from the input of the layer before, if the
    policy needs it and there is one. `num_keys` S counts the query's own key, which is the last. `read_keys` reads K of
    the first so many tokens, [Hkv, n, D]; `take_keys` of some, [Hkv, M] → [Hkv, M, D]. `note_bytes` is told how many
    bytes of its own copies a policy reads.
    """

    q: Tensor
    stale_q: Tensor | None
    num_keys: int
    scale: float
    read_keys: Callable[[int], Tensor]
    take_keys: Callable[[Tensor], Tensor]
    note_bytes: Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which keys a query attends, by head.

    `mask` [Hq, S], [Hkv, S] or [1, S] bool; the query's own key, the last, is attended whatever it says. `scores`
    [Hq, S], if given, are used instead of q·k · scale: where `is_scored` [Hq or 1, S] says so; None: everywhere, and K
    is not read again.
    """

    mask: Tensor
    scores: Tensor | None = None
    is_scored: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMeasure:
    """What a decode step left out, for each query head: `dropped_mass` [Hq], the share of the softmax that the rows
    left out would have had, at most; `error_bound` [Hq], what the norm of the output's error cannot exceed."""

    dropped_mass: Tensor
    error_bound: Tensor


class Selector(ABC):
    """The state of one request in one layer."""

    def add_rows(self, k: Tensor, v: Tensor) -> None:  # noqa: B027  # most policies need nothing of it, and so below
        """Take in K and V of new tokens, [Hkv, n, D] each as the pool keeps them, in the order of their positions."""

    def first_missing(self, num_keys: int) -> int:
        """The first row that it must be told of before a query that sees `num_keys`, whose own is the last: rows of a
        prompt it has seen, and those of answers too, unless it says that it can take them in later."""
        return num_keys - 1

    def see_prompt(self, rows: PromptRows) -> None:  # noqa: B027
        """Take in queries of the prompt; chunks come in order."""

    @abstractmethod
    def select(self, row: DecodeRow) -> Selection:
        """The keys that a query attends; the next call is the next token's."""

    def attended(self, probs: Tensor) -> None:  # noqa: B027
        """Take in the probabilities [Hq, S] that the keys got, 0 where they were not attended."""

    def measure(self, out: Tensor, lse: Tensor) -> RowMeasure | None:
        """What the last selection left out; None: that is not known.

        Args:
            out: [Hq, D], what came of it; lse: [Hq], of the attended keys' scores.
        """
        del out, lse
        return None

    @property
    def kept(self) -> Tensor | None:
        """[H, S] bool: False where a key is dropped for good; None: nothing ever is."""
        return None

    def snapshot(self) -> Self:
        """A copy that the next step of this one does not change."""
        return copy.copy(self)

    def detach(self) -> Self:
        """Itself, or a copy, that no later step changes."""
        return self


class FarSelector(Protocol):
    """A selector that can also choose without a mask: all near keys, and so many of the far ones, which come first.

    `keeps_rows`: it must be told of K and V of new tokens, at the latest when its next choice is not made by scores of
    all far keys. `scores_all`: its next choice is made by scores of all far keys. `num_selected`: so many of them each
    KV head chooses then, at most (see `AheadPolicy.alpha`): those with the largest score of its query heads.
    """

    keeps_rows: ClassVar[bool]

    @property
    def scores_all(self) -> bool: ...

    @property
    def num_selected(self) -> int: ...

    def num_far(self, num_keys: int) -> int:
        """Far keys of a query that sees `num_keys`, its own included."""
        ...

    def add_rows(self, k: Tensor, v: Tensor) -> None:
        """See `Selector`."""
        ...

    def first_missing(self, num_keys: int) -> int:
        """See `Selector`."""
        ...

    def choose_scored(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Places [Hkv, M] of the far keys that a query attends, and the scores [Hkv, G, M] that they get; if
        `scores_all`.

        Args:
            scores: [Hkv, G, far] of the early query, scaled, in any floating format, which is that of the answer.
        """
        ...

    def choose_far(self, row: DecodeRow, num_far: int) -> tuple[Tensor, Tensor]:
        """The same without scores of all far keys, of which there is one at least."""
        ...


class Policy(ABC):
    """A method of choosing keys, with its settings.

    Attributes:
        needs: what selectors must be told.
        positions: where selected keys stand.
        dtype: the format in which scores are computed and values are added up.
        first_layer: that chooses; in those before it all keys are attended.
        prompt_dtype: of `PromptRows`; None: that of the model's queries.
    """

    needs: frozenset[Need] = frozenset()
    positions: ClassVar[Positions] = Positions.ORIGINAL
    dtype: ClassVar[torch.dtype] = torch.float32
    first_layer: int = 0
    prompt_dtype: ClassVar[torch.dtype | None] = torch.float32

    def __init__(self, settings: PolicySettings, spec: ModelSpec) -> None:
        self.settings = settings
        self.spec = spec

    @abstractmethod
    def open(self, request: PolicyRequest, layer_idx: int) -> Selector:
        """The state of a new request in a layer."""

    def apply(self, setting: SelectionSetting) -> None:  # noqa: B027  # most policies are not steered
        """What holds from the next step on; needs Need.TIMES."""


class AheadPolicy(Policy):
    """A policy that chooses by queries made a layer early: its selectors are `FarSelector`s, but for the first layers.

    Attributes:
        weighs_early: the far keys that are chosen get the early query's scores; else the query's own.
        alpha: as many far keys are chosen as, in the mean over the KV heads, are predicted above a head's best − alpha,
            rounded down, if these are fewer than `FarSelector.num_selected`; None: that is not counted.
        num_columns: of partial keys, where these choose.
    """

    weighs_early: ClassVar[bool]
    alpha: float | None = None

    def __init__(self, settings: PolicySettings, spec: ModelSpec) -> None:
        super().__init__(settings, spec)
        assert settings.partial_percent is not None, f"{settings.name} has partial keys"
        assert settings.exact_layers is not None, f"{settings.name} has exact layers"
        self.first_layer = max(1, settings.exact_layers)  # there is no layer before the first to make its query
        self._percent = settings.partial_percent
        self.num_columns = num_partial_columns(spec.head_dim, settings.partial_percent)


class AllKeys(Selector):
    """Attends all keys; what policies use in layers where they choose nothing."""

    def select(self, row: DecodeRow) -> Selection:
        return Selection(mask=torch.ones(1, row.num_keys, dtype=torch.bool, device=row.q.device))


class Rows:
    """Rows that only grow: [H, n, …]. What is appended goes behind the end of a buffer that copies share, so a copy
    made before keeps its rows; it is dropped, or grows instead of the other, never beside it."""

    __slots__ = ("_buffer", "_length")

    def __init__(self, buffer: Tensor, length: int) -> None:
        self._buffer = buffer
        self._length = length

    @classmethod
    def of(cls, rows: Tensor, *, capacity: int = 0) -> "Rows":
        """Rows to begin with, and room for so many in all."""
        length = rows.shape[1]
        if capacity <= length:
            return cls(rows.contiguous(), length)
        buffer = torch.empty((rows.shape[0], capacity, *rows.shape[2:]), dtype=rows.dtype, device=rows.device)
        buffer[:, :length] = rows
        return cls(buffer, length)

    @property
    def values(self) -> Tensor:
        """[H, n, …], a view."""
        return self._buffer[:, : self._length]

    @property
    def buffer(self) -> Tensor:
        """[H, capacity, …], where they lie."""
        return self._buffer

    def append(self, rows: Tensor) -> "Rows":
        """With more rows behind; copies all of them when the buffer is full, which doubles it."""
        longer = self.extend(rows.shape[1])
        longer.values[:, self._length :] = rows
        return longer

    def extend(self, num_rows: int) -> "Rows":
        """With so many more rows behind, which are still to be written; copies as `append` does."""
        length = self._length + num_rows
        buffer = self._buffer
        if length > buffer.shape[1]:
            shape = (buffer.shape[0], max(2 * buffer.shape[1], length), *buffer.shape[2:])
            buffer = torch.empty(shape, dtype=buffer.dtype, device=buffer.device)
            buffer[:, : self._length] = self.values
        return Rows(buffer, length)


def group_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q·k · scale of n queries with the keys of their heads' group.

    Args:
        q: [n, Hq, D]; k: [Hkv, S, D], in one format.
    Returns:
        [Hq, n, S].
    """
    num_queries, num_q_heads, head_dim = q.shape
    num_kv_heads, num_keys, _ = k.shape
    grouped = q.view(num_queries, num_kv_heads, num_q_heads // num_kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = grouped.reshape(num_kv_heads, -1, head_dim) @ k.transpose(1, 2)  # [Hkv, G · n, S]
    return scores.view(num_q_heads, num_queries, num_keys) * scale


def sum_groups(values: Tensor, num_kv_heads: int) -> Tensor:
    """[Hq, …] → [Hkv, …]: the sum over the query heads that share a KV head."""
    return values.view(num_kv_heads, -1, *values.shape[1:]).sum(1)


def max_groups(values: Tensor, num_kv_heads: int) -> Tensor:
    """[Hq, …] → [Hkv, …]: the largest of the query heads that share a KV head."""
    return values.view(num_kv_heads, -1, *values.shape[1:]).amax(1)


def find_places(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Where a mask [H, S] is true, side by side: places [H, M] ascending, and [H, M] bool: which are no padding.

    Cost: waits for the device.
    """
    ranks = mask.cumsum(1)
    counts = ranks[:, -1:]
    num_places = int(counts.max())
    places = torch.zeros((len(mask), num_places), dtype=torch.int64, device=mask.device)
    heads, found = mask.nonzero(as_tuple=True)
    places[heads, ranks[heads, found] - 1] = found
    return places, torch.arange(num_places, device=mask.device) < counts


def pad_keys(values: Tensor, num_keys: int) -> Tensor:
    """[H, n] → [H, S]: zeros (False) for the keys that came since."""
    return torch.nn.functional.pad(values, (0, num_keys - values.shape[1]))


def top_mask(values: Tensor, count: int) -> Tensor:
    """[H, n] bool: the `count` largest of each row, the earlier of equal ones first; all if there are no more.

    −inf is never chosen.
    """
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :count]
    mask = torch.zeros_like(values, dtype=torch.bool).scatter_(1, order, True)
    return mask & (values > -torch.inf)

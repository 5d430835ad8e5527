"""`Way`: how a policy chooses keys in decode steps of fixed form, in which all launches are the same from step to step.

    AheadWay     queries made a layer early, by the CPU's scores or partial keys   `ahead.py`     HybridGen, InfiniGen
    SumsWay      sums of what queries gave each key                                `sums.py`      H2O and its like
    WindowsWay   the first keys and the newest                                     `windows.py`   StreamingLLM
    PagesWay     pages of keys, by bounds on their scores                          `pages.py`     Quest

An engine has one, that of its policy (`find.py`). A step goes through it so:

    find_form   how many keys are far, and what of the choice is known before      host, before
    plan        what the step reads of its requests, beside what all steps do      host, before
    attention   what attends; launched, or captured                                accelerator
    keep_new    what the step has left is kept                                     host, behind the launch
    forget      a request has ended
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from ambidex.attention.context_rows import ContextRows
from ambidex.attention.fixed_scores import FixedScores
from ambidex.attention.near_rows import Angles, NearRows
from ambidex.attention.select.policy import FarSelector, Selector
from ambidex.core.ids import RequestId
from ambidex.kernels.early_rows import EarlyRows
from ambidex.storage.lane_clock import LaneClock


class DecodeWork(Protocol):
    """A request of a step, as `SelectiveAttention` has it."""

    request_id: RequestId
    start: int
    num_prompt_rows: int
    num_rows: int
    selectors: list[Selector]

    @property
    def max_tokens(self) -> int: ...

    @property
    def context(self) -> ContextRows: ...


class StepRequests(Protocol):
    """The requests of a step that is planned; see `early_requests.EarlyRequests`."""

    works: Sequence[DecodeWork]

    def tell_missing(self, layer_idx: int, row: int, selector: FarSelector) -> None: ...

    def note_bytes(self, num_bytes: int) -> None: ...


class StepAttention(Protocol):
    """See `models.base.AttentionOp`."""

    def attend(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: Angles | None = None) -> Tensor: ...


class LookAhead(Protocol):
    """Makes queries a layer early."""

    def ahead(self, layer_idx: int) -> Tensor | None:
        """Queries [T, Hq, D] of the layer behind one whose attention has its input, not rotated; None: there are none.

        The last layer has none behind it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedForm:
    """What all ways say of a step's requests, in each layer that chooses.

    `num_far`: far keys. `num_selected`: those that a query head attends, at most. `is_scored`: the CPU scores all far
    keys. `counts_rows`: how many far rows a KV head reads is not known before, and the step counts it; else
    `num_selected`. `counts_keys`: nor how many keys its query heads attend, which is as many; else `num_selected`.
    """

    num_far: Sequence[int]
    num_selected: Sequence[int]
    is_scored: bool = False
    counts_rows: bool = False
    counts_keys: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WayNumbers:
    """What a step reads of its requests: `of_requests` by name, of each request, those of all steps among them where a
    way has others; `of_layers` by layer, of each request the numbers that `Way.layer_names` names."""

    of_requests: Mapping[str, Sequence[int]] = field(default_factory=dict)
    of_layers: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """What the attention of a step of B rows is made of; tensors are views that stay where they are.

    Attributes:
        near: near rows of all requests.
        rows: what all steps read of their requests.
        own: what `Way.names` names, each [B] int64.
        of_layer: what `Way.layer_names` names, likewise, of a layer.
        num_chosen: where a layer tells how many far keys were chosen, [B, Hkv] int32, or [B, 1] where all KV heads
            choose as many.
        exact: attends all keys, for layers that do not choose.
        scores: the way to the CPU that scores far keys.
        is_scored: the CPU does.
        max_far: far keys of a step, at most.
        clock: is told for how long scores and rows are on their way; None: nobody is.
    """

    near: NearRows
    rows: EarlyRows
    own: Mapping[str, Tensor]
    of_layer: Callable[[int], Mapping[str, Tensor]]
    num_chosen: Callable[[int], Tensor]
    exact: StepAttention
    scores: FixedScores
    is_scored: bool
    max_far: int
    clock: LaneClock | None


class Way(ABC):
    """How keys are chosen.

    Attributes:
        names: of what a step reads of each request, beside `EarlyRows`.
        layer_names: of what it reads of each request in each layer.
        counts_by_head: where a step counts far rows, each KV head has a number of its own.
        first_layer: that chooses; those before it attend all keys. As many as there are layers: none does.
        look_ahead: by whose queries steps that are launched op by op choose in a form of their own (`EarlyDecode`);
            None: such steps answer query by query.
    """

    names: ClassVar[Sequence[str]] = ()
    layer_names: ClassVar[Sequence[str]] = ()
    counts_by_head: ClassVar[bool] = False
    first_layer: int = 0
    look_ahead: LookAhead | None = None

    @abstractmethod
    def find_form(self, works: Sequence[DecodeWork]) -> FixedForm:
        """The form of a step with one new token of each request, behind the prompt."""

    def plan(self, requests: StepRequests, form: FixedForm) -> WayNumbers:
        """Prepare for the step: what it reads beside what all steps do."""
        del requests, form
        return WayNumbers()

    @abstractmethod
    def attention(self, parts: StepParts) -> StepAttention:
        """What attends in all steps of so many rows and that form, once one of them was planned."""

    def keep_new(self, works: Sequence[DecodeWork]) -> None:  # noqa: B027  # some ways keep nothing, and so below
        """The step that was planned has been launched: what it leaves is kept."""

    def forget(self, request_id: RequestId) -> None:  # noqa: B027
        """Drop what is kept of a request that ended."""


def far_but_own(works: Sequence[DecodeWork]) -> list[int]:
    """Far keys of each request where none but the query's own is near."""
    return [work.start for work in works]

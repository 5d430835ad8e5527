"""`EarlyRequests`: the requests of a step of the fast form, their near and far rows, and what is read of them.

    near rows   on the accelerator (`NearRows`)                                          ┐ counted as they are read,
    far rows    in host memory (`RowStore`); told to selectors that have not seen them   ┘ copies of them timed

A step of fixed form is planned here as a whole: it reads what `FixedPlan` says, and nobody counts while it runs; what
only the step itself finds out is asked for behind it. How queries are answered is the affair of `early_decode.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from ambidex.attention.context_rows import ContextRows
from ambidex.attention.fixed_scores import FarRows
from ambidex.attention.key_sums import KeySums
from ambidex.attention.near_rows import NearRows
from ambidex.attention.page_boxes import PageBoxes
from ambidex.attention.row_store import RowStore, take_rows
from ambidex.attention.select.accumulated import Accumulated
from ambidex.attention.select.partial_keys import PartialKeys, PartialSelector
from ambidex.attention.select.policy import FarSelector, Selector
from ambidex.attention.select.quest import Pages
from ambidex.attention.select.streaming_llm import FirstAndLast, WindowPlan
from ambidex.attention.transfer_clock import TransferClock
from ambidex.core.dtypes import DType
from ambidex.core.ids import KVPart, RequestId
from ambidex.core.model_spec import ModelSpec
from ambidex.core.step import ScheduledRequest
from ambidex.kernels.early_rows import SumRule
from ambidex.storage.host_rows import HostRows
from ambidex.storage.kv_pool import KVPool


class EarlyWork(Protocol):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedForm:
    """What a step of fixed form needs to know of its requests: the first layer that chooses; of each request the far
    keys and how many of them are selected, at most if `alpha` is given (see `FarSelector`); whether the CPU scores, and
    whether far keys are weighed by early scores. With `rules`, those of each layer, sums say what is chosen, and how
    many are selected is not known. With `has_windows` places say it, with `page_tokens` boxes of pages of so many keys:
    `num_selected` is that of each query head then, and how many rows that takes is not known."""

    first_layer: int
    num_far: Sequence[int]
    num_selected: Sequence[int]
    alpha: float | None
    is_scored: bool
    weighs_early: bool
    rules: Sequence[SumRule] = ()
    has_windows: bool = False
    page_tokens: int = 0

    @property
    def is_counted(self) -> bool:
        """The step counts itself how many far rows are read."""
        return self.alpha is not None or bool(self.rules) or bool(self.page_tokens)

    @property
    def is_predicted(self) -> bool:
        """Partial keys predict which far keys are chosen."""
        return not (self.is_scored or self.rules or self.has_windows or self.page_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPlan:
    """A step of fixed form, whose rows are ready: what the CPU scores, if it does; and for `EarlyInputs` the numbers of
    its requests, and by layer the partial keys by which they choose, if they do."""

    form: FixedForm
    far: FarRows
    numbers: Mapping[str, Sequence[int]]
    partial: Mapping[int, Sequence[PartialKeys]]


class EarlyRequests:
    """Requests and rows of one step after another.

    Args:
        spec: heads, layers and head_dim.
        pool: the accelerator's.
        row_store: keeps rows in host memory.
        num_near: newest keys before a query's own that are near.
        max_requests: whose near rows are on the accelerator, at most.
        is_timed: copies over the link are timed.

    Attributes:
        near: the near rows.
        sums: what keys have got so far, of policies that add it up.
        boxes: of pages of keys, of policies that choose by them.
        clock: books the copies.
        works, rows: the step's requests, and the rows in host memory of each, up to its new one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        pool: KVPool,
        row_store: RowStore,
        *,
        num_near: int,
        max_requests: int,
        is_timed: bool,
    ) -> None:
        self._spec = spec
        self._device = pool.device
        self._row_bytes = spec.head_dim * pool.k.itemsize
        self.row_store = row_store
        self.near = NearRows(pool, num_near=num_near, max_requests=max_requests)
        self.sums = KeySums(spec, pool.device)
        self.boxes = PageBoxes(spec, pool.device)
        self.clock = TransferClock(pool.device, is_on=is_timed)
        self.works: Sequence[EarlyWork] = ()
        self.rows: Sequence[HostRows] = ()
        self._is_far: dict[type[Selector], bool] = {}
        self.num_bytes = 0
        """Bytes of a policy's own copies that were read since `clear`."""
        self.num_rows = [0, 0]
        """Rows of K or V read since `clear`, on the accelerator and in host memory, without those of exact layers."""
        self.num_attended = self.num_visible = 0
        """Keys, over query heads and layers, since `clear`."""
        self._read_chosen: Callable[[], int] | None = None
        self._is_attended_known = False

    def clear(self) -> None:
        """Count anew, for another step."""
        self.clock.begin()
        self.works, self.rows = (), ()
        self.num_bytes = self.num_attended = self.num_visible = 0
        self.num_rows = [0, 0]
        self._read_chosen = None

    def prepare_rows(self, works: Sequence[EarlyWork]) -> list[HostRows] | None:
        """Rows in host memory of each request, up to its new one; None: there is no memory for those of one.

        Cost: a request's first step copies all its rows to host memory.
        """
        rows = []
        for work in works:
            found = self.row_store.prepare(
                work.request_id, work.start, 1, max_tokens=work.max_tokens, make_context=_context_of(work)
            )
            if found is None:
                return None
            rows.append(found)
        return rows

    def begin(self, requests: Sequence[ScheduledRequest], works: Sequence[EarlyWork], rows: Sequence[HostRows]) -> None:
        """Take in the requests of a step, and their rows as `prepare_rows` found them."""
        self.works, self.rows = works, rows
        self.near.begin(requests, rows)

    def find_form(self, works: Sequence[EarlyWork], *, max_far: int) -> FixedForm | None:
        """The fixed form of a step, if it has it: one new token each, behind the prompt, and layers that look ahead,
        sums, windows or pages.

        Args:
            max_far: far keys of all requests together, at most.
        """
        if not is_decode(works):
            return None
        if isinstance(works[0].selectors[0], Accumulated | FirstAndLast):
            return self._find_lone_form(works, max_far=max_far)
        if isinstance(works[0].selectors[-1], Pages):
            return self._find_page_form(works, max_far=max_far)
        first = self._first_layer(works[0])
        if first is None:
            return None
        far = [cast("FarSelector", work.selectors[first]) for work in works]
        num_far = [selector.num_far(work.start + 1) for selector, work in zip(far, works, strict=True)]
        if sum(num_far) > max_far:
            return None
        is_scored = far[0].scores_all
        assert all(selector.scores_all is is_scored for selector in far), "all requests are in one mode"
        return FixedForm(
            first_layer=first,
            num_far=num_far,
            num_selected=[min(selector.num_selected, num) for selector, num in zip(far, num_far, strict=True)],
            alpha=far[0].alpha,
            is_scored=is_scored,
            weighs_early=far[0].weighs_early,
        )

    def _find_lone_form(self, works: Sequence[EarlyWork], *, max_far: int) -> FixedForm | None:
        """That of a policy that adds up, or has windows: all keys but the query's own are far."""
        num_far = [work.start for work in works]
        if sum(num_far) > max_far:
            return None
        first = works[0].selectors[0]
        is_summed = isinstance(first, Accumulated)
        rules = [cast("Accumulated", selector).rule for selector in works[0].selectors] if is_summed else []
        num_selected = num_far
        if isinstance(first, FirstAndLast):
            num_selected = [num - _windows_of(work).gap for num, work in zip(num_far, works, strict=True)]
        return FixedForm(
            first_layer=0,
            num_far=num_far,
            num_selected=num_selected,
            alpha=None,
            is_scored=False,
            weighs_early=False,
            rules=rules,
            has_windows=not is_summed,
        )

    def _find_page_form(self, works: Sequence[EarlyWork], *, max_far: int) -> FixedForm | None:
        """That of a policy that chooses pages: all keys but the query's own are far."""
        num_far = [work.start for work in works]
        if sum(num_far) > max_far:
            return None
        pages = [cast("Pages", work.selectors[-1]) for work in works]
        plans = [own.plan_pages(num + 1) for own, num in zip(pages, num_far, strict=True)]
        return FixedForm(
            first_layer=sum(not isinstance(selector, Pages) for selector in works[0].selectors),
            num_far=num_far,
            num_selected=[plan.num_attended - 1 for plan in plans],
            alpha=None,
            is_scored=False,
            weighs_early=False,
            page_tokens=pages[0].page_tokens,
        )

    def plan_fixed(self, form: FixedForm) -> FixedPlan:
        """Plan the step that has begun, and count all that it will read, but for chosen rows if the step itself counts
        these: see `expect_chosen`.

        Cost: the first step that predicts behind others which do not brings what partial keys lack; see also
            `KeySums.plan` and `PageBoxes.plan`.
        """
        num_kv_heads, num_q_heads = self._spec.num_kv_heads, self._spec.num_q_heads
        works, num_far, first = self.works, form.num_far, form.first_layer
        layers = range(first, self._spec.num_layers) if form.is_predicted else range(0)
        partial = {layer: self._extend_partial(layer, num_far) for layer in layers}
        num_layers = self._spec.num_layers - first
        boxes = self.boxes.plan(works) if form.page_tokens else {}
        box_bytes = num_layers * num_kv_heads * 2 * self._spec.head_dim * DType.FP32.num_bytes
        self.num_bytes += sum(boxes.get("num_pages", ())) * box_bytes
        self._is_attended_known = bool(form.page_tokens)
        for work, num, most in zip(works, num_far, form.num_selected, strict=True):
            num_near, chosen = work.start + 1 - num, 0 if form.is_counted else most
            attended = most if self._is_attended_known else chosen
            self.num_rows[0] += num_layers * 2 * num_kv_heads * num_near
            self.num_rows[1] += num_layers * num_kv_heads * (chosen + (num if form.is_scored else chosen))
            self.num_visible += num_q_heads * self._spec.num_layers * (work.start + 1)
            self.num_attended += num_q_heads * (first * (work.start + 1) + num_layers * (attended + num_near))
        places = range(len(works))
        num_scored = [num + 1 for num in num_far] if form.rules else num_far
        return FixedPlan(
            form=form,
            far=FarRows(self.rows, num_far, first, is_scored=form.is_scored),
            partial=partial,
            numbers={
                "near_slots": [self.near.place(row, works[row].start) for row in places],
                "near_first": [self.near.place(row, num_far[row]) for row in places],
                "near_num": [works[row].start + 1 - num_far[row] for row in places],
                "far_num": num_far,
                "num_selected": form.num_selected,
                "score_first": [num_q_heads * sum(num_scored[:row]) for row in places],
                "k_address": [part.k.data_ptr() for part in self.rows],
                "v_address": [part.v.data_ptr() for part in self.rows],
                "capacity": [part.capacity for part in self.rows],
                "layer_rows": [part.layer_rows for part in self.rows],
                **(self.sums.plan(works) if form.rules else {}),
                **(_plan_windows(works) if form.has_windows else {}),
                **boxes,
            },
        )

    def expect_chosen(self, read: Callable[[], int]) -> None:
        """The step that was planned counts itself how many far rows are read.

        Args:
            read: tells how many of K, and of V, over all requests, layers and KV heads, once the step has ended.
        """
        self._read_chosen = read

    def count_chosen(self) -> None:
        """Count what the step itself has counted.

        Cost: waits for the device, once a step.
        """
        if self._read_chosen is not None:
            num_chosen, self._read_chosen = self._read_chosen(), None
            self.num_rows[1] += 2 * num_chosen
            if not self._is_attended_known:  # else not all query heads of a KV head attend the rows that it reads
                self.num_attended += self._spec.group_size * num_chosen

    def find_far(self, layer_idx: int) -> list[FarSelector]:
        """The selectors of a layer that looks ahead, one for each request; none of one that does not."""
        selectors = [work.selectors[layer_idx] for work in self.works]
        return cast("list[FarSelector]", selectors) if self._looks_ahead(selectors[0]) else []

    def tell_rows(self, layer_idx: int, row: int, selector: FarSelector) -> None:
        """Tell a selector of the rows that it has not been told of, the step's own last."""
        start = self.works[row].start
        self._tell_missing(layer_idx, row, selector)
        new_k, new_v = self.near.rows(layer_idx, row, start, start + 1)
        selector.add_rows(new_k.float(), new_v.float())

    def take_keys(self, layer_idx: int, row: int, places: Tensor) -> Tensor:
        """Rows of K of a request at `places` [Hkv, n], in fp32 on the accelerator."""
        rows = self.rows[row]
        with self.clock.measure(), rows.home.copying(KVPart.K, layer_idx, places.numel() * self._row_bytes):
            taken = take_rows(rows.k_there[layer_idx], places, rows.base)
        self.num_rows[1] += places.numel()
        return taken.float()

    def note_bytes(self, num_bytes: int) -> None:
        """Count bytes of a policy's own copies."""
        self.num_bytes += num_bytes

    def count(self, num_visible: int, num_attended: int) -> None:
        """Count keys of one layer."""
        self.num_visible += self._spec.num_q_heads * num_visible
        self.num_attended += self._spec.num_q_heads * num_attended

    def keep_new(self) -> None:
        """Launch: the step's own rows have been computed; keep them."""
        self.near.keep_new(self.rows)

    def tell_selectors(self) -> None:
        """The step that was planned has been launched: what it adds up or makes of pages is kept, if its policy does,
        and which keys it has attended, if that follows from their places."""
        if isinstance(self.works[0].selectors[0], Accumulated):
            self.sums.keep_new(self.works)
        if isinstance(self.works[0].selectors[-1], Pages):
            self.boxes.keep_new(self.works)
        for work in self.works:
            for selector in work.selectors if isinstance(work.selectors[0], FirstAndLast) else ():
                cast("FirstAndLast", selector).place(work.start + 1, self._device)

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a request that ended."""
        self.row_store.forget(request_id)
        self.near.forget(request_id)
        self.sums.forget(request_id)
        self.boxes.forget(request_id)

    def _first_layer(self, work: EarlyWork) -> int | None:
        """The first layer that looks ahead, as all behind it do; None: there is none."""
        is_far = [self._looks_ahead(selector) for selector in work.selectors]
        first = is_far.index(True) if True in is_far else len(is_far)
        return first if 0 < first < len(is_far) and all(is_far[first:]) else None

    def _looks_ahead(self, selector: Selector) -> bool:
        kind = type(selector)
        if kind not in self._is_far:  # a protocol is looked up member by member, which takes longer than many a launch
            self._is_far[kind] = isinstance(selector, FarSelector)
        return self._is_far[kind]

    def _extend_partial(self, layer_idx: int, num_far: Sequence[int]) -> list[PartialKeys]:
        """The partial keys of each request in a layer, those of all older keys, with room for that of its new one."""
        found = []
        for row, work in enumerate(self.works):
            selector = cast("PartialSelector", work.selectors[layer_idx])
            self._tell_missing(layer_idx, row, selector)
            found.append(selector.extend_partial())
            if num_far[row]:  # else nobody reads them
                self.num_bytes += found[-1].num_bytes
        return found

    def _tell_missing(self, layer_idx: int, row: int, selector: FarSelector) -> None:
        """Tell a selector of the rows in host memory that it has not been told of."""
        start, rows = self.works[row].start, self.rows[row]
        first = selector.first_missing(start + 1)
        if first < start:
            num_bytes = (start - first) * self._spec.num_kv_heads * self._row_bytes
            with self.clock.measure(), self.row_store.home.copying(KVPart.K, layer_idx, num_bytes):
                missing = rows.k_there[layer_idx, :, first:start].to(self._device).float()
            selector.add_rows(missing, rows.v_there[layer_idx, :, first:start])


def is_decode(works: Sequence[EarlyWork]) -> bool:
    """Whether all requests have one new token, behind the prompt."""
    return all(work.num_prompt_rows == 0 and work.num_rows == 1 for work in works)


def _windows_of(work: EarlyWork) -> WindowPlan:
    """Those of all layers."""
    return cast("FirstAndLast", work.selectors[0]).plan_windows(work.start + 1)


def _plan_windows(works: Sequence[EarlyWork]) -> Mapping[str, Sequence[int]]:
    """What `WindowRows` says of each request."""
    plans = [_windows_of(work) for work in works]
    return {
        "sink_end": [plan.sink_end for plan in plans],
        "window_first": [plan.window_first for plan in plans],
        "gap": [plan.gap for plan in plans],
    }


def _context_of(work: EarlyWork) -> Callable[[], ContextRows]:
    return lambda: work.context

"""`EarlyRequests`: the requests of a step of the fast form, their near and far rows, and what is read of them.

    near rows   on the accelerator (`NearRows`)                                          ┐ counted as they are read,
    far rows    in host memory (`RowStore`); told to selectors that have not seen them   ┘ copies of them timed

A step of fixed form is planned here as a whole: it reads what `FixedPlan` says, and nobody counts while it runs; what
only the step itself finds out is asked for behind it. How queries are answered is the affair of `early_decode.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from ambidex.attention.context_rows import ContextRows
from ambidex.attention.fixed_scores import FarRows
from ambidex.attention.near_rows import NearRows
from ambidex.attention.row_store import RowStore, take_rows
from ambidex.attention.select.policy import FarSelector
from ambidex.attention.transfer_clock import TransferClock
from ambidex.attention.ways.way import DecodeWork, FixedForm, Way
from ambidex.core.ids import KVPart, RequestId
from ambidex.core.model_spec import ModelSpec
from ambidex.core.step import ScheduledRequest
from ambidex.storage.host_rows import HostRows
from ambidex.storage.kv_pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPlan:
    """A step of fixed form, whose rows are ready: what the CPU scores, if it does; and for `FixedInputs` the numbers of
    its requests, and those that they have in each layer, by layer, if they do."""

    form: FixedForm
    far: FarRows
    numbers: Mapping[str, Sequence[int]]
    layer_numbers: Mapping[int, Sequence[Sequence[int]]]


class EarlyRequests:
    """Requests and rows of one step after another.

    Args:
        spec: heads, layers and head_dim.
        pool: the accelerator's.
        row_store: keeps rows in host memory.
        way: how keys are chosen.
        num_near: newest keys before a query's own that are near.
        max_requests: whose near rows are on the accelerator, at most.
        is_timed: copies over the link are timed.

    Attributes:
        way: how keys are chosen.
        near: the near rows.
        clock: books the copies.
        works, rows: the step's requests, and the rows in host memory of each, up to its new one.
    """

    def __init__(
        self,
        spec: ModelSpec,
        pool: KVPool,
        row_store: RowStore,
        way: Way,
        *,
        num_near: int,
        max_requests: int,
        is_timed: bool,
    ) -> None:
        self._spec = spec
        self._device = pool.device
        self._row_bytes = spec.head_dim * pool.k.itemsize
        self.row_store = row_store
        self.way = way
        self.near = NearRows(pool, num_near=num_near, max_requests=max_requests)
        self.clock = TransferClock(pool.device, is_on=is_timed)
        self.works: Sequence[DecodeWork] = ()
        self.rows: Sequence[HostRows] = ()
        self.num_bytes = 0
        """Bytes of a policy's own copies that were read since `clear`."""
        self.num_rows = [0, 0]
        """Rows of K or V read since `clear`, on the accelerator and in host memory, without those of exact layers."""
        self.num_attended = self.num_visible = 0
        """Keys, over query heads and layers, since `clear`."""
        self._read_chosen: Callable[[], int] | None = None
        self._counts_keys = False

    def clear(self) -> None:
        """Count anew, for another step."""
        self.clock.begin()
        self.works, self.rows = (), ()
        self.num_bytes = self.num_attended = self.num_visible = 0
        self.num_rows = [0, 0]
        self._read_chosen = None

    def prepare_rows(self, works: Sequence[DecodeWork]) -> list[HostRows] | None:
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

    def begin(
        self, requests: Sequence[ScheduledRequest], works: Sequence[DecodeWork], rows: Sequence[HostRows]
    ) -> None:
        """Take in the requests of a step, and their rows as `prepare_rows` found them."""
        self.works, self.rows = works, rows
        self.near.begin(requests, rows)

    def find_form(self, works: Sequence[DecodeWork], *, max_far: int) -> FixedForm | None:
        """The fixed form of a step, if it has it: one new token each, behind the prompt, and layers that choose.

        Args:
            max_far: far keys of all requests together, at most.
        """
        if not is_decode(works) or self.way.first_layer >= self._spec.num_layers:
            return None
        form = self.way.find_form(works)
        return form if sum(form.num_far) <= max_far else None

    def plan_fixed(self, form: FixedForm) -> FixedPlan:
        """Plan the step that has begun, and count all that it will read, but for chosen rows if the step itself counts
        these: see `expect_chosen`.

        Cost: that of `Way.plan`.
        """
        num_kv_heads, num_q_heads = self._spec.num_kv_heads, self._spec.num_q_heads
        works, num_far, first = self.works, form.num_far, self.way.first_layer
        num_layers = self._spec.num_layers - first
        self._counts_keys = form.counts_keys
        for work, num, most in zip(works, num_far, form.num_selected, strict=True):
            num_near, chosen = work.start + 1 - num, 0 if form.counts_rows else most
            attended = 0 if form.counts_keys else most
            self.num_rows[0] += num_layers * 2 * num_kv_heads * num_near
            self.num_rows[1] += num_layers * num_kv_heads * (chosen + (num if form.is_scored else chosen))
            self.num_visible += num_q_heads * self._spec.num_layers * (work.start + 1)
            self.num_attended += num_q_heads * (first * (work.start + 1) + num_layers * (attended + num_near))
        places, own = range(len(works)), self.way.plan(self, form)
        return FixedPlan(
            form=form,
            far=FarRows(self.rows, num_far, first, is_scored=form.is_scored),
            layer_numbers=own.of_layers,
            numbers={
                "near_slots": [self.near.place(row, works[row].start) for row in places],
                "near_first": [self.near.place(row, num_far[row]) for row in places],
                "near_num": [works[row].start + 1 - num_far[row] for row in places],
                "far_num": num_far,
                "num_selected": form.num_selected,
                "score_first": [num_q_heads * sum(num_far[:row]) for row in places],
                "k_address": [part.k.data_ptr() for part in self.rows],
                "v_address": [part.v.data_ptr() for part in self.rows],
                "capacity": [part.capacity for part in self.rows],
                "layer_rows": [part.layer_rows for part in self.rows],
                **own.of_requests,
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
            if self._counts_keys:  # else not all query heads of a KV head attend the rows that it reads
                self.num_attended += self._spec.group_size * num_chosen

    def find_far(self, layer_idx: int) -> list[FarSelector]:
        """The selectors of a layer that looks ahead, one for each request; none of one that does not."""
        if layer_idx < self.way.first_layer:
            return []
        return cast("list[FarSelector]", [work.selectors[layer_idx] for work in self.works])

    def tell_rows(self, layer_idx: int, row: int, selector: FarSelector) -> None:
        """Tell a selector of the rows that it has not been told of, the step's own last."""
        start = self.works[row].start
        self.tell_missing(layer_idx, row, selector)
        new_k, new_v = self.near.rows(layer_idx, row, start, start + 1)
        selector.add_rows(new_k.float(), new_v.float())

    def tell_missing(self, layer_idx: int, row: int, selector: FarSelector) -> None:
        """Tell a selector of the rows in host memory that it has not been told of."""
        start, rows = self.works[row].start, self.rows[row]
        first = selector.first_missing(start + 1)
        if first < start:
            num_bytes = (start - first) * self._spec.num_kv_heads * self._row_bytes
            with self.clock.measure(), self.row_store.home.copying(KVPart.K, layer_idx, num_bytes):
                missing = rows.k_there[layer_idx, :, first:start].to(self._device).float()
            selector.add_rows(missing, rows.v_there[layer_idx, :, first:start])

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

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a request that ended."""
        self.row_store.forget(request_id)
        self.near.forget(request_id)
        self.way.forget(request_id)


def is_decode(works: Sequence[DecodeWork]) -> bool:
    """Whether all requests have one new token, behind the prompt."""
    return all(work.num_prompt_rows == 0 and work.num_rows == 1 for work in works)


def _context_of(work: DecodeWork) -> Callable[[], ContextRows]:
    return lambda: work.context

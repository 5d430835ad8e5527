"""Requests as `SelectiveAttention` has them: what is kept of each between steps, and its share of a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ambidex.attention.context_rows import TIERS, ContextRows
from ambidex.attention.row_store import RowStore
from ambidex.attention.select.policy import Policy, PolicyRequest, Selector
from ambidex.core.errors import InternalError
from ambidex.core.ids import RequestId, Tier
from ambidex.core.step import BlockRef, NewRequest, ScheduledRequest
from ambidex.storage.host_rows import HostRows
from ambidex.storage.kv_pool import KVPool


@dataclass(slots=True, kw_only=True)
class RequestState:
    """What is kept of a request from its first step until it is forgotten."""

    request: PolicyRequest
    max_tokens: int
    selectors: list[Selector] = field(default_factory=list)
    num_computed: int = 0
    """Tokens that the selectors have taken in."""


@dataclass(frozen=True, slots=True)
class KeptState:
    """A request between two steps."""

    selectors: tuple[Selector, ...]
    num_computed: int


@dataclass(slots=True, kw_only=True)
class Work:
    """One request of a step. Rows are places among the step's T tokens; `start` is the position of the first."""

    request_id: RequestId
    state: RequestState
    start: int
    first_row: int
    num_prompt_rows: int
    num_rows: int
    blocks: Sequence[BlockRef]
    make_context: Callable[[], ContextRows]
    selectors: list[Selector]
    """Copies of the state's, which take their place when the step is at its end."""
    made: ContextRows | None = None
    rows: HostRows | None = None
    """K and V as rows in host memory; None: they are read from the pools."""

    @property
    def context(self) -> ContextRows:
        """K and V by position; made when it is first asked for."""
        if self.made is None:
            self.made = self.make_context()
        return self.made

    @property
    def max_tokens(self) -> int:
        """Of the request, at most."""
        return self.state.max_tokens

    @property
    def prompt_rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_prompt_rows)

    @property
    def decode_rows(self) -> range:
        return range(self.first_row + self.num_prompt_rows, self.first_row + self.num_rows)

    def num_keys(self, row: int) -> int:
        """Keys that the query in a row sees, its own included."""
        return self.start + row - self.first_row + 1


class RequestStates:
    """What is kept of the requests that a policy knows.

    Args:
        num_layers: each has a selector of its own.
        pools: of both tiers.

    Attributes:
        by_id: the states.
    """

    def __init__(self, policy: Policy, num_layers: int, pools: Mapping[Tier, KVPool]) -> None:
        self._policy = policy
        self._num_layers = num_layers
        self._pools = pools
        self.by_id: dict[RequestId, RequestState] = {}

    def add(self, request: NewRequest) -> None:
        """Make a request known before its first step."""
        self.by_id[request.request_id] = RequestState(
            request=PolicyRequest(
                num_prompt_tokens=len(request.prompt_token_ids),
                max_output_tokens=request.params.max_output_tokens,
                max_tokens=request.max_tokens,
            ),
            max_tokens=request.max_tokens,
        )

    def forget(self, request_id: RequestId) -> None:
        """Drop what is kept of a request."""
        self.by_id.pop(request_id, None)

    def keep(self, request_id: RequestId) -> KeptState:
        """What is kept of a request now."""
        state = self.by_id[request_id]
        return KeptState(tuple(selector.detach() for selector in state.selectors), state.num_computed)

    def restore(self, request_id: RequestId, kept: KeptState) -> None:
        """Take a request back to where it was."""
        state = self.by_id[request_id]
        state.selectors, state.num_computed = list(kept.selectors), kept.num_computed

    def kept(self, request_id: RequestId, layer_idx: int) -> Tensor | None:
        """[H, S] bool: False where a key of a request is dropped for good; None: nothing is."""
        return self.by_id[request_id].selectors[layer_idx].kept

    def open(self, request: ScheduledRequest, *, first_row: int) -> Work:
        """A request's share of a step.

        Args:
            first_row: the place of its first token among those of the step.
        Raises:
            InternalError: the request is not known, or its tokens do not follow those that were computed.
        """
        state = self.by_id.get(request.request_id)
        if state is None:
            raise InternalError(f"request {request.request_id} was not made known to the policy")
        if request.start == 0:  # its first step, or the first after a preemption
            state.num_computed = 0
            state.selectors = [self._policy.open(state.request, layer_idx) for layer_idx in range(self._num_layers)]
        elif not state.selectors or state.num_computed != request.start:
            raise InternalError(
                f"request {request.request_id}: a step begins at token {request.start}, its policy has seen "
                f"{state.num_computed}: K and V that another request computed cannot be used with a policy"
            )
        num_rows = len(request.token_ids)
        return Work(
            request_id=request.request_id,
            state=state,
            start=request.start,
            first_row=first_row,
            num_prompt_rows=min(num_rows, max(0, state.request.num_prompt_tokens - request.start)),
            num_rows=num_rows,
            blocks=request.blocks,
            make_context=lambda: ContextRows(request.blocks, request.start + num_rows, pools=self._pools),
            selectors=[selector.snapshot() for selector in state.selectors],
        )

    def commit(self, works: Sequence[Work]) -> None:
        """A step is at its end: what selectors became in it holds."""
        for work in works:
            work.state.selectors = work.selectors
            work.state.num_computed = work.start + work.num_rows
            if work.rows is not None:
                work.rows.length = work.start + work.num_rows


def prepare_rows(works: Sequence[Work], store: RowStore) -> None:
    """Rows in host memory of the requests that have no prompt in a step."""
    for work in works:
        if not work.num_prompt_rows:
            work.rows = store.prepare(
                work.request_id,
                work.start,
                work.num_rows,
                max_tokens=work.max_tokens,
                make_context=work.make_context,
            )


def find_new_rows(
    works: Sequence[Work], pools: Mapping[Tier, KVPool], device: torch.device
) -> list[tuple[Tier, Tensor, Tensor]]:
    """Where the decode queries' own rows go: tier, rows among T, slots on the tier's device."""
    block_size = pools[Tier.GPU].spec.block_size
    rows: dict[Tier, list[int]] = {tier: [] for tier in TIERS}
    slots: dict[Tier, list[int]] = {tier: [] for tier in TIERS}
    for work in works:
        if not work.decode_rows:
            continue
        for row in work.decode_rows:
            place, offset = divmod(work.num_keys(row) - 1, block_size)
            block = work.blocks[place]
            rows[block.tier].append(row)
            slots[block.tier].append(block.block_id * block_size + offset)

    def index(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return [(tier, index(rows[tier]), index(slots[tier]).to(pools[tier].device)) for tier in TIERS if rows[tier]]

"""All that crosses the wall between the planes: `StepPlan` goes out, `StepResult` comes back. Plain values only."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ambidex.core.ids import BlockId, Lane, MoveId, RequestId, Tier
from ambidex.core.request import SamplingParams


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block on a tier."""

    tier: Tier
    block_id: BlockId


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMove:
    """Copy one block (K and V, all layers) to another tier during this step.

    The source stays readable through the whole step; the target is not readable before the move is committed.
    """

    move_id: MoveId
    source: BlockRef
    target: BlockRef


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """What the executor must know of a request before its first step."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    """Token ids that may not be chosen before `params.min_output_tokens` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRequest:
    """The share of one request in a step.

    Tokens at positions `start` … `start + len(token_ids) - 1` are computed; their K and V go into `blocks`, which cover
    positions 0 … `start + len(token_ids) - 1` in order. Keys before `start` are read from there.
    """

    request_id: RequestId
    token_ids: tuple[int, ...]
    start: int
    blocks: tuple[BlockRef, ...]
    is_sampled: bool
    """The last token's logits give the next token of the answer."""
    allowed_tokens: bytes | None = None
    """One bit for each token of the vocabulary, least significant first, in whole 32-bit words: 1 may be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: what is computed, which blocks move meanwhile, which requests come and go."""

    requests: tuple[ScheduledRequest, ...] = ()
    moves: tuple[BlockMove, ...] = ()
    new_requests: tuple[NewRequest, ...] = ()
    finished_requests: tuple[RequestId, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(len(request.token_ids) for request in self.requests)

    @property
    def is_empty(self) -> bool:
        """Nothing to compute, move or forget."""
        return not (self.requests or self.moves or self.finished_requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """A chosen token; log-probabilities (natural log) only when asked for."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step gave: tokens, requests that failed (with the reason), moves that ended, and measurements."""

    tokens: Mapping[RequestId, SampledToken] = field(default_factory=dict)
    failures: Mapping[RequestId, str] = field(default_factory=dict)
    out_of_memory: Mapping[RequestId, str] = field(default_factory=dict)
    """Requests of which nothing was computed, since the accelerator has no memory for so many tokens; with its words.
    Whether they try again with fewer is for the scheduler to say."""
    finished_moves: tuple[MoveId, ...] = ()
    failed_moves: tuple[MoveId, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall seconds by section: `prepare`, `forward`, `sample`, `moves`, `total`."""
    lane_bytes: Mapping[Lane, int] = field(default_factory=dict)
    """KV bytes that each lane's attention read."""
    is_replayed: bool = False
    """The step ran as a captured graph."""
    num_graph_failures: int = 0
    """Captures of graphs that have failed so far; after the first, steps are no longer captured."""
    num_verified_blocks: int = 0
    """Blocks whose checksums were compared before the step."""
    num_corrupt_blocks: int = 0
    """Those that had changed; their requests are among the failures."""

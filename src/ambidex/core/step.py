"""All that crosses the wall between the planes: `StepPlan` goes out, `StepResult` comes back. Plain values only."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from ambidex.core.ids import BlockId, Lane, MoveId, RequestId, Tier
from ambidex.core.request import SamplingParams
from ambidex.core.selection import SelectionSetting, StageTimes


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
    keeps_source: bool = False
    """The target becomes a copy: the source stays what it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBlock:
    """A full block by what it holds, as it is kept on disk.

    `key` is its name, `parent` the name of the block before it, `tokens` are its ids as 64-bit numbers; `block_idx` is
    its place in each context that it belongs to, and `owner` names whose they are.
    """

    key: bytes
    parent: bytes
    tokens: bytes
    block_idx: int
    owner: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFigures:
    """Blocks on disk: those that lie there now with their bytes; loaded since the start; refused since they are not
    what was written, or none of ours; and those that could not be written."""

    num_blocks: int = 0
    num_bytes: int = 0
    num_loaded: int = 0
    num_refused: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """What the executor must know of a request before its first step."""

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_tokens: int
    """Of prompt and answer together."""
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
    is_pending: bool = False
    """Its one token is the one that the step before gives to the request, and is not known yet: `token_ids` holds 0."""
    allowed_tokens: bytes | None = None
    """One bit for each token of the vocabulary, least significant first, in whole 32-bit words: 1 may be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step: what is computed, which blocks move meanwhile, which requests come and go."""

    requests: tuple[ScheduledRequest, ...] = ()
    moves: tuple[BlockMove, ...] = ()
    new_requests: tuple[NewRequest, ...] = ()
    finished_requests: tuple[RequestId, ...] = ()
    selection: SelectionSetting | None = None
    """What a policy that is steered by feedback shall select; None: as it was set."""
    is_look: bool = False
    """The result says of which blocks keys were kept."""

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
class SelectionFigures:
    """What a policy chose: sums and maxima over (decode query, layer, query head).

    `num_choices` are those triples, `num_visible` and `num_attended` the keys that they could see and that they
    attended. The rest is of the `num_bounded` of them for which the policy knows what it left out: the softmax mass
    (`sum_`, `max_dropped_mass`) and the bound on the norm of the output's error. `num_verified` were computed again
    over all keys; `max_error` is the largest error found, and none was above its bound.
    """

    num_choices: int = 0
    num_visible: int = 0
    num_attended: int = 0
    num_bounded: int = 0
    sum_dropped_mass: float = 0.0
    max_dropped_mass: float = 0.0
    max_error_bound: float = 0.0
    num_verified: int = 0
    max_error: float = 0.0

    @property
    def mean_dropped_mass(self) -> float:
        """Over the choices for which it is known; 0 if there are none."""
        return self.sum_dropped_mass / self.num_bounded if self.num_bounded else 0.0

    @property
    def attended_share(self) -> float:
        """Keys attended, of those visible; 1 if there were none to choose from."""
        return self.num_attended / self.num_visible if self.num_visible else 1.0

    def join(self, other: "SelectionFigures") -> "SelectionFigures":
        """Both together."""
        names = [item.name for item in fields(self)]
        joined = {
            name: (max if name.startswith("max_") else operator.add)(getattr(self, name), getattr(other, name))
            for name in names
        }
        return SelectionFigures(**joined)


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
    lane_seconds: Mapping[Lane, float] = field(default_factory=dict)
    """For how long each lane was busy, with weights and keys; empty where nobody timed them."""
    is_replayed: bool = False
    """The step ran as a captured graph."""
    selection: SelectionFigures | None = None
    """What the policy chose in this step; None: there is none, all keys are attended."""
    stages: StageTimes | None = None
    """Times of a decode step's stages, where a policy is steered by them."""
    kept_keys: Mapping[BlockRef, int] | None = None
    """In a look: by block whose keys were scanned those that were kept, over all layers and KV heads; blocks of which
    none was are left out. None: it was none, or nothing was scanned."""
    num_graph_failures: int = 0
    """Captures of graphs that have failed so far; after the first, steps are no longer captured."""
    num_row_refusals: int = 0
    """Requests so far for whose rows the machine had no memory, where a policy keeps rows of K and V."""
    num_verified_blocks: int = 0
    """Blocks whose checksums were compared before the step."""
    num_corrupt_blocks: int = 0
    """Those that had changed; their requests are among the failures."""


def make_buckets(max_running_requests: int) -> tuple[int, ...]:
    """Sizes of decode steps, up to the first that holds all running requests, and to 256: beyond that a launch's cost
    is small beside the step's."""
    sizes = (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 257, 32))
    largest = next((size for size in sizes if size >= max_running_requests), sizes[-1])
    return tuple(size for size in sizes if size <= largest)

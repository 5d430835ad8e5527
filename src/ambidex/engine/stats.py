"""Counters of an engine; every unit is in the name or the docstring."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from ambidex.core.hot import HotFigures
from ambidex.core.ids import Fallback, Lane, Tier
from ambidex.core.request import FinishReason, Request
from ambidex.core.sparsity import NeuronFigures
from ambidex.core.step import ScheduledRequest, SelectionFigures, StepPlan, StepResult
from ambidex.kv.prefix_cache import PrefixCacheStats


@dataclass(slots=True, kw_only=True)
class EngineStats:
    """What an engine has done so far.

    `num_cached_tokens` were not computed, because the prefix cache had them; `num_evicted_blocks` had to leave it, and
    `num_cache_mismatches` times a block in it had other tokens than its name says. `cached_bytes` are idle in it.

    `kv_bytes` are in use now, `peak_kv_bytes` were at most in use after a step; `lane_bytes` are bytes of K and V that
    each lane's attention has read; `seconds` are wall seconds by section of the steps. Replayed steps ran as captured
    CUDA graphs; after a graph failure they no longer do. `fallbacks` has only those that happened.
    `num_saved_blocks` of `saved_bytes` lie on disk, for other processes, too. `num_restored_tokens` were read from
    there, `num_recomputed_tokens` were there, but computed, which was faster. `num_refused_files` were not used, since
    they are not what was written or none of ours; `num_failed_saves` blocks could not be written.
    With `--verify`, `num_verified_blocks` counts comparisons of a block's checksum, corrupt ones those that failed.
    `selection` is what the policy chose, None if it is `exact`; `neurons` is what was left out of MLPs; `hot` what
    came of copies of hot blocks, None if there can be none.

    A step in which each request computes one token counts for decode, any other for prefill, with all its seconds.
    `num_prefill_tokens` are those computed in chunks there, `num_decode_tokens` those answered in decode steps, and
    `num_decode_keys` the sum over their requests of the tokens that were in the cache.
    """

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_evicted_blocks: int = 0
    num_cache_mismatches: int = 0
    num_moves: int = 0
    num_failed_moves: int = 0
    num_failed_requests: int = 0
    num_verified_blocks: int = 0
    num_corrupt_blocks: int = 0
    num_saved_blocks: int = 0
    saved_bytes: int = 0
    num_restored_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_refused_files: int = 0
    num_failed_saves: int = 0
    num_replayed_steps: int = 0
    num_graph_failures: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_decode_steps: int = 0
    num_decode_keys: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    selection: SelectionFigures | None = None
    neurons: NeuronFigures | None = None
    hot: HotFigures | None = None
    kv_bytes: dict[Tier, int] = field(default_factory=dict)
    cached_bytes: dict[Tier, int] = field(default_factory=dict)
    peak_kv_bytes: dict[Tier, int] = field(default_factory=dict)
    lane_bytes: Counter[Lane] = field(default_factory=Counter)
    fallbacks: Counter[Fallback] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    def record(self, plan: StepPlan, result: StepResult, changed: Sequence[Request] = ()) -> None:
        """Add one step, and the requests that got a token or ended in it."""
        self.num_steps += 1
        self.num_computed_tokens += sum(len(request.token_ids) for request in _computed(plan, result))
        self.num_output_tokens += len(result.tokens)
        self.num_moves += len(result.finished_moves)
        self.num_failed_moves += len(result.failed_moves)
        self.num_failed_requests += sum(request.finish_reason is FinishReason.ERROR for request in changed)
        self.num_verified_blocks += result.num_verified_blocks
        self.num_corrupt_blocks += result.num_corrupt_blocks
        self.num_replayed_steps += result.is_replayed
        self.num_graph_failures = result.num_graph_failures
        self.note_fallback(Fallback.NO_GRAPHS, result.num_graph_failures)
        self.note_fallback(Fallback.NO_ROWS, result.num_row_refusals)
        self.lane_bytes.update(result.lane_bytes)
        if result.selection is not None:
            self.selection = (self.selection or SelectionFigures()).join(result.selection)
        self._record_speed(plan, result)
        for section, duration in result.seconds.items():
            self.seconds[section] = self.seconds.get(section, 0.0) + duration

    def _record_speed(self, plan: StepPlan, result: StepResult) -> None:
        chunks = [len(request.token_ids) for request in _computed(plan, result) if len(request.token_ids) > 1]
        duration = result.seconds.get("total", 0.0)
        if chunks:
            self.num_prefill_tokens += sum(chunks)
            self.prefill_seconds += duration
        elif plan.requests:
            self.num_decode_tokens += len(result.tokens)
            self.num_decode_steps += 1
            self.num_decode_keys += sum(request.start for request in plan.requests)
            self.decode_seconds += duration

    def record_scheduling(
        self, *, num_preemptions: int, num_cached_tokens: int, cache: PrefixCacheStats, hot: HotFigures | None
    ) -> None:
        """Note the counts of the scheduler as they stand."""
        self.hot = hot
        self.num_preemptions = num_preemptions
        self.num_cached_tokens = num_cached_tokens
        self.num_evicted_blocks = cache.num_evicted_blocks
        self.num_cache_mismatches = cache.num_mismatches

    def record_kv(self, kv_bytes: dict[Tier, int], cached_bytes: dict[Tier, int]) -> None:
        """Note the bytes that requests hold, and that are idle in the prefix cache, on each tier now."""
        self.kv_bytes, self.cached_bytes = kv_bytes, cached_bytes
        for tier, size in kv_bytes.items():
            self.peak_kv_bytes[tier] = max(size, self.peak_kv_bytes.get(tier, 0))

    def note_fallback(self, kind: Fallback, num_so_far: int) -> None:
        """Note how often a fallback has happened in all."""
        if num_so_far:
            self.fallbacks[kind] = num_so_far

    def copy(self) -> "EngineStats":
        """The counters as they stand, for a reader in another thread."""
        return replace(
            self,
            kv_bytes=dict(self.kv_bytes),
            cached_bytes=dict(self.cached_bytes),
            peak_kv_bytes=dict(self.peak_kv_bytes),
            lane_bytes=Counter(self.lane_bytes),
            fallbacks=Counter(self.fallbacks),
            seconds=dict(self.seconds),
        )


def _computed(plan: StepPlan, result: StepResult) -> Iterator[ScheduledRequest]:
    return (request for request in plan.requests if request.request_id not in result.out_of_memory)

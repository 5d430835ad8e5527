"""May the first waiting request start? A pure decision with its reason.

A request starts only if all its known tokens fit beside what the running requests will still take soon, not merely its
first chunk: otherwise it would be admitted, preempted for an older request, admitted again, and compute its prompt each
time.
"""

from dataclasses import dataclass
from enum import StrEnum


class Admission(StrEnum):
    """Whether the first waiting request starts, or why not."""

    ADMIT = "admit"
    NEVER_FITS = "never fits: it alone needs more blocks than all tiers have"
    NO_TOKENS = "the token budget of this step is spent"
    TOO_MANY_RUNNING = "the limit of running requests is reached"
    NO_BLOCKS = "too few free blocks"
    NO_ROWS = "too little memory for the rows that a policy keeps beside the blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionState:
    """What the decision depends on.

    `num_needed_blocks` hold the known tokens of the waiting request, `num_cached_blocks` of them are there already (and
    not among the free ones); `num_reserved_blocks` are those that running requests lack for their known tokens and to
    grow by one block each. Where a policy keeps rows, `num_needed_rows` are those of the waiting request to its end, 0
    if it has them already.
    """

    num_needed_blocks: int
    num_cached_blocks: int = 0
    num_reserved_blocks: int
    num_free_blocks: int
    num_total_blocks: int
    num_running: int
    max_running: int
    num_budget_tokens: int
    num_needed_rows: int = 0
    num_free_rows: int = 0


def decide_admission(state: AdmissionState) -> Admission:
    """Decide on the first waiting request."""
    if state.num_needed_blocks > state.num_total_blocks:
        return Admission.NEVER_FITS
    if state.num_budget_tokens == 0:
        return Admission.NO_TOKENS
    if state.num_running >= state.max_running:
        return Admission.TOO_MANY_RUNNING
    if state.num_needed_blocks - state.num_cached_blocks + state.num_reserved_blocks > state.num_free_blocks:
        return Admission.NO_BLOCKS
    if state.num_needed_rows > state.num_free_rows:
        return Admission.NO_ROWS
    return Admission.ADMIT

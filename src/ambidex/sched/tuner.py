"""The tuner: follows measured steps, corrects the cost model, and says when another placement pays.

    step → correct coefficients → (every few steps) solve the bucket anew → move? → watch what came of it → keep | back

Pure: `tune(state, step, world)` gives the next state and what was decided; the same steps give the same decisions, so
that a log can be replayed. What moves bytes is the executor's matter: it says with each step which placement ran.

A bucket is a power of two of requests and one of tokens of each. A placement is only changed if the predicted gain is
above the hysteresis and pays for the bytes that move within the horizon; if steps are no faster afterwards, it is
changed back, and that placement is not tried again in this bucket for a while.
"""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, Protocol

from ambidex.core.placement import Placement
from ambidex.cost.fit import LaneSeconds, LaneTerms, correct, distance, find_surprises
from ambidex.cost.units import Coefficients
from ambidex.cost.workload import KVShares

HYSTERESIS: Final = 0.05
"""Gain below which nothing moves: what noise of measured steps leaves of coefficients, twice."""
HORIZON_STEPS: Final = 400
"""Steps within which a move must have paid: an answer or two of usual length."""
SETTLE_STEPS: Final = 3
"""Of a bucket before it is decided about: coefficients have followed by then."""
EVERY_STEPS: Final = 4
"""Steps between two solutions of a bucket, while coefficients change."""
CHANGED: Final = 0.03
"""Relative change of a coefficient since the last solution, from which it is solved anew."""
WATCH_STEPS: Final = 6
"""Steps after a move over which it is judged."""
WORSE: Final = 0.02
"""So much slower than before, and a move is taken back."""
REFUSED_STEPS: Final = 200
"""For which a placement that was taken back is not tried in its bucket, unless coefficients have changed by
`RELEARNT`."""
RELEARNT: Final = 0.25
NEAR: Final = 0.05
"""Difference of shares within which a placement counts as one that was taken back."""
SURPRISE: Final = 0.2
"""Error of a lane's seconds that is no noise. Once, it is ignored: a hiccup of the machine. Twice in a row and the same
way, the machine has changed, and is followed at `FAST_RATE`."""
FAST_RATE: Final = 0.9
MEAN_WEIGHT: Final = 0.3
"""Of the last step in the running mean of a bucket's seconds."""

Bucket = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """A placement of weights and keys."""

    placement: Placement
    kv: KVShares


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """What was measured of a step. `where` is the placement that it ran with; `is_moving`: bytes were on their way."""

    batch: int
    context: int
    seconds: float
    lanes: LaneSeconds
    where: Where
    is_moving: bool = False


class World(Protocol):
    """What the tuner asks about the model and the machine; see `solver` for one that answers."""

    def solve(self, bucket: Bucket, coefficients: Coefficients) -> Where:
        """The best placement for the largest workload of a bucket."""

    def predict_s(self, bucket: Bucket, coefficients: Coefficients, where: Where) -> float:
        """Seconds of a step; infinite if the placement does not fit the bucket's workload."""

    def terms(self, batch: int, context: int, where: Where) -> LaneTerms:
        """Terms of each lane at coefficients of 1."""

    def move_s(self, old: Where, new: Where) -> float:
        """Seconds that the link needs for the bytes that change places."""


class Kind(StrEnum):
    """What was decided."""

    MOVE = "move"
    KEPT = "kept"
    ROLL_BACK = "roll back"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A line of the log. `predicted_s` is what the new placement should take, `before_s` what the old one took;
    `measured_s` what came of it, known once a move has been watched."""

    step_idx: int
    kind: Kind
    bucket: Bucket
    where: Where
    predicted_s: float
    before_s: float
    measured_s: float | None
    move_s: float
    coefficients: Coefficients
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watch:
    bucket: Bucket
    old: Where
    new: Where
    before_s: float
    predicted_s: float
    move_s: float
    num_seen: int = 0
    sum_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    bucket: Bucket
    where: Where
    until: int
    coefficients: Coefficients


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerState:
    """All that the tuner knows. `target` is where weights and keys should be; they may still be on their way."""

    target: Where
    coefficients: Coefficients = field(default_factory=Coefficients)
    step_idx: int = 0
    bucket: Bucket = (0, 0)
    steps_in_bucket: int = 0
    mean_s: float = 0.0
    """Running mean of steps of this bucket with the placement of the last step."""
    last: Where | None = None
    surprises: tuple[tuple[str, int], ...] = ()
    """Lanes that the last step surprised, and which way."""
    solved_at: int = -EVERY_STEPS
    solved_with: Coefficients | None = None
    watch: _Watch | None = None
    refused: tuple[_Refusal, ...] = ()
    log: tuple[Decision, ...] = field(default=())


def is_near(one: Where, other: Where) -> bool:
    """Whether two placements are the same but for a few percent of each part."""
    pairs = zip(one.placement.splits(), other.placement.splits(), strict=True)
    shares = [(a.on_gpu - b.on_gpu, a.on_cpu - b.on_cpu) for a, b in pairs]
    shares.append((one.kv.on_gpu - other.kv.on_gpu, one.kv.on_cpu - other.kv.on_cpu))
    return max(abs(difference) for pair in shares for difference in pair) <= NEAR


def bucket_of(batch: int, context: int) -> Bucket:
    """Powers of two that hold a workload."""
    return 1 << (batch - 1).bit_length(), 1 << (context - 1).bit_length()


def tune(state: TunerState, step: TracedStep, world: World) -> tuple[TunerState, Decision | None]:
    """Take in one step.

    Returns:
        The next state, and what was decided: a move or a roll back is for the executor to carry out.
    """
    is_new = bucket_of(step.batch, step.context) != state.bucket
    state = _learn(state, step, world)
    if state.surprises:  # what is not understood is no ground for a decision
        return state, None
    if state.watch is not None:
        return (state, None) if step.is_moving else _judge(state, step, world)
    if is_new:  # the model knows what to do before anything of this bucket is measured
        return _decide(state, step.where, world)
    if state.steps_in_bucket < SETTLE_STEPS or state.step_idx - state.solved_at < EVERY_STEPS:
        return state, None
    if state.solved_with is not None and distance(state.solved_with, state.coefficients) < CHANGED:
        return state, None
    return _decide(state, step.where, world)


def _learn(state: TunerState, step: TracedStep, world: World) -> TunerState:
    """Coefficients and means after a step."""
    bucket = bucket_of(step.batch, step.context)
    is_same = bucket == state.bucket
    terms = world.terms(step.batch, step.context, step.where)
    surprises = find_surprises(terms, state.coefficients, step.lanes, least=SURPRISE)
    before = dict(state.surprises)
    rates = {lane: FAST_RATE if before.get(lane) == way else 0.0 for lane, way in surprises.items()}
    coefficients = correct(state.coefficients, terms, step.lanes, rates=rates)
    is_comparable = is_same and step.where == state.last and not step.is_moving
    mean = state.mean_s + MEAN_WEIGHT * (step.seconds - state.mean_s) if is_comparable else step.seconds
    return replace(
        state,
        coefficients=coefficients,
        step_idx=state.step_idx + 1,
        bucket=bucket,
        steps_in_bucket=state.steps_in_bucket + 1 if is_same else 1,
        mean_s=mean,
        last=step.where,
        surprises=tuple(surprises.items()),
        solved_with=state.solved_with if is_same else None,
        watch=state.watch if is_same else None,  # another workload cannot judge a move
        refused=tuple(
            refusal for refusal in state.refused
            if refusal.until > state.step_idx and distance(refusal.coefficients, coefficients) < RELEARNT
        ),
    )  # fmt: skip


def _judge(state: TunerState, step: TracedStep, world: World) -> tuple[TunerState, Decision | None]:
    watch = state.watch
    assert watch is not None, "only a watched move is judged"
    watch = replace(watch, num_seen=watch.num_seen + 1, sum_s=watch.sum_s + step.seconds)
    if watch.num_seen < WATCH_STEPS:
        return replace(state, watch=watch), None
    measured = watch.sum_s / watch.num_seen
    # Rates may have changed meanwhile: the old placement is judged by what it would take now, if that is more.
    old_now = max(watch.before_s, world.predict_s(state.bucket, state.coefficients, watch.old))
    is_worse = measured > old_now * (1 + WORSE)
    decision = Decision(
        step_idx=state.step_idx,
        kind=Kind.ROLL_BACK if is_worse else Kind.KEPT,
        bucket=watch.bucket,
        where=watch.old if is_worse else watch.new,
        predicted_s=watch.predicted_s,
        before_s=watch.before_s,
        measured_s=measured,
        move_s=watch.move_s if is_worse else 0.0,
        coefficients=state.coefficients,
        why="slower than before it" if is_worse else "as fast as before, or faster",
    )
    state = replace(state, watch=None, solved_at=state.step_idx, log=(*state.log, decision))
    if not is_worse:
        return state, decision
    refusal = _Refusal(
        bucket=watch.bucket, where=watch.new, until=state.step_idx + REFUSED_STEPS, coefficients=state.coefficients
    )
    return replace(state, target=watch.old, refused=(*state.refused, refusal)), decision


def _decide(state: TunerState, current: Where, world: World) -> tuple[TunerState, Decision | None]:
    found = world.solve(state.bucket, state.coefficients)
    state = replace(state, solved_at=state.step_idx, solved_with=state.coefficients)
    is_refused = any(refusal.bucket == state.bucket and is_near(refusal.where, found) for refusal in state.refused)
    if found == state.target or is_refused:
        return state, None
    now_s = world.predict_s(state.bucket, state.coefficients, current)
    new_s = world.predict_s(state.bucket, state.coefficients, found)
    move_s = world.move_s(current, found)
    gain = now_s - new_s
    if gain < HYSTERESIS * new_s or gain * HORIZON_STEPS < move_s:
        return state, None
    decision = Decision(
        step_idx=state.step_idx,
        kind=Kind.MOVE,
        bucket=state.bucket,
        where=found,
        predicted_s=new_s,
        before_s=state.mean_s,
        measured_s=None,
        move_s=move_s,
        coefficients=state.coefficients,
        why=f"{1e3 * now_s:.1f} ms a step predicted where it is, {1e3 * new_s:.1f} ms there",
    )
    watch = _Watch(bucket=state.bucket, old=current, new=found, before_s=state.mean_s, predicted_s=new_s, move_s=move_s)
    return replace(state, target=found, watch=watch, log=(*state.log, decision)), decision

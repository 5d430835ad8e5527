"""Hot blocks: which blocks of DRAM have copies on the accelerator under the bounded policy. A pure function, and who
applies it.

    step    1 2 3 4 5 6 …                                  24
    looks   x       x               x                       …      attend no copies, and say where keys were kept

Of what lies on the accelerator all keys are attended, so nobody knows which of them would have been kept. Therefore one
step in `interval` is a look: it attends every block of DRAM where it lies, and blocks with copies and without are
counted alike. Looks are few as long as little changes, and tell besides how much faster the other steps are.

Source: counts that age and admission only of what counts more than what has to go are those of TinyLFU (Einziger,
Friedman and Manes, arXiv:1512.00727), the filter of what comes once is its doorkeeper. The numbers are this project's.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from ambidex.core.hot import BlockScore, HotDecision, HotFigures, HotLook, HotState
from ambidex.core.step import BlockMove, BlockRef, StepPlan, StepResult
from ambidex.kv.lease import KVLease
from ambidex.kv.manager import KVManager

logger = logging.getLogger(__name__)

LOOKS: Final = 2
"""In which keys of a block must have been kept before it is copied."""
LEAST_INTERVAL: Final = 4
MOST_INTERVAL: Final = 64
"""Steps from look to look. Of the time that copies save, a look gives back that of one step."""
BLOCKS_PER_STEP: Final = 256
"""Of so many blocks with a score, a decision comes at most once a step: it takes some microseconds for each."""
MOST: Final = 2**31
SLOWER: Final = 1.1
"""Steps with copies that take so many times as long as a look without: copies do not pay."""
SLOW_LOOKS: Final = 2
"""In a row, until fewer blocks may have copies."""


def next_hot(state: HotState, look: HotLook) -> HotState:
    """Which blocks shall have copies from now on, from what a look saw."""
    scores = _count(state.scores, look.kept)
    most, num_slow = _limit(state, look)
    wanted = _choose(scores, state.wanted, min(most, look.room))
    num_changed = len(set(wanted) ^ set(state.wanted))
    is_calm = bool(wanted) and 8 * num_changed <= len(wanted) and _is_well_chosen(state.wanted, look.kept)
    least = min(max(LEAST_INTERVAL, len(scores) // BLOCKS_PER_STEP), MOST_INTERVAL)
    interval = max(min(2 * state.interval, MOST_INTERVAL) if is_calm else state.interval // 2, least)
    return HotState(scores=scores, wanted=wanted, most=most, num_slow=num_slow, interval=interval)


def _count(scores: Sequence[BlockScore], kept: Sequence[tuple[BlockRef, int]]) -> tuple[BlockScore, ...]:
    """Scores lose a quarter from look to look; in whole numbers, so that they come to 0."""
    known = {item.block: item for item in scores}
    new = dict(kept)
    counted = []
    for block in sorted(known.keys() | new.keys(), key=_place):
        before, num = known.get(block), new.get(block, 0)
        score, num_looks = (before.score, before.num_looks) if before is not None else (0, 0)
        if score := score * 3 // 4 + num:
            counted.append(BlockScore(block=block, score=score, num_looks=min(num_looks + (num > 0), LOOKS)))
    return tuple(counted)


def _is_well_chosen(wanted: Sequence[BlockRef], kept: Sequence[tuple[BlockRef, int]]) -> bool:
    """Of keys that a look saw kept, the blocks held nine tenths of what as many of its hottest ones did."""
    num_of = dict(kept)
    best = sum(sorted(num_of.values(), reverse=True)[: len(wanted)])
    return 10 * sum(num_of.get(block, 0) for block in wanted) >= 9 * best


def _limit(state: HotState, look: HotLook) -> tuple[int, int]:
    """How many blocks may have copies, by times: half of what there is where they make steps slower, else more."""
    if look.step_s is None or look.step_s <= SLOWER * look.look_s:
        return min(max(1, 2 * state.most), MOST), 0
    if state.num_slow + 1 < SLOW_LOOKS:
        return state.most, state.num_slow + 1
    return min(state.most, len(state.wanted)) // 2, 0


def _choose(scores: Sequence[BlockScore], wanted: Sequence[BlockRef], room: int) -> tuple[BlockRef, ...]:
    """Those that are wanted stay until there is no room, or one comes that has a quarter more."""
    score_of = {item.block: item.score for item in scores}

    def heat(block: BlockRef) -> tuple[int, str, int]:
        return -score_of[block], *_place(block)

    chosen = sorted((block for block in wanted if block in score_of), key=heat)[:room]
    taken = set(chosen)
    others = sorted((item.block for item in scores if item.num_looks >= LOOKS and item.block not in taken), key=heat)
    num_free = room - len(chosen)
    chosen += others[:num_free]
    others = others[num_free:]
    coldest = sorted(chosen, key=heat, reverse=True)
    places = {block: place for place, block in enumerate(chosen)}
    for worse, better in zip(coldest, others, strict=False):
        if 4 * score_of[better] <= 5 * score_of[worse]:
            break
        chosen[places[worse]] = better
    return tuple(sorted(chosen, key=heat))


def _place(block: BlockRef) -> tuple[str, int]:
    return block.tier.value, block.block_id


class HotBlocks:
    """Follows looks: begins copies, gives them up, and says which step is the next look.

    Args:
        kv: who makes copies.
        most: blocks that may have copies.
        most_moves: copies that begin with a step.
        tell: is told each decision; None: nobody is.
    """

    def __init__(
        self, kv: KVManager, *, most: int, most_moves: int, tell: Callable[[HotDecision], None] | None = None
    ) -> None:
        self._kv = kv
        self._most = most
        self._most_moves = most_moves
        self._tell = tell
        self._state = HotState(most=MOST, interval=LEAST_INTERVAL)
        self._num_steps_left = 1
        self._left: set[BlockRef] = set()
        self._fastest: tuple[int, float] | None = None  # requests of a step with copies, and its seconds
        self._num_looks = self._num_kept = self._num_hits = 0
        kv.tell_left(self._left.add)

    @property
    def figures(self) -> HotFigures:
        """What came of it."""
        num_blocks, num_copied = len(self._kv.copies), self._kv.num_copied
        return HotFigures(
            num_blocks=num_blocks,
            num_promoted=num_copied,
            num_dropped=num_copied - num_blocks,
            num_looks=self._num_looks,
            num_kept=self._num_kept,
            num_hits=self._num_hits,
        )

    def begin_step(
        self, num_computed_tokens: Mapping[KVLease, int], *, is_decode: bool
    ) -> tuple[tuple[BlockMove, ...], bool]:
        """The copies that begin with a step, whose blocks are all taken, and whether it is a look.

        Args:
            is_decode: each request of it computes one token, and nobody waits to start: else no copy begins, and it is
                no look.
        """
        self._forget()
        if not is_decode:
            return (), False
        self._num_steps_left -= 1
        if self._num_steps_left <= 0:
            return (), True
        moves = self._kv.begin_copies(
            self._state.wanted, num_computed_tokens, most=min(self._most_moves, self._most - len(self._kv.copies))
        )
        return moves, False

    def end_step(self, plan: StepPlan, result: StepResult) -> None:
        """Take in what a step gave, before its requests end."""
        seconds, num_requests = result.seconds.get("total"), len(plan.requests)
        if not plan.is_look:
            is_decode = all(len(each.token_ids) == 1 for each in plan.requests)
            if seconds is not None and self._kv.copies and is_decode:
                is_other = self._fastest is None or self._fastest[0] != num_requests
                if is_other or (self._fastest is not None and self._fastest[1] > seconds):
                    self._fastest = num_requests, seconds
            return
        self._num_steps_left = self._state.interval
        fastest, self._fastest = self._fastest, None
        if result.kept_keys is None or seconds is None:
            return
        # A place whose block has left since may soon be another's.
        kept = {block: num for block, num in result.kept_keys.items() if block not in self._left}
        self._forget()
        self._count_hits(kept)
        look = HotLook(
            kept=tuple(sorted(kept.items(), key=lambda item: _place(item[0]))),
            room=min(self._most, self._kv.copy_room),
            look_s=seconds,
            step_s=fastest[1] if fastest is not None and fastest[0] == num_requests else None,
        )
        before, self._state = self._state, next_hot(self._state, look)
        if self._tell is not None:
            self._tell(HotDecision(before=before, look=look, after=self._state))
        self._kv.drop_copies(set(self._kv.copies) - set(self._state.wanted))
        self._kv.order_copies(self._state.wanted)
        self._num_steps_left = self._state.interval

    def _count_hits(self, kept: Mapping[BlockRef, int]) -> None:
        self._num_looks += 1
        self._num_kept += sum(kept.values())
        self._num_hits += sum(num for block, num in kept.items() if block in self._kv.copies)

    def _forget(self) -> None:
        """What is known of blocks that hold other tokens now."""
        if not self._left:
            return
        state = self._state
        self._state = replace(
            state,
            scores=tuple(item for item in state.scores if item.block not in self._left),
            wanted=tuple(block for block in state.wanted if block not in self._left),
        )
        self._left.clear()

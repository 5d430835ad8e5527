"""`LaneBalance`: which share of the keys in DRAM travels to the accelerator in decode steps; the CPU lane has the rest.

    link         | layer i + 1's share ………………………… |        copies run through the whole step, products included
    accelerator  | products i | own keys | waits …   |
    CPU                       | its keys of layer i  |       begins when the queries are there

The lanes end together where `share · link_s = ahead_s + (1 − share) · dram_s`, with the seconds that either would need
for all keys, and those that the link is ahead: products, handovers, what the CPU lane takes for no keys. The first step
that was timed says how much that is, and so the share for any number of keys; from then on the share follows from which
lane ends last. Where few keys lie in DRAM the link brings all of them while the accelerator multiplies: such a step
needs no CPU lane and has none (it is *alone*), if it is the faster one, by time: both forms are tried, and of that with
both lanes only steps count whose share has settled.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from ambidex.core.selection import ShareDecision, ShareSeen, ShareState

_FIRST_STEP: Final = 0.1
_LAST_STEP: Final = 0.01
"""Relative steps of the share: the last is about what one block of a hundred makes."""
_LEAST_SHARE: Final = 0.01
"""So that the share can grow again."""
_MOST_MIXED: Final = 0.98
"""What the CPU lane leaves to the stream lane at most, while both work: less would be no block of theirs."""
_SAME_SIZE: Final = 1 / 8
"""Relative change of the keys in DRAM from which what was learned is taken as of another size."""
_NUM_TRIED: Final = 4
"""Steps of one form that count before its time is compared with the other's."""
_NEWEST: Final = 0.3
"""What the newest step counts in a mean."""
_CLEARLY_HIDDEN: Final = 0.7
"""Link, by its rate, over step: below it the link is not what a step waits for. Steps that did wait for it took 1.15
times as long as the rate says (3,008 keys of Llama-3.1-8B's shape on an H200)."""
_SETTLED: Final = 0.03
"""Relative step of the share below which it has turned about the best one: only then, or where it can grow no more, a
step of both lanes is as fast as it can be, and may be compared."""


class LaneBalance:
    """Follows the lanes of one kind of steps.

    Args:
        share: of the keys in DRAM that the stream lane takes at first, above 0.
        tell: is told each decision; None: nobody is.
    """

    def __init__(self, share: float, *, tell: Callable[[ShareDecision], None] | None = None) -> None:
        self._state = ShareState(share=share, step=_FIRST_STEP, direction=0)
        self._tell = tell

    @property
    def share(self) -> float:
        """As it is now; 1: the CPU lane has no part."""
        return self._state.share

    def update(self, seen: ShareSeen) -> float:
        """The share for the next step; see `next_share`."""
        before, self._state = self._state, next_share(self._state, seen)
        if self._tell is not None:
            self._tell(ShareDecision(before=before, seen=seen, after=self._state))
        return self._state.share


def next_share(state: ShareState, seen: ShareSeen) -> ShareState:
    """The share for the next step, from this one's and how its lanes ended. A pure function.

    Source: its steps are sign-based as in Rprop (Riedmiller and Braun, 1993), for one number.
    """
    if seen.times is None:
        assert seen.cpu_last is not None, "a step without a CPU lane is timed"
        return _follow(state, seen.cpu_last, min(state.share, seen.achieved * (1 + state.step)), most=1.0)
    if state.link_s is None or abs(seen.times.link_s / state.link_s - 1) > _SAME_SIZE:
        state = _restart(state, seen)
    return _next_alone(state, seen) if seen.cpu_last is None else _next_mixed(state, seen, seen.cpu_last)


def _follow(state: ShareState, cpu_last: float, share: float, *, most: float) -> ShareState:
    """A step of the share towards the lane that ended first; it shrinks when the direction turns."""
    step, share = state.step, max(share, _LEAST_SHARE)
    direction = 1 if cpu_last > 0.5 else -1
    if direction == -state.direction:
        step = max(step / 2, _LAST_STEP)
    elif state.direction:
        step = min(step * 1.1, _FIRST_STEP)
    share = min(max(share * (1 + direction * step), _LEAST_SHARE), most)
    return replace(state, share=share, step=step, direction=direction)


def _restart(state: ShareState, seen: ShareSeen) -> ShareState:
    """What is known at first of another number of keys: the link is as far ahead as it was."""
    times = seen.times
    assert times is not None, "only steps that were timed have a size"
    share = state.share
    if share == 1 and state.mixed_s is not None and times.link_s < _CLEARLY_HIDDEN * times.step_s:
        return replace(state, link_s=times.link_s)  # what was found there counts here
    if state.link_s is not None and share < 1:
        dram_per_link = times.dram_s / times.link_s
        ahead_s = state.link_s * (share * (1 + dram_per_link) - dram_per_link)
        share = min(max((ahead_s + times.dram_s) / (times.link_s + times.dram_s), _LEAST_SHARE), _MOST_MIXED)
    return ShareState(share=share, step=_FIRST_STEP, direction=0, link_s=times.link_s)


def _next_mixed(state: ShareState, seen: ShareSeen, cpu_last: float) -> ShareState:
    """Behind a step of both lanes. Their steps count when the share has settled."""
    times = seen.times
    assert times is not None, "its caller has looked"
    is_short = seen.achieved < seen.asked
    state = replace(state, may_be_alone=state.may_be_alone and not is_short)
    is_hidden = times.link_s < _CLEARLY_HIDDEN * times.step_s
    if is_hidden and state.may_be_alone and state.mixed_s is None and state.alone_s is None:
        return _begin_alone(state, mixed_share=_MOST_MIXED)
    if state.direction == 0 and cpu_last > 0.5:
        share = (times.step_s + seen.achieved * times.dram_s) / (times.link_s + times.dram_s)
        share = min(max(share, seen.achieved, _LEAST_SHARE), _MOST_MIXED)
        return replace(state, share=share, direction=1, step=_FIRST_STEP / 2)
    base = seen.achieved * (1 + state.step) if is_short else state.share
    state = _follow(state, cpu_last, min(state.share, base), most=_MOST_MIXED)
    if state.mixed_s is None and state.step > _SETTLED and state.share < _MOST_MIXED:
        return state
    state = replace(state, mixed_s=_mean(state.mixed_s, times.step_s), num_steps=state.num_steps + 1)
    if not state.may_be_alone or state.num_steps < _NUM_TRIED:
        return state
    # The link's rate says how fast it can be at best; how fast it was, once it was tried.
    alone_s = times.link_s if state.alone_s is None else state.alone_s
    if state.mixed_s is not None and alone_s < state.mixed_s:
        return _begin_alone(state, mixed_share=state.share)
    return state


def _begin_alone(state: ShareState, *, mixed_share: float) -> ShareState:
    return replace(state, share=1.0, alone_s=None, num_steps=0, mixed_share=mixed_share)


def _next_alone(state: ShareState, seen: ShareSeen) -> ShareState:
    """Behind a step whose keys in DRAM have all travelled."""
    times = seen.times
    assert times is not None, "its caller has looked"
    alone_s = _mean(state.alone_s, times.step_s)
    state = replace(state, alone_s=alone_s, num_steps=state.num_steps + 1)
    if state.num_steps < _NUM_TRIED:
        return state
    if state.mixed_s is None:  # the link seemed to be hidden, or the number of keys has changed meanwhile
        return replace(state, share=_MOST_MIXED, direction=0, step=_FIRST_STEP, num_steps=0)
    if alone_s <= state.mixed_s:
        return state
    return replace(state, share=state.mixed_share, num_steps=0, may_be_alone=False)


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else (1 - _NEWEST) * before + _NEWEST * newest

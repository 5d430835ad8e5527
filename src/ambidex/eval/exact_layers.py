"""Which number of exact layers is tried next: the first layers that attend all keys while the others look ahead.

    candidates   from the number that recall gives, in steps of an eighth of the layers, to all but the last
    bisection    with all layers exact nothing can be lost, so the border lies somewhere behind a number that fails

Pure functions of what was tried; `eval.accuracy` measures.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Final

NUM_STEPS: Final = 8
"""A step is an eighth of the layers: what differs by a layer or two is less than tasks of some dozen answers tell."""


def list_candidates(first: int, num_layers: int) -> list[int]:
    """Numbers of exact layers that may be tried, ascending; with all layers exact there would be nothing to choose.

    Args:
        first: what is tried first, at least 1; if it leaves no layer that looks ahead, all but the last is.
    """
    last = max(1, num_layers - 1)
    return [*range(min(first, last), last, math.ceil(num_layers / NUM_STEPS)), last]


def next_candidate(tried: Mapping[int, bool], candidates: Sequence[int]) -> int | None:
    """What to try next: the first, then by bisection the fewest layers that meet the criterion; None: it is found, or
    no candidate does.

    Args:
        tried: whether each number that was tried met it.
        candidates: ascending.
    """
    if candidates[0] not in tried:
        return candidates[0]
    if tried[candidates[0]]:
        return None
    fails, meets = 0, len(candidates)  # behind the last: all layers exact
    while meets - fails > 1:
        middle = (fails + meets) // 2
        if candidates[middle] not in tried:
            return candidates[middle]
        if tried[candidates[middle]]:
            meets = middle
        else:
            fails = middle
    return None


def find_fewest(tried: Mapping[int, bool]) -> int | None:
    """The fewest layers that met the criterion; None: no number did."""
    return min((num for num, met in tried.items() if met), default=None)

"""Which neurons of an MLP lie on the accelerator, and which should: bookkeeping and policies, without tensors.

    NeuronMap         where every neuron of a layer lies; moves are begun, then committed or aborted
    StaticNeurons     the most active of a profile, once and for all (PowerInfer, arXiv:2312.12456)
    AveragedNeurons   the most active of late: a score that is averaged over time, and a filter for what comes once

A neuron that lies in DRAM changes places with one of the accelerator's, so both memories stay full. An MLP is a sum
over its neurons: their order is of no matter, and nothing but the map needs to know it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from ambidex.core.errors import InternalError

Ids = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NeuronMove:
    """Slots of a layer whose neurons change places, pair by pair.

    Args:
        near: [k] slots of the accelerator; far: [k] slots of DRAM. Each slot once.
    """

    layer: int
    near: Ids
    far: Ids

    def __len__(self) -> int:
        return len(self.near)


class NeuronMap:
    """The neurons of one layer by slot.

    Args:
        near, far: the neuron of each slot, on the accelerator and in DRAM.
    """

    def __init__(self, near: Sequence[int], far: Sequence[int]) -> None:
        self.near: Ids = np.array(near, dtype=np.int64)
        self.far: Ids = np.array(far, dtype=np.int64)
        self.is_near_moving = np.zeros(len(self.near), dtype=bool)
        self.is_far_moving = np.zeros(len(self.far), dtype=bool)

    def begin(self, move: NeuronMove) -> None:
        """Reserve the slots: their neurons are in no other move until this one has ended, and lie where they lay.

        Raises:
            InternalError: a slot is twice in it, or in a move that has not ended.
        """
        for slots, is_moving in ((move.near, self.is_near_moving), (move.far, self.is_far_moving)):
            if len(np.unique(slots)) != len(move.near) or is_moving[slots].any():
                raise InternalError(f"slots {slots.tolist()} of layer {move.layer} are moved twice")
        self.is_near_moving[move.near] = True
        self.is_far_moving[move.far] = True

    def commit(self, move: NeuronMove) -> None:
        """The neurons have changed places."""
        self._end(move)
        self.near[move.near], self.far[move.far] = self.far[move.far].copy(), self.near[move.near].copy()

    def abort(self, move: NeuronMove) -> None:
        """The neurons lie where they lay."""
        self._end(move)

    def check(self) -> None:
        """Every neuron is in exactly one place.

        Raises:
            InternalError: it is not.
        """
        both = np.sort(np.concatenate([self.near, self.far]))
        if len(np.unique(both)) != len(both):
            raise InternalError("a neuron is in two places")

    def _end(self, move: NeuronMove) -> None:
        if not (self.is_near_moving[move.near].all() and self.is_far_moving[move.far].all()):
            raise InternalError(f"a move of layer {move.layer} ends that was not begun")
        self.is_near_moving[move.near] = False
        self.is_far_moving[move.far] = False


class NeuronPolicy(Protocol):
    """Watches what neurons do, and says which should change places. It picks and does not act."""

    def observe(self, layer: int, neurons: NeuronMap, near: Ids, far: Ids, num_tokens: int) -> None:
        """Tell what some steps did.

        Args:
            near, far: by slot, the tokens of those steps for which its neuron was active.
            num_tokens: of those steps.
        """
        ...

    def propose(self, layer: int, neurons: NeuronMap, *, most_pairs: int) -> NeuronMove | None:
        """A move that is worth its bytes, of slots that no move holds; None: there is none."""
        ...


class StaticNeurons:
    """Nothing moves: what the profile's arrangement has put on the accelerator stays there."""

    def observe(self, layer: int, neurons: NeuronMap, near: Ids, far: Ids, num_tokens: int) -> None:
        """See `NeuronPolicy`."""

    def propose(self, layer: int, neurons: NeuronMap, *, most_pairs: int) -> NeuronMove | None:  # noqa: ARG002  # the protocol's
        """See `NeuronPolicy`."""
        return None


DECAY: Final = 0.85
"""Of the score, kept at each observation: half of it is of the last four, so that a text's turn is followed within
some ten, and a chance hit is forgotten in as many."""
_SEEN_IN: Final = 2
"""Observations, of the last 8, in which a neuron must have been active to be moved: most neurons that wake up once do
not wake up again (below 0.2 beyond two steps for the coldest 70 %; measured by Kairox, OSDI'26)."""
PAYS_WITHIN_TOKENS: Final = 200
"""A neuron crosses the link in both directions, and from then on its bytes are not read by the CPU for the tokens that
need it: a move pays when its score is larger by 2 / 200, and by more than the averages' own chance."""


@dataclass(slots=True)
class AveragedNeurons:
    """Exponential averages of activity, by neuron.

    Args:
        scores: [L, F], from a profile, or zeros.
        decay: see `DECAY`.
    """

    scores: Scores
    decay: float = DECAY
    _seen: npt.NDArray[np.uint8] = field(init=False)
    _num_tokens: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.scores = np.array(self.scores, dtype=np.float64)
        self._seen = np.where(self.scores > 0, np.uint8(0b11), np.uint8(0))

    def observe(self, layer: int, neurons: NeuronMap, near: Ids, far: Ids, num_tokens: int) -> None:
        """See `NeuronPolicy`."""
        ids = np.concatenate([neurons.near, neurons.far])
        counts = np.concatenate([near, far])
        row, seen = self.scores[layer], self._seen[layer]
        self._num_tokens[layer] = max(1, num_tokens)
        row[ids] = self.decay * row[ids] + (1.0 - self.decay) * counts / max(1, num_tokens)
        seen[ids] = (seen[ids] << 1) | (counts > 0)

    def propose(self, layer: int, neurons: NeuronMap, *, most_pairs: int) -> NeuronMove | None:
        """See `NeuronPolicy`. The largest scores in DRAM change places with the smallest on the accelerator."""
        row = self.scores[layer]
        is_known = np.bitwise_count(self._seen[layer][neurons.far]) >= _SEEN_IN
        far_scores = np.where(is_known & ~neurons.is_far_moving, row[neurons.far], -np.inf)
        near_scores = np.where(neurons.is_near_moving, np.inf, row[neurons.near])
        num = min(most_pairs, len(far_scores), len(near_scores))
        if num <= 0:
            return None
        far = _largest(far_scores, num)
        near = _largest(-near_scores, num)
        gains = far_scores[far] - near_scores[near]
        is_worth = (gains >= 2 / PAYS_WITHIN_TOKENS) & (gains >= self._noise(layer, far_scores[far], near_scores[near]))
        return NeuronMove(layer=layer, near=near[is_worth], far=far[is_worth]) if is_worth.any() else None

    def _noise(self, layer: int, *scores: Scores) -> Scores:
        """Standard deviation of a difference of scores whose neurons are active by chance, as often as they say.

        An average of independent shares of n tokens has the variance p (1 − p) / n · (1 − decay) / (1 + decay).
        """
        spread = sum(np.clip(score, 0.0, 1.0) * (1.0 - np.clip(score, 0.0, 1.0)) for score in scores)
        num_tokens = self._num_tokens.get(layer, 1)
        return np.asarray(np.sqrt(spread / num_tokens * (1.0 - self.decay) / (1.0 + self.decay)))


def arrange(layer: int, neurons: NeuronMap, activity: npt.NDArray[np.float32]) -> NeuronMove | None:
    """The move after which the accelerator has the most active neurons; None: it has them.

    Args:
        activity: [F], by neuron.
    """
    num_near = len(neurons.near)
    values = np.concatenate([activity[neurons.near], activity[neurons.far]])
    # Of equal ones those stay that are there: a stable order keeps the near ones first.
    chosen = np.argsort(-values, kind="stable")[:num_near]
    is_chosen = np.zeros(len(values), dtype=bool)
    is_chosen[chosen] = True
    near = np.flatnonzero(~is_chosen[:num_near])
    far = np.flatnonzero(is_chosen[num_near:])
    return NeuronMove(layer=layer, near=near, far=far) if len(near) else None


def _largest(values: Scores, num: int) -> Ids:
    """Places of the largest values, the largest first."""
    places = np.argpartition(-values, num - 1)[:num] if num < len(values) else np.arange(len(values))
    return places[np.argsort(-values[places], kind="stable")]

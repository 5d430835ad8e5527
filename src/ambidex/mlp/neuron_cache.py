"""`NeuronCache`: keeps a model's hot neurons on the accelerator while it runs, one layer at a step.

    between two steps    commit the move whose copies have ended
                         a layer's counts, which arrived meanwhile → the policy → the next move is begun
                         the next layer's counts are fetched
    in the steps         the accelerator and the CPU count which of their neurons are active

A move is of one layer and within the byte budget of a step. Until it is committed every neuron is computed where it
lay; one that fails is dropped and counted, and nothing has changed.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy.typing as npt
import torch
from torch import Tensor

from ambidex.core.sparsity import CacheFigures
from ambidex.mlp.hot_neurons import Ids, NeuronMap, NeuronMove, NeuronPolicy, arrange
from ambidex.mlp.neuron_mover import NeuronMover, NeuronPlace

logger = logging.getLogger(__name__)


class NeuronCounts:
    """How often the neurons of one MLP were active, by slot, since they were last taken.

    Args:
        near: [n] int32 on the accelerator, which its part adds to.
        num_far: neurons in DRAM.
    """

    def __init__(self, near: Tensor, num_far: int) -> None:
        self.near = near
        self.far = torch.zeros(num_far, dtype=torch.int64)
        self.num_tokens = 0

    def add_far(self, needed: Tensor) -> None:
        """Count a step of the CPU: needed [T, n], of the first n neurons."""
        self.far[: needed.shape[1]] += needed.sum(0)
        self.num_tokens += needed.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedLayer:
    """One MLP of the cache."""

    place: NeuronPlace
    counts: NeuronCounts
    neurons: NeuronMap


@dataclass(slots=True, kw_only=True, eq=False)
class _Taken:
    """Counts on their way from the accelerator."""

    layer: int
    near: Tensor
    far: Tensor
    num_tokens: int


class NeuronCache:
    """Which neurons lie where, and what moves them.

    Args:
        layers: of one width and dtype.
        policy: says what to move.
        most_pairs: of a step's move.
        moves: whether neurons move while steps run.
    """

    def __init__(
        self,
        layers: Sequence[CachedLayer],
        policy: NeuronPolicy,
        *,
        most_pairs: int,
        moves: bool,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self._policy = policy
        self._most_pairs = most_pairs
        self._moves = moves
        self._mover = NeuronMover([layer.place for layer in layers], most_pairs, device=device)
        self._move: NeuronMove | None = None
        self._taken: _Taken | None = None
        self._fetched: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._fetched = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types here
        most_near = max(layer.place.num_near for layer in layers)
        self._near_counts = torch.empty(most_near, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._next = 0
        self._num_active = self._num_hits = 0
        self._num_moves = self._num_moved = self._num_failed = 0

    @torch.inference_mode()
    def arrange(self, activity: Sequence[npt.NDArray]) -> None:  # type: ignore[type-arg]
        """Put the most active neurons of a profile on the accelerator; no step is under way.

        Args:
            activity: [F] of each layer.
        Cost: waits for every copy; the neurons that change places cross the link both ways.
        """
        for index, (layer, active) in enumerate(zip(self.layers, activity, strict=True)):
            whole = arrange(index, layer.neurons, active)
            if whole is None:
                continue
            for start in range(0, len(whole), self._most_pairs):
                stop = start + self._most_pairs
                move = NeuronMove(layer=index, near=whole.near[start:stop], far=whole.far[start:stop])
                layer.neurons.begin(move)
                self._mover.begin(move)
                self._mover.settle()  # nothing else is under way
                self._mover.commit(move)
                layer.neurons.commit(move)

    @torch.inference_mode()
    def before_step(self) -> None:
        """Go on; the CPU has no part in a step now.

        Cost: does not wait. Copies of a move's rows in DRAM, of at most a step's bytes, and one layer's scores.
        """
        self._commit()
        self._observe()
        self._take()

    def figures(self) -> CacheFigures:
        """What came of it so far."""
        return CacheFigures(
            num_active=self._num_active,
            num_hits=self._num_hits,
            num_moves=self._num_moves,
            num_moved=self._num_moved,
            num_failed_moves=self._num_failed,
            moved_bytes=2 * self._num_moved * self.layers[0].place.neuron_bytes,
        )

    def _commit(self) -> None:
        move = self._move
        if move is None or not self._mover.is_done() or not self._mover.is_idle():
            return  # a chunk of a prompt may still be computed, with rows on their way from DRAM
        self._mover.commit(move)
        self.layers[move.layer].neurons.commit(move)
        self._num_moves += 1
        self._num_moved += len(move)
        self._move = None

    def _observe(self) -> None:
        taken = self._taken
        if taken is None or (self._fetched is not None and not self._fetched.query()):  # type: ignore[no-untyped-call]
            return
        self._taken = None
        layer = self.layers[taken.layer]
        near: Ids = taken.near.long().numpy()
        far: Ids = taken.far.numpy()
        self._num_hits += int(near.sum())
        self._num_active += int(near.sum() + far.sum())
        self._policy.observe(taken.layer, layer.neurons, near, far, taken.num_tokens)
        if self._moves and self._move is None:
            move = self._policy.propose(taken.layer, layer.neurons, most_pairs=self._most_pairs)
            if move is not None:
                self._begin(move)

    def _begin(self, move: NeuronMove) -> None:
        neurons = self.layers[move.layer].neurons
        neurons.begin(move)
        try:
            self._mover.begin(move)
        except RuntimeError as error:  # of torch: no memory, or a driver's
            neurons.abort(move)
            self._num_failed += 1
            logger.warning("%d neurons of an MLP stay where they are: %s", len(move), error)
        else:
            self._move = move

    def _take(self) -> None:
        """Fetch the counts of the next layer, if steps have counted since it was last asked."""
        if self._taken is not None:
            return
        index = self._next
        counts = self.layers[index].counts
        if not counts.num_tokens:
            return
        self._next = (index + 1) % len(self.layers)
        near = self._near_counts[: len(counts.near)]
        near.copy_(counts.near, non_blocking=True)
        counts.near.zero_()
        if self._fetched is not None:
            self._fetched.record()
        self._taken = _Taken(layer=index, near=near, far=counts.far.clone(), num_tokens=counts.num_tokens)
        counts.far.zero_()
        counts.num_tokens = 0

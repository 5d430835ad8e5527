"""`WeightMoves`: divided weights change places while an engine answers, in two phases.

    begin      at a step's end: what lies in DRAM is divided anew between CPU and link, and what the accelerator is to
               lose is given up. No byte moves: weights never change, and DRAM has every chunk that may move.
    advance    at each further end: memory is taken for more chunks and their copies begin, on a stream of their own,
               beside the steps; once all have arrived, places compute with them

A copy that fails leaves its chunk, and those behind it in the same place, where they are. Whoever has recorded steps is
told that places were bound anew.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.core.errors import CopyError, TierFullError
from ambidex.core.ids import Tier
from ambidex.core.ledger import MemoryLedger
from ambidex.core.placement import Placement
from ambidex.mlp.split_site import WeightLanes
from ambidex.models.chunk_counts import ChunkCounts, chunk_bytes, find_counts, placement_of, waiting_chunks
from ambidex.models.divided import DividedWeights
from ambidex.storage.side_stream import Mark, SideStream

logger = logging.getLogger(__name__)

OWNER = "weights"
"""In the ledger."""

CopyChunk = Callable[[Tensor, Tensor], None]
"""Copies a chunk's bytes from DRAM to the accelerator; raises CopyError or RuntimeError (torch's) if it cannot."""


def copy_chunk(source: Tensor, target: Tensor) -> None:
    """Copy beside other work, if the source is pinned."""
    target.copy_(source, non_blocking=True)


@dataclass(frozen=True, slots=True)
class _Flight:
    """A chunk on its way."""

    place: int
    memory: Tensor
    arrived: Mark


class WeightMoves:
    """Moves chunks of one model's weights.

    Args:
        lanes: what its places share.
        ledger: who says whether there is memory on the accelerator.
        device: the accelerator; number_bytes: of a plain number; num_layers: of the model.
        rebound: called when places compute with other parts than before: what was recorded of them is worthless.
        copy: how a chunk is copied; a test hands in one that fails.
    """

    def __init__(
        self,
        divided: DividedWeights,
        lanes: WeightLanes,
        ledger: MemoryLedger,
        *,
        device: torch.device,
        number_bytes: int,
        num_layers: int,
        rebound: Callable[[], None],
        copy: CopyChunk = copy_chunk,
    ) -> None:
        self._divided, self._lanes, self._ledger = divided, lanes, ledger
        self._device, self._number_bytes, self._num_layers = device, number_bytes, num_layers
        self._rebound, self._copy = rebound, copy
        self._side = SideStream(device)
        self._most_bytes = sum(memory.nbytes for chunks in divided.near for memory in chunks)
        self._target: tuple[ChunkCounts, ...] = self.counts
        self._waiting: deque[tuple[int, int]] = deque()
        self._flights: list[_Flight] = []
        self.num_failed = 0
        """Chunks that did not arrive, or found no memory."""
        self.num_bytes = 0
        """That have come to the accelerator so far."""
        self.num_waiting_bytes = 0
        """Of the last placement that was asked for, that were to come when it was."""

    @property
    def counts(self) -> tuple[ChunkCounts, ...]:
        """What lies where now."""
        near, on_cpu = self._divided.near, self._divided.num_on_cpu
        return tuple(ChunkCounts(len(chunks), num) for chunks, num in zip(near, on_cpu, strict=True))

    @property
    def placement(self) -> Placement:
        """The same as shares."""
        return self._placement_of(self.counts)

    @property
    def is_moving(self) -> bool:
        """Whether chunks are still to come."""
        return bool(self._waiting or self._flights)

    def reach(self, placement: Placement) -> Placement:
        """The nearest placement that chunks can make within the memory that they have."""
        return self._placement_of(self._find(placement))

    def begin(self, placement: Placement) -> None:
        """Go to another placement, whatever was on its way; no step is under way.

        Cost: recorded steps are recorded again at their next time.
        """
        self._drop_flights()
        self._target = self._find(placement)
        kept = [chunks[: count.near] for chunks, count in zip(self._divided.near, self._target, strict=True)]
        self._give_up(kept)
        self._waiting = deque(waiting_chunks([len(chunks) for chunks in kept], self._target))
        sizes = [chunk_bytes(plan, self._number_bytes) for plan in self._divided.plans]
        self.num_waiting_bytes = sum(sizes[place][index] for place, index in self._waiting)
        self._bind(kept)

    def advance(self, num_bytes: int) -> bool:
        """Begin copies of so many bytes, at least one chunk's, and take in those that have arrived.

        No step is under way.

        Returns:
            Whether places were bound anew.
        """
        while self._waiting and num_bytes > 0:
            num_bytes -= self._begin_next()
        if self._waiting or not self._flights or not all(flight.arrived.is_reached() for flight in self._flights):
            return False
        near = self._divided.near
        for flight in self._flights:
            near[flight.place].append(flight.memory)
            self.num_bytes += flight.memory.nbytes
        self._flights = []
        self._bind(near)
        return True

    def _find(self, placement: Placement) -> tuple[ChunkCounts, ...]:
        return find_counts(self._divided.plans, placement, number_bytes=self._number_bytes, most_bytes=self._most_bytes)

    def _placement_of(self, counts: Sequence[ChunkCounts]) -> Placement:
        return placement_of(self._divided.plans, counts, self._num_layers, number_bytes=self._number_bytes)

    def _begin_next(self) -> int:
        """Send the next chunk; returns its bytes."""
        place, index = self._waiting.popleft()
        chunk = self._divided.chunks_of(place)[index]
        try:
            self._ledger.take(Tier.GPU, OWNER, chunk.nbytes)
        except TierFullError as error:
            self._fail(place, str(error))
            return chunk.nbytes
        try:
            memory = torch.empty(chunk.nbytes, dtype=torch.uint8, device=self._device)
            self._side.wait_for_current()  # what had this memory before is done then
            with self._side.active():
                self._copy(chunk, memory)
                arrived = Mark(self._device)
                arrived.set()
        except (CopyError, RuntimeError) as error:
            self._ledger.give_up(Tier.GPU, OWNER, chunk.nbytes)
            self._fail(place, str(error))
            return chunk.nbytes
        self._flights.append(_Flight(place, memory, arrived))
        return chunk.nbytes

    def _fail(self, place: int, why: str) -> None:
        """A chunk stays where it is, and so do those behind it in its place."""
        behind = [item for item in self._waiting if item[0] == place]
        self._waiting = deque(item for item in self._waiting if item[0] != place)
        self.num_failed += 1 + len(behind)
        logger.warning("a chunk of weights stays in DRAM (%d more of its place with it): %s", len(behind), why)

    def _drop_flights(self) -> None:
        if self._flights and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # their memory may be given out again
        for flight in self._flights:
            self._ledger.give_up(Tier.GPU, OWNER, flight.memory.nbytes)
        self._flights, self._waiting = [], deque()

    def _give_up(self, kept: Sequence[Sequence[Tensor]]) -> None:
        before, after = (sum(m.nbytes for chunks in near for m in chunks) for near in (self._divided.near, kept))
        self._ledger.give_up(Tier.GPU, OWNER, before - after)

    def _bind(self, near: Sequence[Sequence[Tensor]]) -> None:
        """Compute with these chunks on the accelerator; CPU and link share the rest as the target has it."""
        num_on_cpu = []
        for plan, chunks, count in zip(self._divided.plans, near, self._target, strict=True):
            rest, wanted = len(plan.cuts.chunks) - len(chunks), len(plan.cuts.chunks) - count.near
            num_on_cpu.append(round(rest * count.on_cpu / wanted) if wanted else rest)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._rebound()
        self._divided.rebind(self._lanes, near, num_on_cpu)

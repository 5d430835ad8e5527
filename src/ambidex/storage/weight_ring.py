"""`WeightRing`: weights in host memory on their way to the accelerator, in the order in which a step uses them.

    chunk        0    1    2    3    4  …  n − 1        a lap: the chunks of a step, the same in each
    slot         0    1    2    0    1                  a chunk is copied when its slot's last one was used up

    copies     | 0 | 1 | 2 |   wait   | 3 | 4 |         on a stream of their own
    computing          | 0 | 1 |   other work           on the current stream: waits for a chunk, frees its slot

Weights do not depend on the step, so each chunk has its slot once and for all: its product may be part of a captured
graph, and so may its copy. Both ways an event keeps the order: `arrived` before a chunk is read, `used` before its slot
is written again. Nothing waits for what has not been launched yet, so no other work on the device can block it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ambidex.core.errors import InternalError
from ambidex.storage.lane_clock import LaneClock, Part
from ambidex.storage.side_stream import Mark, SideStream


class WeightRing:
    """Slots on an accelerator, and the stream that fills them.

    Args:
        num_slots: more of them let the link run on while the accelerator does other things.
        slot_bytes: of a slot, a multiple of 8.
        clock: is told how long copies and waits for them take; None: nobody is.
    """

    def __init__(
        self, num_slots: int, slot_bytes: int, *, device: torch.device, clock: LaneClock | None = None
    ) -> None:
        self._clock = clock or LaneClock()
        self.device = device
        self.slots = tuple(torch.empty(slot_bytes, dtype=torch.uint8, device=device) for _ in range(num_slots))
        self._arrived = [Mark(device) for _ in range(num_slots)]
        self._used = [Mark(device) for _ in range(num_slots)]
        self._copies = SideStream(device)
        self._lap: Lap | None = None
        self._num_sent = self._num_taken = 0
        self._was_used = [False] * num_slots

    def take(self, lap: "Lap", place: int) -> None:
        """Launch: what the current stream is given from now on finds a chunk in its slot.

        Chunks are expected in the order of their lap, each freed before the next is taken. The first begins a step, and
        one that is not next in line begins anew from there: steps may break off, or leave out the last ones.

        Cost: does not wait.
        """
        if place == 0 or lap is not self._lap or place != self._num_taken:
            self._begin(lap, place)
        with self._clock.span(Part.IDLE):
            self._arrived[lap.slot_of(place)].wait()

    def free(self, lap: "Lap", place: int) -> None:
        """What the current stream was given so far is the last use of a chunk: its slot takes the next in line.

        Raises:
            InternalError: the chunk was not taken.
        """
        if lap is not self._lap or place != self._num_taken or place >= self._num_sent:
            raise InternalError(f"chunk {place} is freed before it was taken")
        slot = lap.slot_of(place)
        self._used[slot].set()
        self._was_used[slot] = True
        self._num_taken += 1
        if self._num_sent < len(lap.chunks):
            self._send(lap)

    def settle(self) -> None:
        """What the current stream is given from now on comes behind all copies, and the next chunk begins anew."""
        if self._lap is not None and self._num_sent > self._num_taken:
            self._copies.join_current()
        self._lap = None

    def _begin(self, lap: "Lap", place: int) -> None:
        self._copies.wait_for_current()  # whatever read the slots before is done then
        self._lap = lap
        self._num_sent = self._num_taken = place
        self._was_used = [False] * len(self.slots)
        for _ in lap.chunks[place : place + len(self.slots)]:
            self._send(lap)

    def _send(self, lap: "Lap") -> None:
        chunk, slot = lap.chunks[self._num_sent], lap.slot_of(self._num_sent)
        with self._copies.active():
            if self._was_used[slot]:
                self._used[slot].wait()
            with self._clock.span(Part.COPY):
                self._copy(chunk, self.slots[slot][: chunk.numel()])
            self._arrived[slot].set()
        self._num_sent += 1

    def _copy(self, chunk: Tensor, to: Tensor) -> None:
        to.view(torch.int64).copy_(chunk.view(torch.int64), non_blocking=True)


class Lap:
    """The chunks of a step in the order of their use.

    Args:
        ring: whose slots hold each of them.
        chunks: bytes in host memory, a multiple of 8; pinned if the ring is on a GPU.
    """

    def __init__(self, ring: WeightRing, chunks: Sequence[Tensor]) -> None:
        self.ring = ring
        self.chunks = tuple(chunks)

    def slot_of(self, place: int) -> int:
        """The slot that a chunk travels to."""
        return place % len(self.ring.slots)

    def memory_of(self, place: int) -> Tensor:
        """Where a chunk's bytes are once it has been taken."""
        return self.ring.slots[self.slot_of(place)][: self.chunks[place].numel()]

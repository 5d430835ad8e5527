"""`WeightRing`: chunks arrive whole and in the order of use, however a step goes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ambidex.core.errors import InternalError
from ambidex.storage.weight_ring import Lap, WeightRing
from late_streams import late_streams

SIZES = (40, 32, 8, 64, 40, 16, 64)


def make_chunks(device: str) -> list[Tensor]:
    chunks = [torch.full((size,), place + 1, dtype=torch.uint8) for place, size in enumerate(SIZES)]
    return [chunk.pin_memory() for chunk in chunks] if device == "cuda" else chunks


def use(ring: WeightRing, lap: Lap, place: int) -> Tensor:
    """What a chunk's slot holds while it is taken."""
    ring.take(lap, place)
    seen = lap.memory_of(place).clone()
    ring.free(lap, place)
    return seen


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 7])
def test_every_chunk_is_there_when_it_is_taken(num_slots: int, device: str) -> None:
    chunks = make_chunks(device)
    ring = WeightRing(num_slots, 64, device=torch.device(device))
    whole, some = Lap(ring, chunks), Lap(ring, chunks[1::2])
    for lap, stop in ((whole, 7), (whole, 4), (whole, 7), (some, 3), (some, 1), (whole, 7)):
        for place in range(stop):
            assert torch.equal(use(ring, lap, place).cpu(), lap.chunks[place].cpu())


@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_chunks_of_steps_that_break_off_or_skip_are_there_with_late_copies(data: st.DataObject) -> None:
    with late_streams(data.draw(st.integers(0, 10**6))):
        ring = WeightRing(data.draw(st.integers(1, 4)), 64, device=torch.device("cpu"))
        laps = (Lap(ring, make_chunks("cpu")), Lap(ring, make_chunks("cpu")[::2]))
        for _ in range(4):
            lap = data.draw(st.sampled_from(laps))
            first = data.draw(st.integers(0, len(lap.chunks) - 1))
            for place in range(first, data.draw(st.integers(first, len(lap.chunks)))):
                assert torch.equal(use(ring, lap, place), lap.chunks[place])
            if data.draw(st.booleans()):
                ring.settle()


def test_late_copies_that_nobody_waits_for_are_noticed() -> None:
    """The test above would see a missing wait."""
    with late_streams(0, is_ordered=False):
        ring = WeightRing(2, 64, device=torch.device("cpu"))
        lap = Lap(ring, make_chunks("cpu"))
        seen = [torch.equal(use(ring, lap, place), lap.chunks[place]) for place in range(len(SIZES))]
    assert not all(seen)


def test_a_chunk_that_was_not_taken_cannot_be_freed() -> None:
    ring = WeightRing(2, 64, device=torch.device("cpu"))
    lap = Lap(ring, make_chunks("cpu"))
    with pytest.raises(InternalError, match="chunk 1 is freed before it was taken"):
        ring.free(lap, 1)

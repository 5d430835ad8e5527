"""Rows of requests in memory that is taken once: whoever gets it, rows are those of their request, moved or not."""

import random
import time

import pytest
import torch
from torch import Tensor

from ambidex.core.dtypes import DType
from ambidex.core.errors import InternalError, TierFullError
from ambidex.core.kv_mapping import HostLayout, KVMapping, SlowMemory
from ambidex.core.kv_spec import KVSpec
from ambidex.storage.host_memory import HostMemory
from ambidex.storage.host_rows import HostRows
from ambidex.storage.row_arena import RowArena
from ambidex.storage.row_home import IN_DRAM, RowHome
from ambidex.storage.slow_tier import SlowTier

CPU = torch.device("cpu")
SHAPE = (3, 2, 8)
DRAM = HostLayout(mapping=KVMapping.DRAM, num_near=4)


def make_arena(num_rows: int, home: RowHome = IN_DRAM) -> RowArena:
    return RowArena(SHAPE, num_rows, dtype=torch.float32, device=CPU, home=home)


def fill(rows: HostRows, length: int, *, seed: int) -> Tensor:
    """Append random rows; K and V of all that are there, [2, L, Hkv, length, D]."""
    wanted = torch.randn(2, SHAPE[0], SHAPE[1], length, SHAPE[2], generator=torch.Generator().manual_seed(seed))
    for token in range(length):
        rows.append(wanted[0, :, :, token], wanted[1, :, :, token])
    return wanted


def read(rows: HostRows) -> Tensor:
    return torch.stack((rows.k, rows.v))[:, :, :, : rows.length]


def open_filled(arena: RowArena, *capacities: int, spare: int = 0) -> tuple[list[HostRows], list[Tensor]]:
    """Requests side by side, filled but for so many rows, and their rows as `fill` gave them."""
    opened = [arena.open(capacity) for capacity in capacities]
    return opened, [fill(rows, rows.capacity - spare, seed=100 + place) for place, rows in enumerate(opened)]


def test_rows_that_are_given_back_are_given_again_and_no_memory_is_asked_for() -> None:
    """Each request once had memory of its own, which was allocated, touched and pinned anew."""
    asked: list[int] = []
    arena = make_arena(20, RowHome(DRAM, memory=HostMemory(advise=lambda part: asked.append(part.nbytes))))
    first = arena.open(20)
    places = first.k.data_ptr(), first.v.data_ptr()
    fill(first, 20, seed=0)
    for seed in range(1, 50):
        arena.close(first)
        first = arena.open(20)
        assert (first.k.data_ptr(), first.v.data_ptr()) == places
        assert first.length == 0
        wanted = fill(first, 13, seed=seed)
        assert torch.equal(read(first), wanted)
    assert len(asked) == 2


@pytest.mark.parametrize("capacity", [3, 8, 12])
def test_rows_where_another_request_had_more_or_fewer_are_their_own(capacity: int) -> None:
    arena = make_arena(20)
    (before, beside), (_, kept) = open_filled(arena, 8, 8)
    arena.close(before)
    rows = arena.open(capacity)
    wanted = fill(rows, capacity, seed=5)
    assert torch.equal(read(rows), wanted)
    assert torch.equal(read(beside), kept)
    assert all(layer.is_contiguous() for part in (rows.k, rows.v) for layer in part)


def test_the_smallest_hole_that_is_large_enough_is_taken() -> None:
    arena = make_arena(30)
    opened = [arena.open(size) for size in (9, 2, 5, 2, 12)]
    for place in (0, 2):
        arena.close(opened[place])
    assert arena.open(4).start == opened[2].start
    assert arena.open(9).start == 0
    assert arena.num_moved == 0


def test_more_rows_than_there_is_room_for_are_a_fault() -> None:
    arena = make_arena(30)
    arena.open(20)
    with pytest.raises(InternalError, match="11 rows are asked for: 20 of 30 are taken"):
        arena.open(11)
    assert arena.num_taken == 20


def test_holes_that_are_too_small_are_joined_and_rows_between_them_stay_what_they_are() -> None:
    arena = make_arena(30)
    opened, wanted = open_filled(arena, 10, 10, 10, spare=2)
    arena.close(opened[0])
    arena.close(opened[2])
    rows = arena.open(20)
    own = fill(rows, 20, seed=9)
    assert (opened[1].start, rows.start, arena.num_moved) == (0, 10, 8)
    assert torch.equal(read(opened[1]), wanted[1])
    last = fill(opened[1], 2, seed=3)
    assert torch.equal(read(opened[1]), torch.cat((wanted[1], last), 3))
    assert torch.equal(read(rows), own)
    assert torch.equal(torch.from_numpy(opened[1].keys[2].array)[:, :10], opened[1].k[2])


def test_rows_that_move_by_less_than_their_number_are_not_overwritten_on_the_way() -> None:
    arena = make_arena(23)
    opened, wanted = open_filled(arena, 1, 20)
    arena.close(opened[0])
    arena.open(3)
    assert arena.num_moved == 20
    assert torch.equal(read(opened[1]), wanted[1])


def test_the_fewest_rows_move() -> None:
    arena = make_arena(60)
    opened, wanted = open_filled(arena, 5, 20, 5, 6, 5, 10, 5, 4)
    for place in (0, 2, 4, 6):
        arena.close(opened[place])
    arena.open(10)
    assert arena.num_moved == 6
    for place in (1, 3, 5, 7):
        assert torch.equal(read(opened[place]), wanted[place])


def test_rows_of_many_requests_of_all_sizes_are_never_refused_nor_mixed_up() -> None:
    generator = random.Random(0)
    arena = make_arena(100)
    live: list[tuple[HostRows, Tensor]] = []
    for seed in range(400):
        capacity = generator.randint(1, 60)
        while arena.num_taken + capacity > arena.num_rows:
            rows, wanted = live.pop(generator.randrange(len(live)))
            assert torch.equal(read(rows), wanted)
            arena.close(rows)
        rows = arena.open(capacity)
        live.append((rows, fill(rows, generator.randint(0, capacity), seed=seed)))
    assert arena.num_moved > 0, "nothing moved: the test would prove nothing"
    for rows, wanted in live:
        assert torch.equal(read(rows), wanted)


def test_rows_that_move_in_emulated_memory_take_as_long_as_it_would() -> None:
    spec = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, dtype=DType.FP32, block_size=16)
    layout = HostLayout(mapping=KVMapping.K_DRAM_V_CXL, num_near=4, first_cxl_layer=1)
    row_bytes = 2 * 8 * 4  # of V, all heads of a layer
    slow = SlowTier(SlowMemory(latency_s=0.0, bytes_per_s=2 * 10 * row_bytes / 0.05), spec, layout, CPU)
    arena = make_arena(12, RowHome(layout, slow=slow))
    opened, _ = open_filled(arena, 1, 10)
    arena.close(opened[0])
    start = time.perf_counter()
    arena.open(2)
    assert time.perf_counter() - start >= 0.05


@pytest.mark.gpu
def test_rows_that_are_not_pinned_are_refused() -> None:
    home = RowHome(DRAM, memory=HostMemory(pin=lambda _tensor, _owner: "limit of locked memory"))
    with pytest.raises(TierFullError, match="cannot be pinned: limit of locked memory"):
        RowArena(SHAPE, 20, dtype=torch.float32, device=torch.device("cuda"), home=home)


@pytest.mark.gpu
def test_rows_on_a_gpu_are_pinned_once_and_move_as_the_device_sees_them() -> None:
    """Each request's rows were once pinned when it began and unpinned when it ended: 2 s each."""
    device, pinned = torch.device("cuda"), []
    system = HostMemory()

    def pin(tensor: Tensor, owner: object) -> str | None:
        pinned.append(tensor.nbytes)
        return system.pin(tensor, owner)

    home = RowHome(DRAM, memory=HostMemory(pin=pin))
    arena = RowArena(SHAPE, 30, dtype=torch.float32, device=device, home=home)
    opened = [arena.open(10) for _ in range(3)]
    wanted = []
    for seed, rows in enumerate(opened):
        wanted.append(torch.randn(2, 10, *SHAPE, generator=torch.Generator().manual_seed(seed)))
        for k, v in wanted[-1].transpose(0, 1).to(device):
            rows.append(k, v)
    arena.close(opened[0])
    arena.close(opened[2])
    arena.open(20)  # waits for the device
    moved = opened[1]
    for own, there, part in zip((moved.k, moved.v), (moved.k_there, moved.v_there), wanted[1], strict=True):
        assert torch.equal(own, part.permute(1, 2, 0, 3))
        assert torch.equal(there.cpu(), own)
    assert len(pinned) == 2
    assert arena.num_moved == 10

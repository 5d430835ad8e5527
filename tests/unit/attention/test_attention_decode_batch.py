"""`DecodeBatch` and `DecodeInputs`: what a decode step finds on the device."""

import dataclasses
import random

import pytest
import torch

from ambidex.attention.decode_batch import DecodeBatch
from ambidex.attention.decode_inputs import DecodeInputs, DecodeRows
from ambidex.core.ids import BlockId, RequestId, Tier
from ambidex.core.step import BlockRef, ScheduledRequest
from ambidex.kernels.cpu.native import KeyBatch
from ambidex.storage.step_stream import BlockRun

BLOCK_SIZE = 4
MAX_ROWS = 8


def make_batch(
    *windows: int | None, has_cpu_lane: bool = False, stream_share: float = 0.0, max_streamed: int = 10
) -> tuple[DecodeInputs, DecodeBatch]:
    inputs = DecodeInputs(max_rows=MAX_ROWS, max_blocks=10, windows=windows, device=torch.device("cpu"))
    return inputs, DecodeBatch(
        inputs, block_size=BLOCK_SIZE, has_cpu_lane=has_cpu_lane, stream_share=stream_share, max_streamed=max_streamed
    )


def request(name: str, start: int, ids: list[int], *, dram: int = 0, num_tokens: int = 1) -> ScheduledRequest:
    """One new token (or more) at `start`; the first `dram` blocks lie there, the others on the accelerator."""
    tiers = [Tier.DRAM if index < dram else Tier.GPU for index in range(len(ids))]
    return ScheduledRequest(
        request_id=RequestId(name),
        token_ids=(7,) * num_tokens,
        start=start,
        blocks=tuple(BlockRef(tier, BlockId(block_id)) for tier, block_id in zip(tiers, ids, strict=True)),
        is_sampled=True,
    )


def assert_describes(rows: DecodeRows, requests: list[ScheduledRequest]) -> None:
    """The rows on the device are those of the requests, then padding, after the step has extended the table."""
    rows.extend_table()
    for row, scheduled in enumerate(requests):
        ids = [block.block_id for block in scheduled.blocks]
        assert rows.block_table[row, : len(ids)].tolist() == ids, scheduled.request_id
    num = len(requests)
    assert rows.positions[:num].tolist() == [scheduled.start for scheduled in requests]
    assert rows.slots[num:].eq(-1).all()
    assert all(num_keys[num:].eq(0).all() for num_keys in rows.num_keys.values())


def test_a_step_of_two_requests_in_four_rows() -> None:
    inputs, batch = make_batch(None, 3)
    assert batch.try_prepare([request("a", 5, [8, 2]), request("b", 0, [4])], 4)
    rows = inputs.device(4)
    rows.extend_table()
    assert rows.token_ids.tolist() == [7, 7, 0, 0]
    assert rows.positions.tolist() == [5, 0, 0, 0]
    assert rows.slots.tolist() == [2 * BLOCK_SIZE + 1, 4 * BLOCK_SIZE, -1, -1]
    assert rows.block_table[0, :2].tolist() == [8, 2]
    assert rows.block_table[1, :1].tolist() == [4]
    assert (rows.first_key[None].tolist(), rows.num_keys[None].tolist()) == ([0, 0, 0, 0], [6, 1, 0, 0])
    assert (rows.first_key[3].tolist(), rows.num_keys[3].tolist()) == ([3, 0, 0, 0], [3, 1, 0, 0])
    assert batch.num_keys == {None: {Tier.GPU: 7, Tier.DRAM: 0}, 3: {Tier.GPU: 4, Tier.DRAM: 0}}
    assert batch.key_batches is None


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(request("b", 4, [1, 2], num_tokens=2), id="two new tokens"),
        pytest.param(request("b", 4, [1, 2], dram=1), id="a key in DRAM"),
        pytest.param(request("b", 8, [1, 2]), id="too few blocks"),
        pytest.param(request("b", 4, [1, 2, 3]), id="too many blocks"),
        pytest.param(request("b", 43, list(range(11))), id="longer than the table"),
    ],
)
def test_a_step_of_another_form_is_refused_and_the_next_one_is_right(bad: ScheduledRequest) -> None:
    inputs, batch = make_batch(None)
    assert not batch.try_prepare([request("a", 5, [8, 3]), bad], 2)
    good = [request("a", 5, [8, 3]), request("b", 5, [9, 6])]
    assert batch.try_prepare(good, 2)
    assert_describes(inputs.device(2), good)


def test_more_requests_than_rows_and_none_are_refused() -> None:
    _, batch = make_batch(None)
    assert not batch.try_prepare([request("a", 0, [1]), request("b", 0, [2])], 1)
    assert not batch.try_prepare([], 1)


@pytest.mark.parametrize(("start", "is_seen"), [(8, False), (6, True)])
def test_blocks_in_dram_matter_only_within_the_window(start: int, is_seen: bool) -> None:
    _, batch = make_batch(5)
    ids = list(range(start // BLOCK_SIZE + 1))
    assert batch.try_prepare([request("a", start, ids, dram=1)], 1) is not is_seen


@pytest.mark.parametrize("seed", range(20))
def test_any_course_of_requests_finds_its_tables(seed: int) -> None:
    """Requests come, grow, leave, yield, move to other blocks and change their rows and the size of the step."""
    rng = random.Random(seed)
    inputs, batch = make_batch(None)
    live: dict[str, tuple[int, list[int]]] = {}  # name -> (start, block ids)
    for step in range(60):
        if len(live) < MAX_ROWS and rng.random() < 0.3:
            start = rng.randrange(30)
            live[f"request {rng.randrange(12)}"] = (start, rng.sample(range(99), start // BLOCK_SIZE + 1))
        for name, (start, ids) in list(live.items()):
            event = rng.random()
            if event < 0.05 or start + 1 >= 40:
                del live[name]
            elif event < 0.1:
                live[name] = (start, rng.sample(range(99), len(ids)))
            else:  # one token further; several if steps of another form came between
                start = min(start + rng.choice([1, 1, 1, 1, 6]), 39)
                live[name] = (start, ids + [rng.randrange(99) for _ in range(start // BLOCK_SIZE + 1 - len(ids))])
        if rng.random() < 0.2:
            live = dict(rng.sample(sorted(live.items()), len(live)))
        requests = [request(name, start, ids) for name, (start, ids) in live.items()]
        if requests:
            num_rows = rng.choice([size for size in (1, 2, 4, MAX_ROWS) if size >= len(requests)])
            assert batch.try_prepare(requests, num_rows), f"seed {seed}, step {step}"
            assert_describes(inputs.device(num_rows), requests)


def test_a_step_that_is_prepared_and_not_computed_wrote_nothing_into_the_table() -> None:
    """Bug: the block that it was to open was taken to be there when steps of another form had come up to the next."""
    inputs, batch = make_batch(None)
    inputs.device(1).block_table.fill_(77)
    before, opening = request("a", 7, [8, 3]), request("a", 8, [8, 3, 5])
    assert batch.try_prepare([before], 1)
    assert_describes(inputs.device(1), [before])
    assert batch.try_prepare([opening], 1)
    batch.forget_step()
    behind = request("a", 12, [8, 3, 5, 6])
    assert batch.try_prepare([behind], 1)
    assert_describes(inputs.device(1), [behind])


def keys_of(batch: DecodeBatch, window: int | None) -> KeyBatch:
    assert batch.key_batches is not None
    return batch.key_batches[window]


def test_blocks_in_dram_leave_the_table_and_go_to_the_cpu_lane() -> None:
    inputs, batch = make_batch(None, 7, has_cpu_lane=True)
    assert batch.try_prepare([request("a", 13, [8, 2, 6, 3], dram=2), request("b", 2, [5])], 4)
    rows = inputs.device(4)
    rows.extend_table()
    assert rows.block_table[0, :2].tolist() == [6, 3]
    assert rows.slots.tolist() == [3 * BLOCK_SIZE + 1, 5 * BLOCK_SIZE + 2, -1, -1]
    assert (rows.first_key[None].tolist(), rows.num_keys[None].tolist()) == ([0, 0, 0, 0], [6, 3, 0, 0])
    assert (rows.first_key[7].tolist(), rows.num_keys[7].tolist()) == ([0, 0, 0, 0], [6, 3, 0, 0])
    assert batch.num_keys == {None: {Tier.GPU: 9, Tier.DRAM: 8}, 7: {Tier.GPU: 9, Tier.DRAM: 1}}  # sees 7 … 13
    assert keys_of(batch, None).num_rows == keys_of(batch, 7).num_rows == 4


def test_key_batches_serve_again_until_a_block_moves() -> None:
    _, batch = make_batch(None, has_cpu_lane=True)
    first = request("a", 13, [8, 2, 6, 3], dram=2)
    assert batch.try_prepare([first], 1)
    before = keys_of(batch, None)
    assert batch.try_prepare([dataclasses.replace(first, start=14)], 1)
    assert keys_of(batch, None) is before
    assert batch.try_prepare([request("a", 15, [8, 2, 9, 3], dram=3)], 1)
    assert keys_of(batch, None) is not before
    assert batch.num_keys == {None: {Tier.GPU: 4, Tier.DRAM: 12}}
    assert batch.try_prepare([request("b", 3, [1])], 1)
    assert batch.key_batches is None


def test_a_step_whose_newest_block_lies_in_dram_is_refused() -> None:
    _, batch = make_batch(None, has_cpu_lane=True)
    assert not batch.try_prepare([request("a", 5, [8, 2], dram=2)], 1)


def test_the_stream_lane_takes_its_share_of_the_first_blocks_in_dram() -> None:
    inputs, batch = make_batch(None, has_cpu_lane=True, stream_share=0.5)
    first = request("a", 21, [8, 2, 6, 7, 9, 3], dram=5)
    assert batch.try_prepare([first, request("b", 5, [4, 1], dram=1)], 4)
    rows = inputs.device(4)
    assert rows.num_streamed.tolist() == [2 * BLOCK_SIZE, 0, 0, 0]
    assert rows.stream_table[0, :2].tolist() == [0, 1]
    assert batch.stream_runs == (BlockRun(first=2, place=0, num=1), BlockRun(first=8, place=1, num=1))
    assert batch.num_keys == {None: {Tier.GPU: 4, Tier.DRAM: 3 * BLOCK_SIZE + BLOCK_SIZE}}
    assert batch.num_streamed == 2 * BLOCK_SIZE
    assert batch.try_prepare([request("c", 1, [5])], 4)
    assert inputs.device(4).num_streamed.eq(0).all()


def test_what_is_streamed_fits_into_the_buffers_and_travels_in_runs() -> None:
    inputs, batch = make_batch(None, has_cpu_lane=True, stream_share=1.0, max_streamed=6)
    first = request("a", 33, [8, 2, 6, 7, 9, 3, 0, 1, 5], dram=8)
    assert batch.try_prepare([first, request("b", 17, [20, 21, 22, 23, 4], dram=4)], 2)
    rows = inputs.device(2)
    assert rows.num_streamed.tolist() == [4 * BLOCK_SIZE, 2 * BLOCK_SIZE]
    assert rows.stream_table[0, :4].tolist() == [0, 1, 2, 3]
    assert rows.stream_table[1, :2].tolist() == [4, 5]
    assert batch.stream_runs == (
        BlockRun(first=2, place=0, num=1), BlockRun(first=6, place=1, num=3), BlockRun(first=20, place=4, num=2),
    )  # fmt: skip
    assert batch.num_keys[None][Tier.DRAM] == (8 + 4 - 6) * BLOCK_SIZE


def test_layers_with_windows_do_not_stream() -> None:
    inputs, batch = make_batch(None, 9, has_cpu_lane=True, stream_share=0.9)
    assert batch.try_prepare([request("a", 21, [8, 2, 6, 7, 9, 3], dram=5)], 1)
    assert inputs.device(1).num_streamed.tolist() == [0]
    assert batch.num_keys[None][Tier.DRAM] == 5 * BLOCK_SIZE

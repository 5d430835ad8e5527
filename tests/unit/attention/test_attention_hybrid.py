"""`HybridAttention`: three lanes over one context give what one attention over all of it gives."""

import random
from contextlib import nullcontext
from itertools import chain

import pytest
import torch
from tiered_world import make_model_spec

from ambidex.attention.bounded_scan import BoundedScan, collect_figures, join_lanes
from ambidex.attention.decode_batch import DecodeBatch
from ambidex.attention.decode_inputs import DecodeInputs
from ambidex.attention.handover import Handover
from ambidex.attention.hybrid import HybridAttention
from ambidex.attention.paged import PagedAttention
from ambidex.attention.scanned import ScanLane, ScannedAttention
from ambidex.attention.streamed import StreamedAttention
from ambidex.core.dtypes import DType
from ambidex.core.errors import LaneError
from ambidex.core.ids import BlockId, RequestId, Tier
from ambidex.core.kv_dtypes import parse_kv_dtypes
from ambidex.core.kv_spec import KVOrder, KVSpec
from ambidex.core.step import BlockRef, ScheduledRequest
from ambidex.kernels import dispatch
from ambidex.kernels.cpu.bounded import BoundedPool
from ambidex.kernels.cpu.native import AttentionPool, KeyBatch, ThreadPool
from ambidex.storage.kv_pool import RowKVPool
from ambidex.storage.scan_copy import ScanCopy
from ambidex.storage.step_stream import StepStream
from ambidex.storage.tiled_pool import TiledKVPool
from ambidex.storage.words import HostWords
from triton_device import INTERPRETED
from truth import assert_within_twice_plain, naive_attend, plain_int8_attend

BLOCK_SIZE, NUM_ROWS, NUM_LAYERS = 16, 4, 3
LENGTHS = (150, 3, 81)
"""Tokens of each request, its new one included; one row is padding."""
SPEC = make_model_spec((None,) * NUM_LAYERS, num_q_heads=6, num_kv_heads=2, head_dim=32)
CPU = torch.device("cpu")
DTYPE = torch.float16


class World:
    """Random contexts, cut at random into blocks on both tiers; the newest block is on the accelerator's."""

    def __init__(self, *, stream_share: float, max_mass: float | None = None, kv_dtype: str = "fp16") -> None:
        rng = random.Random(3)
        generator = torch.Generator().manual_seed(0)
        rows = KVSpec.of(SPEC, dtype=DType.FP16, block_size=BLOCK_SIZE)
        dtypes = parse_kv_dtypes(kv_dtype)
        assert dtypes is not None
        tiles = KVSpec.of(SPEC, dtype=dtypes, block_size=BLOCK_SIZE, order=KVOrder.TILES)
        self.gpu = RowKVPool(rows, Tier.GPU, 24, device=CPU, pinned=False)
        self.dram = TiledKVPool(tiles, Tier.DRAM, 24, native=AttentionPool(ThreadPool(2)), pinned=False)
        pools = {Tier.GPU: self.gpu, Tier.DRAM: self.dram}
        for pool in pools.values():
            for part in pool.tensors:
                part.fill_(torch.nan if part.dtype.is_floating_point else 77)
        free = {tier: rng.sample(range(24), 24) for tier in pools}
        self.contexts, self.requests = [], []  # K and V, each [L, Hkv, S, D]
        for index, length in enumerate(LENGTHS):
            shape = (NUM_LAYERS, 2, -(-length // BLOCK_SIZE) * BLOCK_SIZE, 32)
            k, v = (torch.randn(shape, generator=generator).to(DTYPE) for _ in range(2))
            blocks = []
            for start in range(0, length, BLOCK_SIZE):
                is_last = start + BLOCK_SIZE >= length
                tier = Tier.GPU if is_last else rng.choice([Tier.GPU, Tier.DRAM, Tier.DRAM])
                blocks.append(BlockRef(tier, BlockId(free[tier].pop())))
                part = slice(start, start + BLOCK_SIZE)
                pools[tier].write_block(blocks[-1].block_id, k[:, :, part], v[:, :, part])
                k[:, :, part], v[:, :, part] = pools[tier].read_block(blocks[-1].block_id)  # as it was rounded
            self.contexts.append((k[:, :, :length], v[:, :, :length]))
            self.requests.append(
                ScheduledRequest(
                    request_id=RequestId(str(index)), token_ids=(0,), start=length - 1, blocks=tuple(blocks),
                    is_sampled=True,
                )
            )  # fmt: skip
        self.inputs = DecodeInputs(max_rows=NUM_ROWS, max_blocks=12, windows=(None,), device=CPU)
        self.batch = DecodeBatch(
            self.inputs, block_size=BLOCK_SIZE, has_cpu_lane=True, stream_share=stream_share, max_streamed=24,
            scans=None if max_mass is None else lambda _: True, scan_share=stream_share, max_scanned=24,
        )  # fmt: skip
        self.stream = StepStream(self.dram, 24, CPU, HostWords(), row_dtype=DTYPE)
        device = self.inputs.device(NUM_ROWS)
        self.bounded, scanned = None, None
        if max_mass is not None:
            native = BoundedPool(self.dram.native.threads)
            copy = ScanCopy(self.dram, native)
            self.bounded = BoundedScan(SPEC, {Tier.DRAM: copy}, native, max_mass=max_mass, min_blocks=1)
            if stream_share:
                scanned = ScannedAttention(ScanLane(SPEC, copy, CPU, max_mass=max_mass, max_blocks=24), device)
        self.handover = Handover(SPEC, self.dram, NUM_ROWS, dtype=DTYPE, device=CPU, bounded=self.bounded)
        self.attention = HybridAttention(
            PagedAttention(SPEC, self.gpu, device),
            self.handover,
            StreamedAttention(SPEC, self.stream, device) if stream_share and max_mass is None else None,
            is_bounded=max_mass is not None,
            scanned=scanned,
        )
        self.q = torch.randn(NUM_LAYERS, NUM_ROWS, 6, 32, generator=generator).to(DTYPE)

    def new_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the new tokens, with a row of padding."""
        k, v = (
            torch.stack([context[part][layer, :, -1] for context in self.contexts] + [torch.zeros(2, 32, dtype=DTYPE)])
            for part in (0, 1)
        )
        return k, v


def make_empty_batch() -> KeyBatch:
    """Queries that see no key."""
    none = torch.zeros(NUM_ROWS, dtype=torch.int64)
    return KeyBatch(
        none[:0], torch.zeros(NUM_ROWS + 1, dtype=torch.int64), none, none, torch.arange(NUM_ROWS + 1),
        block_size=BLOCK_SIZE,
    )  # fmt: skip


@pytest.mark.parametrize("stream_share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("kv_dtype", ["fp16", "int8", "int4", "k=int8,v=int4"])
def test_three_lanes_give_attention_over_the_whole_context(kv_dtype: str, stream_share: float) -> None:
    world = World(stream_share=stream_share, kv_dtype=kv_dtype)
    assert world.batch.try_prepare(world.requests, NUM_ROWS)
    world.inputs.device(NUM_ROWS).extend_table()
    assert (world.batch.num_streamed > 0) is (stream_share > 0)
    assert world.batch.key_batches is not None
    for _ in range(2):  # steps
        world.handover.reset()
        world.stream.start(world.batch.stream_runs)
        with world.handover.answering([world.batch.key_batches[None]] * NUM_LAYERS):
            outs = [
                world.attention.attend(layer, world.q[layer], *world.new_rows(layer)) for layer in range(NUM_LAYERS)
            ]
        world.stream.finish()
        for layer, out in enumerate(outs):
            assert out[len(LENGTHS) :].eq(0).all()
            for row, (k, v) in enumerate(world.contexts):
                q = world.q[layer, row : row + 1]
                visible = torch.ones(1, LENGTHS[row], dtype=torch.bool)
                truth, _ = naive_attend(q.double(), k[layer].double(), v[layer].double(), 32**-0.5, visible)
                plain, _ = naive_attend(q, k[layer], v[layer], 32**-0.5, visible)
                if kv_dtype != "fp16":  # the CPU lane rounds queries and probabilities then
                    plain = plain_int8_attend(q, k[layer], v[layer], 32**-0.5, visible)
                assert_within_twice_plain(out[row : row + 1], plain, truth, num_roundings=4)


@pytest.mark.parametrize("kv_dtype", ["fp16", "int8"])
def test_keys_that_all_travel_need_no_cpu_lane(kv_dtype: str) -> None:
    worlds = [World(stream_share=1.0, kv_dtype=kv_dtype) for _ in range(2)]
    outs: list[list[torch.Tensor]] = []
    for world, has_lane in zip(worlds, (True, False), strict=True):
        assert world.batch.try_prepare(world.requests, NUM_ROWS)
        world.inputs.device(NUM_ROWS).extend_table()
        assert not world.batch.has_cpu_keys
        assert world.batch.key_batches is not None
        attention = world.attention
        if not has_lane:
            device = world.inputs.device(NUM_ROWS)
            streamed = StreamedAttention(SPEC, world.stream, device)
            attention = HybridAttention(PagedAttention(SPEC, world.gpu, device), None, streamed)
        world.handover.reset()
        world.stream.start(world.batch.stream_runs)
        batches = [world.batch.key_batches[None]] * NUM_LAYERS
        with world.handover.answering(batches) if has_lane else nullcontext():
            outs.append([attention.attend(i, world.q[i], *world.new_rows(i)) for i in range(NUM_LAYERS)])
        world.stream.finish()
    for with_lane, alone in zip(*outs, strict=True):
        torch.testing.assert_close(alone, with_lane, rtol=2e-3, atol=2e-3)
        assert alone[len(LENGTHS) :].eq(0).all()


@pytest.mark.parametrize("stream_share", [0.0, 0.4, 0.99])
def test_cpu_lane_has_keys_unless_all_travel(stream_share: float) -> None:
    world = World(stream_share=stream_share)
    assert world.batch.try_prepare(world.requests, NUM_ROWS)
    assert world.batch.has_cpu_keys


@pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=INTERPRETED)])
@pytest.mark.parametrize("max_mass", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("scan_share", [0.0, 0.4, 1.0])
def test_lanes_that_leave_out_keys_stay_within_what_they_state_together(
    scan_share: float, max_mass: float, name: str
) -> None:
    world = World(stream_share=scan_share, max_mass=max_mass)
    world.q *= 3  # scores that differ: else hardly a key may be left out
    assert world.bounded is not None
    assert world.batch.try_prepare(world.requests, NUM_ROWS)
    assert world.batch.is_scanned
    assert not world.batch.stream_runs
    world.inputs.device(NUM_ROWS).extend_table()
    assert world.batch.key_batches is not None
    world.bounded.make_missing(Tier.DRAM, world.batch.dram_ids)
    world.handover.scan([world.batch.key_batches[None]] * NUM_LAYERS)
    world.handover.reset()
    with dispatch.override("attend_scanned", name), world.handover.answering([make_empty_batch()] * NUM_LAYERS):
        world.attention.begin()
        outs = [world.attention.attend(layer, world.q[layer], *world.new_rows(layer)) for layer in range(NUM_LAYERS)]
        world.attention.end()
    assert 0 <= world.handover.num_last <= NUM_LAYERS
    figures = join_lanes(world.handover.figures.numpy(), world.handover.lane_figures.numpy())
    num_dram = world.batch.num_keys[None][Tier.DRAM] + world.batch.num_streamed
    total = collect_figures({Tier.DRAM: figures}, {Tier.DRAM: num_dram}, sum(LENGTHS), world.handover.out_norms.numpy())
    assert total.max_dropped_mass <= max_mass * (1 + 1e-5)
    assert max_mass > 0 or total.attended_share == 1
    if max_mass > 0.1:
        assert total.attended_share < 0.9, "hardly anything is left out: nothing is proved"
        assert total.max_dropped_mass > 0.05
    for layer, out in enumerate(outs):
        assert out[len(LENGTHS) :].eq(0).all()
        for row, (k, v) in enumerate(world.contexts):
            q = world.q[layer, row : row + 1].double()
            visible = torch.ones(1, LENGTHS[row], dtype=torch.bool)
            truth, _ = naive_attend(q, k[layer].double(), v[layer].double(), 32**-0.5, visible)
            error = (out[row].double() - truth[0]).norm(dim=-1)
            mass, longest = (torch.from_numpy(figures[layer, row, :, i]).double() for i in (1, 2))
            assert (error <= mass * (longest + out[row].double().norm(dim=-1)) + 4e-3 * (1 + longest)).all()


def test_steps_that_scan_name_blocks_of_the_pool_and_the_others_places_of_the_buffer() -> None:
    world = World(stream_share=0.4)
    seen: list[int] = []
    turns = iter([True, False, True])

    def scans(num_keys: int) -> bool:
        seen.append(num_keys)
        return next(turns)

    batch = DecodeBatch(
        world.inputs, block_size=BLOCK_SIZE, has_cpu_lane=True, stream_share=0.4, max_streamed=24, scans=scans,
        scan_share=0.8, max_scanned=5,
    )  # fmt: skip
    ids = [[block.block_id for block in request.blocks if block.tier is Tier.DRAM] for request in world.requests]
    table, num = world.inputs.device(NUM_ROWS).stream_table, world.inputs.device(NUM_ROWS).num_streamed
    for is_scanned in (True, False, True):
        assert batch.try_prepare(world.requests, NUM_ROWS)
        assert batch.is_scanned is is_scanned
        assert batch.key_batches is not None
        nums = [count // BLOCK_SIZE for count in num.tolist()]
        assert sum(nums) == batch.num_streamed // BLOCK_SIZE > 0
        taken = [table[row, : nums[row]].tolist() for row in range(len(ids))]
        if is_scanned:
            assert sum(nums) <= 5
            assert taken == [blocks[: nums[row]] for row, blocks in enumerate(ids)]
            assert not batch.stream_runs
        else:
            assert list(chain.from_iterable(taken)) == list(range(sum(nums)))
            assert sum(run.num for run in batch.stream_runs) == sum(nums)
        assert batch.num_keys[None][Tier.DRAM] == sum(map(len, ids)) * BLOCK_SIZE - batch.num_streamed
    assert seen == [sum(map(len, ids)) * BLOCK_SIZE] * 3


def test_a_step_that_may_not_see_dram_asks_no_rule_and_leaves_the_last_one_as_it_was() -> None:
    world = World(stream_share=0.0)
    batch = DecodeBatch(
        world.inputs, block_size=BLOCK_SIZE, has_cpu_lane=True, scans=lambda _: pytest.fail("a rule counts its steps")
    )
    positions = world.inputs.device(NUM_ROWS).positions.clone()
    assert not batch.try_prepare(world.requests, NUM_ROWS, may_see_dram=False)
    assert torch.equal(world.inputs.device(NUM_ROWS).positions, positions)
    assert batch.key_batches is None
    alone = [request for request in world.requests if all(block.tier is Tier.GPU for block in request.blocks)]
    assert batch.try_prepare(alone, NUM_ROWS, may_see_dram=False)


def test_a_step_that_breaks_off_ends_the_waits_for_what_the_accelerator_saw() -> None:
    world = World(stream_share=0.0, max_mass=0.02)
    assert world.bounded is not None
    assert world.batch.try_prepare(world.requests, NUM_ROWS)
    assert world.batch.key_batches is not None
    world.bounded.make_missing(Tier.DRAM, world.batch.dram_ids)
    world.handover.scan([world.batch.key_batches[None]] * NUM_LAYERS)
    world.handover.reset()
    world.handover.send(0, world.q[0])
    world.handover.show_near(0, torch.full((NUM_ROWS, 6), 1000.0), None)
    world.handover.release()
    world.handover.answer([make_empty_batch()] * NUM_LAYERS)
    # So much lies elsewhere that all may be left out; what is waited for in vain would not count.
    assert world.handover.figures[..., 4].eq(0).all()


def test_a_step_that_dies_while_it_is_launched_ends_the_cpu_lane_and_the_next_is_right() -> None:
    world = World(stream_share=0.0)
    assert world.batch.try_prepare(world.requests, NUM_ROWS)
    world.inputs.device(NUM_ROWS).extend_table()
    assert world.batch.key_batches is not None
    batches = [world.batch.key_batches[None]] * NUM_LAYERS
    world.handover.reset()

    def die() -> None:
        with world.handover.answering(batches):
            world.attention.attend(0, world.q[0], *world.new_rows(0))
            raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        die()
    world.handover.reset()
    with world.handover.answering(batches):
        out = world.attention.attend(0, world.q[0], *world.new_rows(0))
        for layer in (1, 2):
            world.attention.attend(layer, world.q[layer], *world.new_rows(layer))
    assert out.isfinite().all()


def test_an_accelerator_that_never_asks_is_a_lane_error_and_its_waits_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ambidex.attention.handover.WAIT_LIMIT_S", 0.05)
    world = World(stream_share=0.0)
    assert world.batch.try_prepare(world.requests, NUM_ROWS)
    assert world.batch.key_batches is not None
    world.handover.reset()
    with pytest.raises(LaneError, match="no queries of layer 0"):
        world.handover.answer([world.batch.key_batches[None]] * NUM_LAYERS)
    world.handover.receive(2)  # would wait for ever if the word were not set

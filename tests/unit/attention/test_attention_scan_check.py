"""`ScanCheck`: which answers are computed again, from which keys, and what of an error counts."""

import numpy as np
import pytest
import torch
from torch import Tensor

from ambidex.attention.scan_check import AnswerCopies, ScanCheck
from ambidex.core.dtypes import DType
from ambidex.core.errors import BoundError
from ambidex.core.ids import BlockId, RequestId, Tier
from ambidex.core.kv_spec import KVSpec
from ambidex.core.step import BlockRef, ScheduledRequest
from ambidex.storage.kv_pool import RowKVPool
from truth import naive_attend
from unit_specs import make_spec

NUM_LAYERS, NUM_HEADS, BLOCK_SIZE = 3, 6, 16
SPEC = make_spec(windows=(None,) * NUM_LAYERS, num_q_heads=NUM_HEADS)
LENGTHS = (70, 33)
CPU = torch.device("cpu")
NONE = np.zeros((NUM_LAYERS, len(LENGTHS), NUM_HEADS))


class World:
    """Requests whose blocks lie on both tiers by turns, and their exact answers."""

    def __init__(self, dtype: DType = DType.FP32) -> None:
        generator = torch.Generator().manual_seed(0)
        spec = KVSpec.of(SPEC, dtype=dtype, block_size=BLOCK_SIZE)
        self.pools = {tier: RowKVPool(spec, tier, 8, device=CPU, pinned=False) for tier in (Tier.GPU, Tier.DRAM)}
        for pool in self.pools.values():
            pool.k.fill_(torch.nan)
            pool.v.fill_(torch.nan)
        self.copies = AnswerCopies(SPEC, len(LENGTHS), dtype=torch.float32, device=CPU)
        self.requests: list[ScheduledRequest] = []
        free = {Tier.GPU: [5, 0, 3, 2, 7, 1], Tier.DRAM: [6, 4, 1, 0, 2, 3]}
        for row, length in enumerate(LENGTHS):
            k, v = (torch.randn(NUM_LAYERS, 2, length, 8, generator=generator) for _ in range(2))
            k, v = (part.to(self.pools[Tier.GPU].k.dtype).float() for part in (k, v))
            q = torch.randn(NUM_LAYERS, NUM_HEADS, 8, generator=generator)
            blocks = []
            for start in range(0, length, BLOCK_SIZE):
                tier = (Tier.DRAM, Tier.GPU)[start // BLOCK_SIZE % 2]
                blocks.append(BlockRef(tier, BlockId(free[tier].pop())))
                part = slice(start, min(start + BLOCK_SIZE, length))
                for pool, rows in ((self.pools[tier].k, k), (self.pools[tier].v, v)):
                    pool[:, :, blocks[-1].block_id, : part.stop - part.start] = rows[:, :, part]
            self.requests.append(
                ScheduledRequest(
                    request_id=RequestId(f"r{row}"), token_ids=(0,), start=length - 1, blocks=tuple(blocks),
                    is_sampled=True,
                )
            )  # fmt: skip
            for layer in range(NUM_LAYERS):
                self.copies.q[layer, row] = q[layer]
                self.copies.out[layer, row] = attend(q[layer], k[layer], v[layer])

    def check(self, every: int, near_tier: Tier | None = None) -> ScanCheck:
        return ScanCheck(SPEC, self.pools, every=every, near_tier=near_tier)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    visible = torch.ones(1, k.shape[1], dtype=torch.bool)
    return naive_attend(q[None].double(), k.double(), v.double(), 8**-0.5, visible)[0][0].float()


@pytest.mark.parametrize("near_tier", [None, Tier.GPU])
@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP16])
def test_exact_answers_are_found_exact(dtype: DType, near_tier: Tier | None) -> None:
    world = World(dtype)
    num, error = world.check(1, near_tier).check(world.requests, (0, 1), world.copies, NONE)
    assert num == NUM_LAYERS * len(LENGTHS) * NUM_HEADS
    assert 0 < error < 1e-6


def test_every_layer_row_and_head_comes_up_in_turn() -> None:
    world, every = World(), 5
    for wrong in np.ndindex(NONE.shape):
        check, (layer, row, head) = world.check(every), wrong
        world.copies.out[layer, row, head, 0] += 0.1
        place = rf"layer {layer}, token {LENGTHS[row] - 1} of request r{row}, head {head}: .* by 0\.1, .* bound is 0 "

        def run(check: ScanCheck = check) -> None:
            for _ in range(every):
                assert check.check(world.requests, (0, 1), world.copies, NONE)[0] in (7, 8)

        with pytest.raises(BoundError, match=place):
            run()
        world.copies.out[layer, row, head, 0] -= 0.1


def test_one_of_so_many_is_looked_at_and_rows_that_were_not_scanned_are_not() -> None:
    world = World()
    check = world.check(61)
    nums = [check.check(world.requests, (1,), world.copies, NONE)[0] for _ in range(61)]
    assert sum(nums) == NUM_LAYERS * NUM_HEADS
    assert max(nums) == 1
    world.copies.out[:, 0] = torch.nan
    assert world.check(1).check(world.requests, (1,), world.copies, NONE)[0] == NUM_LAYERS * NUM_HEADS
    assert world.check(1).check(world.requests, (), world.copies, NONE) == (0, 0.0)


def test_an_error_within_its_bound_is_told_and_one_above_it_or_no_number_is_not_allowed() -> None:
    world = World()
    world.copies.out[1, 0, 2, 3] += 0.5
    bounds = np.full_like(NONE, 0.51)
    _, error = world.check(1).check(world.requests, (0, 1), world.copies, bounds)
    assert error == pytest.approx(0.5, abs=1e-5)
    bounds[1, 0, 2] = 0.49
    with pytest.raises(BoundError, match=r"step 1, layer 1, token 69 of request r0, head 2: .* by 0\.5"):
        world.check(1).check(world.requests, (0, 1), world.copies, bounds)
    world.copies.out[1, 0, 2, 3] = torch.nan
    with pytest.raises(BoundError, match="by nan"):
        world.check(1).check(world.requests, (0, 1), world.copies, bounds)


def test_a_request_whose_cache_holds_no_number_is_left_to_its_logits() -> None:
    world = World()
    block = world.requests[0].blocks[0]
    world.pools[block.tier].k[:, :, block.block_id, 3] = torch.nan
    world.copies.out[:, 0] = torch.nan
    num, _ = world.check(1).check(world.requests, (0, 1), world.copies, NONE)
    assert num == NUM_LAYERS * NUM_HEADS


def test_rounding_is_allowed_for_where_a_lane_rounds() -> None:
    """Weights of 16 bits on the accelerator; on a CPU in the newest block alone, which lies last."""
    errors = {}
    for near_tier in (None, Tier.GPU):
        world = World(DType.BF16)
        allowed = [
            world.check(1, near_tier)._attend_all(world.requests[0], layer, head, world.copies.q[layer, 0, head])[1]
            for layer in range(NUM_LAYERS)
            for head in range(NUM_HEADS)
        ]
        errors[near_tier] = max(allowed)
    longest = 5.0
    assert 2e-4 < errors[None] < errors[Tier.GPU] < 2 * 2**-8 * longest

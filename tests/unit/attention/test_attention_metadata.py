"""How `build_step` cuts a step."""

from collections.abc import Collection

import torch

from ambidex.attention.metadata import OldKeys, StepAttention, build_step
from ambidex.core.ids import BlockId, RequestId, Tier
from ambidex.core.step import BlockRef, ScheduledRequest

CPU = torch.device("cpu")


def scheduled(start: int, num_tokens: int, *blocks: tuple[Tier, int]) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=RequestId("r"),
        token_ids=(0,) * num_tokens,
        start=start,
        blocks=tuple(BlockRef(tier, BlockId(block_id)) for tier, block_id in blocks),
        is_sampled=False,
    )


def build(*requests: ScheduledRequest, window: int | None = None, reads_own: Collection[Tier] = ()) -> StepAttention:
    devices = {Tier.GPU: CPU, Tier.DRAM: CPU}
    return build_step(requests, block_size=4, windows=(window,), devices=devices, reads_own=reads_own)


def old_keys(step: StepAttention, tier: Tier) -> OldKeys:
    (view,) = step.views.values()
    (keys,) = view.old[tier]
    return keys


# The request of the module's picture: start 10, three new tokens.
PICTURE = scheduled(10, 3, (Tier.GPU, 7), (Tier.DRAM, 2), (Tier.GPU, 4), (Tier.GPU, 5))


def test_build_step_sorts_old_blocks_by_tier_and_cuts_unwritten_rows() -> None:
    step = build(PICTURE)
    gpu, dram = old_keys(step, Tier.GPU), old_keys(step, Tier.DRAM)
    assert gpu.block_ids.tolist() == [7, 4]
    assert gpu.keys == slice(0, 6)
    assert gpu.mask is None
    assert dram.block_ids.tolist() == [2]
    assert dram.keys == slice(0, 4)


def test_build_step_maps_new_rows_to_slots_by_tier() -> None:
    step = build(scheduled(3, 3, (Tier.GPU, 7), (Tier.DRAM, 2)))
    gpu, dram = step.new_rows
    assert gpu.rows is not None
    assert dram.rows is not None
    assert (gpu.tier, gpu.rows.tolist(), gpu.slots.tolist()) == (Tier.GPU, [0], [31])
    assert (dram.tier, dram.rows.tolist(), dram.slots.tolist()) == (Tier.DRAM, [1, 2], [8, 9])


def test_build_step_when_all_new_rows_go_to_one_tier_picks_none() -> None:
    (new,) = build(PICTURE).new_rows
    assert new.rows is None
    assert new.slots.tolist() == [18, 19, 20]


def test_build_step_with_window_leaves_out_whole_blocks_before_it() -> None:
    step = build(scheduled(10, 1, (Tier.GPU, 1), (Tier.GPU, 5), (Tier.GPU, 3)), window=4)  # sees keys 7 … 10
    gpu = old_keys(step, Tier.GPU)
    assert gpu.block_ids.tolist() == [5, 3]
    assert gpu.keys == slice(3, 6)
    assert gpu.mask is None


def test_build_step_with_window_leaves_out_queries_that_see_no_old_key() -> None:
    step = build(scheduled(4, 6, (Tier.GPU, 1), (Tier.GPU, 5), (Tier.GPU, 3)), window=3)  # query 4 sees 2, 3; 5 sees 3
    gpu = old_keys(step, Tier.GPU)
    assert gpu.rows == slice(0, 2)
    assert gpu.keys == slice(2, 4)
    assert gpu.mask is not None
    assert gpu.mask.tolist() == [[True, True], [False, True]]


def test_build_step_with_window_of_one_token_reads_no_old_keys() -> None:
    (view,) = build(PICTURE, window=1).views.values()
    assert view.old == {Tier.GPU: (), Tier.DRAM: ()}


def test_build_step_with_consecutive_block_ids_offers_a_run() -> None:
    assert old_keys(build(scheduled(8, 1, (Tier.GPU, 5), (Tier.GPU, 6), (Tier.GPU, 0))), Tier.GPU).run == slice(5, 7)
    assert old_keys(build(scheduled(8, 1, (Tier.GPU, 6), (Tier.GPU, 5), (Tier.GPU, 0))), Tier.GPU).run is None


def test_build_step_with_window_shorter_than_a_chunk_bands_the_chunk() -> None:
    (view,) = build(scheduled(0, 3, (Tier.GPU, 0)), window=2).views.values()
    assert view.own is not None
    (chunk,) = view.own.chunks
    assert chunk.mask is not None
    assert chunk.mask.tolist() == [[True, False, False], [True, True, False], [False, True, True]]


def test_build_step_places_requests_behind_each_other() -> None:
    step = build(scheduled(4, 1, (Tier.GPU, 0), (Tier.GPU, 1)), scheduled(4, 3, (Tier.GPU, 2), (Tier.GPU, 3)))
    (view,) = step.views.values()
    assert step.num_tokens == 4
    assert [keys.rows for keys in view.old[Tier.GPU]] == [slice(0, 1), slice(1, 4)]
    assert [keys.block_ids.tolist() for keys in view.old[Tier.GPU]] == [[0], [2]]
    assert view.own is not None
    assert [chunk.rows for chunk in view.own.chunks] == [slice(1, 4)]
    assert view.own.single_rows is not None
    assert view.own.single_rows.tolist() == [0]


def test_build_step_counts_a_single_new_token_among_the_old_keys_of_a_tier_that_reads_it() -> None:
    step = build(scheduled(5, 1, (Tier.GPU, 0), (Tier.DRAM, 1)), reads_own={Tier.DRAM}, window=3)  # sees keys 3, 4, 5
    (view,) = step.views.values()
    assert view.own is None
    assert (old_keys(step, Tier.GPU).keys, old_keys(step, Tier.DRAM).keys) == (slice(3, 4), slice(0, 2))
    assert view.num_keys == {Tier.GPU: 1, Tier.DRAM: 2}


def test_build_step_never_reads_own_keys_of_a_chunk_or_of_another_tier_from_a_pool() -> None:
    step = build(
        scheduled(5, 2, (Tier.GPU, 0), (Tier.DRAM, 1)),
        scheduled(4, 1, (Tier.GPU, 2), (Tier.GPU, 3)),
        reads_own={Tier.DRAM},
    )
    (view,) = step.views.values()
    assert [keys.keys for keys in view.old[Tier.DRAM]] == [slice(0, 1)]
    assert [keys.keys for keys in view.old[Tier.GPU]] == [slice(0, 4), slice(0, 4)]
    assert view.num_keys == {Tier.GPU: 8 + 3, Tier.DRAM: 1}


def test_build_step_of_single_tokens_alone_says_so() -> None:
    (view,) = build(scheduled(4, 1, (Tier.GPU, 2), (Tier.GPU, 3)), scheduled(0, 1, (Tier.GPU, 4))).views.values()
    assert view.own is not None
    assert view.own.all_are_single
    assert view.own.chunks == ()

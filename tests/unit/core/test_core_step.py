from ambidex.core.ids import BlockId, MoveId, RequestId, Tier
from ambidex.core.step import BlockMove, BlockRef, ScheduledRequest, StepPlan

CHUNK = ScheduledRequest(request_id=RequestId("a"), token_ids=(1, 2), start=0, blocks=(), is_sampled=False)
MOVE = BlockMove(move_id=MoveId(0), source=BlockRef(Tier.GPU, BlockId(0)), target=BlockRef(Tier.DRAM, BlockId(0)))


def test_num_tokens_sums_over_requests() -> None:
    assert StepPlan(requests=(CHUNK, CHUNK)).num_tokens == 4


def test_plan_is_empty_only_with_nothing_to_compute_move_or_forget() -> None:
    assert StepPlan().is_empty
    assert not StepPlan(requests=(CHUNK,)).is_empty
    assert not StepPlan(moves=(MOVE,)).is_empty
    assert not StepPlan(finished_requests=(RequestId("a"),)).is_empty

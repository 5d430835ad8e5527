from ambidex.core.ids import BlockId, MoveId, RequestId, Tier
from ambidex.core.step import BlockMove, BlockRef, ScheduledRequest, StepPlan, StepResult
from ambidex.runner.host_blocks import HostIds, MergedExecutor

ONE = RequestId("one")


def ref(tier: Tier, block_id: int) -> BlockRef:
    return BlockRef(tier, BlockId(block_id))


def plan(blocks: tuple[BlockRef, ...], moves: tuple[BlockMove, ...] = ()) -> StepPlan:
    request = ScheduledRequest(request_id=ONE, token_ids=(1,), start=0, blocks=blocks, is_sampled=True)
    return StepPlan(requests=(request,), moves=moves)


def test_spilled_blocks_come_behind_those_in_dram() -> None:
    merged = HostIds(5).merge(plan((ref(Tier.CXL, 2), ref(Tier.DRAM, 2), ref(Tier.GPU, 2))))
    assert merged.requests[0].blocks == (ref(Tier.DRAM, 7), ref(Tier.DRAM, 2), ref(Tier.GPU, 2))


def test_moves_name_blocks_of_the_pool() -> None:
    move = BlockMove(move_id=MoveId(3), source=ref(Tier.DRAM, 4), target=ref(Tier.CXL, 0))
    assert HostIds(5).merge(plan((), (move,))).moves == (
        BlockMove(move_id=MoveId(3), source=ref(Tier.DRAM, 4), target=ref(Tier.DRAM, 5)),
    )


def test_table_that_did_not_change_stays_the_same_object() -> None:
    ids, blocks = HostIds(5), (ref(Tier.CXL, 0),)
    first = ids.merge(plan(blocks)).requests[0].blocks
    assert ids.merge(plan(blocks)).requests[0].blocks is first
    assert ids.merge(plan((ref(Tier.CXL, 1),))).requests[0].blocks == (ref(Tier.DRAM, 6),)


def test_requests_that_ended_are_forgotten() -> None:
    ids = HostIds(5)
    ids.merge(plan((ref(Tier.CXL, 0),)))
    ids.merge(StepPlan(finished_requests=(ONE,)))
    assert not ids._tables


def test_executor_and_launch_are_handed_merged_plans() -> None:
    seen: list[StepPlan] = []

    class Steps:
        def execute(self, plan: StepPlan) -> StepResult:
            seen.append(plan)
            return StepResult()

    merged = MergedExecutor(Steps(), HostIds(5))
    merged.execute(plan((ref(Tier.CXL, 0),)))
    merged.before(seen.append)(plan((ref(Tier.CXL, 1),)))
    assert [step.requests[0].blocks for step in seen] == [(ref(Tier.DRAM, 5),), (ref(Tier.DRAM, 6),)]

"""KV bookkeeping under random traffic: every tier conserves its blocks, whatever moves, fails or is cancelled."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ambidex.core.ids import RequestId, Tier
from ambidex.core.regions import Regions
from ambidex.core.step import BlockMove
from ambidex.kv.manager import KVLease, KVManager
from ambidex.kv.residency import Residency, share_fairly


class KVTraffic(RuleBasedStateMachine):
    """Leases open, grow, move and end in any order; moves end late, in any order, well or badly."""

    @initialize(
        gpu=st.integers(0, 6),
        dram=st.integers(0, 8),
        block_size=st.integers(1, 3),
        sink=st.integers(0, 4),
        recent=st.none() | st.integers(0, 6),
    )
    def start(self, gpu: int, dram: int, block_size: int, sink: int, recent: int | None) -> None:
        regions = Regions(block_size=block_size, num_sink_tokens=sink, recent_window=recent)
        self.capacities = {Tier.GPU: gpu, Tier.DRAM: dram + (gpu == 0)}
        self.kv = KVManager(self.capacities, regions)
        self.lens: dict[KVLease, int] = {}
        self.moves: list[BlockMove] = []
        self.num_opened = 0

    @rule()
    def open(self) -> None:
        self.lens[self.kv.open(RequestId(str(self.num_opened)))] = 0
        self.num_opened += 1

    @precondition(lambda self: self.lens)
    @rule(data=st.data(), num_tokens=st.integers(1, 9), num_more=st.integers(0, 5))
    def extend(self, data: st.DataObject, num_tokens: int, num_more: int) -> None:
        lease = data.draw(st.sampled_from(list(self.lens)))
        length = self.lens[lease] + num_tokens
        num_missing, num_free = self.kv.num_missing_blocks(lease, length), self.kv.num_free_blocks
        before = self.kv.table(lease, self.lens[lease])
        assert self.kv.try_extend(lease, length, num_known_tokens=length + num_more) == (num_missing <= num_free)
        if num_missing <= num_free:
            self.lens[lease] = length
            assert self.kv.table(lease, length)[: len(before)] == before
        else:
            assert (self.kv.table(lease, self.lens[lease]), self.kv.num_free_blocks) == (before, num_free)

    @precondition(lambda self: self.lens)
    @rule()
    def demote(self) -> None:
        moves = self.kv.begin_demotions(self.lens)
        sources = {move.source for move in self.moves}
        assert all(move.source.tier is Tier.GPU and move.target.tier is Tier.DRAM for move in moves)
        assert not sources & {move.source for move in moves}
        self.moves.extend(moves)

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), is_failed=st.booleans())
    def end_move(self, data: st.DataObject, is_failed: bool) -> None:
        move = self.moves.pop(data.draw(st.integers(0, len(self.moves) - 1)))
        self.kv.finish_moves(*(((), (move.move_id,)) if is_failed else ((move.move_id,), ())))

    @precondition(lambda self: self.lens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.lens)))
        del self.lens[lease]
        self.kv.release(lease)

    @invariant()
    def conserves_blocks(self) -> None:
        self.kv.check()
        for tier, usage in self.kv.usage().items():
            assert usage.free + usage.used + usage.in_flight == usage.total == self.capacities[tier]

    @invariant()
    def hides_targets(self) -> None:
        targets = {move.target for move in self.moves}
        for lease, length in self.lens.items():
            assert not targets & set(self.kv.table(lease, length))

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for lease in self.lens:
            self.kv.release(lease)
        self.kv.finish_moves([move.move_id for move in self.moves], ())
        assert self.kv.num_free_blocks == self.kv.num_blocks


TestKVTraffic = KVTraffic.TestCase
TestKVTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(wants=st.lists(st.integers(0, 12), max_size=8), capacity=st.integers(0, 40))
def test_share_fairly_for_any_wants_is_max_min_fair(wants: list[int], capacity: int) -> None:
    shares = share_fairly(wants, capacity)
    assert sum(shares) == min(capacity, sum(wants))
    assert all(0 <= share <= want for share, want in zip(shares, wants, strict=True))
    poorest = min((share for share, want in zip(shares, wants, strict=True) if share < want), default=None)
    assert poorest is None or max(shares) <= poorest + 1


@given(
    lens=st.lists(st.integers(0, 40), max_size=5),
    num_more=st.integers(0, 6),
    capacity=st.integers(0, 30),
    block_size=st.integers(1, 5),
    sink=st.integers(0, 12),
    recent=st.none() | st.integers(0, 20),
)
def test_residency_for_any_contexts_fits_and_fills_by_rank(
    lens: list[int], num_more: int, capacity: int, block_size: int, sink: int, recent: int | None
) -> None:
    regions = Regions(block_size=block_size, num_sink_tokens=sink, recent_window=recent)
    chosen = Residency(regions, capacity).choose(lens, [length + num_more for length in lens])
    wanted = [[block_idx for block_idx in range(each.num_blocks) if block_idx in each] for each in chosen]
    assert sum(map(len, wanted)) <= capacity
    for each, blocks in zip(chosen, wanted, strict=True):
        assert sorted(range(each.num_blocks), key=each.rank)[: len(blocks)] == sorted(blocks, key=each.rank)
        assert not blocks or each.num_blocks - 1 in blocks

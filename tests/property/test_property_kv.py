"""KV bookkeeping under random traffic: every tier conserves its blocks, whatever moves, fails or is cancelled."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ambidex.core.ids import RequestId, Tier
from ambidex.core.regions import Regions
from ambidex.core.step import BlockMove, BlockRef
from ambidex.kv.block_keys import BlockKeys
from ambidex.kv.lease import KVLease
from ambidex.kv.manager import KVManager, PrefixHit
from ambidex.kv.prefix_cache import PrefixCacheLimits
from ambidex.kv.residency import Residency, share_fairly

NO_TOKENS: tuple[int, ...] = ()


class KVTraffic(RuleBasedStateMachine):
    """Leases open, grow, move and end in any order; moves end late, in any order, well or badly.

    `content` says which tokens were written into each block: what a lease reads must be its own, also where it shares a
    block or a block was moved, evicted or taken anew. Tokens are 0 and 1, so that many contexts begin alike.
    """

    @initialize(
        gpu=st.integers(0, 6),
        dram=st.integers(0, 8),
        block_size=st.integers(1, 3),
        sink=st.integers(0, 4),
        recent=st.none() | st.integers(0, 6),
        cache_percent=st.sampled_from([0, 40, 100]),
    )
    def start(self, gpu: int, dram: int, block_size: int, sink: int, recent: int | None, cache_percent: int) -> None:
        regions = Regions(block_size=block_size, num_sink_tokens=sink, recent_window=recent)
        self.capacities = {Tier.GPU: gpu, Tier.DRAM: dram + (gpu == 0)}
        self.kv = KVManager(self.capacities, regions, PrefixCacheLimits(max_idle_percent=cache_percent))
        self.max_idle = -(-self.kv.num_blocks * cache_percent // 100)
        self.lens: dict[KVLease, int] = {}
        self.tokens: dict[KVLease, tuple[int, ...]] = {}
        self.keys: dict[KVLease, BlockKeys | None] = {}
        self.plans: dict[KVLease, tuple[int, ...]] = {}
        self.content: dict[BlockRef, tuple[int, ...]] = {}
        self.moves: list[BlockMove] = []
        self.num_opened = 0

    @rule(tokens=st.lists(st.integers(0, 1), max_size=9), tenant=st.sampled_from(["a", "a", "a", "b"]))
    def open(self, tokens: list[int], tenant: str) -> None:
        known = tuple(tokens)
        keys = self.kv.make_keys(tenant=tenant, salt="")
        prefix = self.kv.find_prefix(keys, lambda start, end: known[start:end], len(known)) if known else PrefixHit()
        assert prefix.num_tokens < max(1, len(known))
        num_free = self.kv.num_free_blocks
        lease = self.kv.open(RequestId(str(self.num_opened)), prefix)
        assert self.kv.num_free_blocks == num_free - prefix.num_idle
        self.lens[lease], self.tokens[lease], self.keys[lease] = prefix.num_tokens, known[: prefix.num_tokens], keys
        self.plans[lease] = known
        self.num_opened += 1

    @precondition(lambda self: self.lens)
    @rule(data=st.data(), new=st.lists(st.integers(0, 1), min_size=1, max_size=9), num_more=st.integers(0, 5))
    def extend(self, data: st.DataObject, new: list[int], num_more: int) -> None:
        lease = data.draw(st.sampled_from(list(self.lens)))
        length = self.lens[lease] + len(new)
        num_missing, num_free = self.kv.num_missing_blocks(lease, length), self.kv.num_free_blocks
        before = self.kv.table(lease, self.lens[lease])
        assert self.kv.try_extend(lease, length, num_known_tokens=length + num_more) == (num_missing <= num_free)
        if num_missing <= num_free:
            assert self.kv.table(lease, length)[: len(before)] == before
            planned = self.plans[lease][self.lens[lease] : length]
            self.compute(lease, (*planned, *new)[: len(new)])
        else:
            assert (self.kv.table(lease, self.lens[lease]), self.kv.num_free_blocks) == (before, num_free)

    def compute(self, lease: KVLease, new: tuple[int, ...]) -> None:
        """Write new tokens, and let the manager know that they are there."""
        size, first = self.kv.block_size, self.lens[lease] // self.kv.block_size
        known = self.tokens[lease] = (*self.tokens[lease], *new)
        self.lens[lease] = len(known)
        for idx, block in enumerate(self.kv.table(lease, len(known))[first:], start=first):
            self.content[block] = known[idx * size : (idx + 1) * size]
        self.kv.keep_computed(lease, self.keys[lease], lambda start, end: known[start:end], len(known))

    @precondition(lambda self: self.lens)
    @rule()
    def demote(self) -> None:
        moves = self.kv.begin_demotions(self.lens)
        sources = {move.source for move in self.moves}
        assert all(move.source.tier is Tier.GPU and move.target.tier is Tier.DRAM for move in moves)
        assert not sources & {move.source for move in moves}
        for move in moves:
            self.content[move.target] = NO_TOKENS
        self.moves.extend(moves)

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), is_failed=st.booleans())
    def end_move(self, data: st.DataObject, is_failed: bool) -> None:
        move = self.moves.pop(data.draw(st.integers(0, len(self.moves) - 1)))
        if not is_failed:
            self.content[move.target] = self.content[move.source]
        self.kv.finish_moves(*(((), (move.move_id,)) if is_failed else ((move.move_id,), ())))

    @precondition(lambda self: self.lens)
    @rule(data=st.data(), is_trusted=st.booleans())
    def release(self, data: st.DataObject, is_trusted: bool) -> None:
        lease = data.draw(st.sampled_from(list(self.lens)))
        del self.lens[lease], self.tokens[lease], self.keys[lease]
        self.kv.release(lease, is_trusted=is_trusted)

    @rule()
    def drop_cached(self) -> None:
        self.kv.drop_cached()
        assert self.kv.cache_stats().num_listed_blocks == 0

    @invariant()
    def conserves_blocks(self) -> None:
        self.kv.check()
        for tier, usage in self.kv.usage().items():
            assert usage.free + usage.used + usage.cached + usage.in_flight == usage.total == self.capacities[tier]
        num_moving = len(self.moves)  # a block that moves while its place in the quota goes stays until it has moved
        assert sum(self.kv.cache_stats().num_idle_blocks.values()) <= self.max_idle + num_moving

    @invariant()
    def reads_its_own_tokens(self) -> None:
        targets, size = {move.target for move in self.moves}, self.kv.block_size
        for lease, known in self.tokens.items():
            table = self.kv.table(lease, len(known))
            assert not targets & set(table)
            for idx, block in enumerate(table):
                assert self.content[block] == known[idx * size : (idx + 1) * size]

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for lease in self.lens:
            self.kv.release(lease)
        self.kv.finish_moves([move.move_id for move in self.moves], ())
        assert self.kv.num_free_blocks == self.kv.num_blocks
        self.kv.drop_cached()
        assert sum(usage.free for usage in self.kv.usage().values()) == self.kv.num_blocks


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

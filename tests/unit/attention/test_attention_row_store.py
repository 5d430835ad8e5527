"""What a policy keeps of K and V beside the blocks is what these hold, whoever had the memory before, and is bounded:
rows by what was announced, near rows by requests."""

import random
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ambidex.attention.context_rows import ContextRows
from ambidex.attention.row_store import RowStore
from ambidex.core.dtypes import DType
from ambidex.core.errors import InternalError
from ambidex.core.ids import BlockId, KVPart, RequestId, Tier
from ambidex.core.kv_mapping import HostLayout, KVMapping, SlowMemory
from ambidex.core.kv_spec import KVOrder, KVSpec
from ambidex.core.step import BlockRef
from ambidex.kernels.cpu.native import AttentionPool, ThreadPool
from ambidex.storage.host_memory import HostMemory
from ambidex.storage.host_rows import HostRows
from ambidex.storage.kv_pool import KVPool, RowKVPool, RowRun, find_runs
from ambidex.storage.row_home import RowHome
from ambidex.storage.slow_tier import SlowTier
from ambidex.storage.tiled_pool import TiledKVPool
from selective_world import SelectiveWorld, load_tiny_model, policy_settings, random_tokens
from unit_specs import make_spec

A, B = RequestId("a"), RequestId("b")


def no_context() -> ContextRows:
    raise AssertionError("nothing is stored yet")


def make_store(max_rows: int) -> RowStore:
    spec = make_spec()
    kv = KVSpec.of(spec, dtype=DType.FP32, block_size=16)
    pool = RowKVPool(kv, Tier.GPU, 1, device=torch.device("cpu"), pinned=False)
    return RowStore(spec, {Tier.GPU: pool, Tier.DRAM: pool}, max_rows=max_rows)


def test_a_request_has_room_for_the_tokens_that_were_announced_and_gives_it_back() -> None:
    store = make_store(max_rows=30)
    rows = store.prepare(A, 0, 1, max_tokens=20, make_context=no_context)
    assert rows is not None
    assert rows.capacity == store.num_rows == 20
    assert store.prepare(A, 0, 1, max_tokens=20, make_context=no_context) is rows
    store.forget(A)
    assert store.num_rows == 0


def test_more_tokens_than_were_announced_are_a_fault() -> None:
    store = make_store(max_rows=30)
    with pytest.raises(InternalError, match="request a has 21 tokens: 20 were announced"):
        store.prepare(A, 20, 1, max_tokens=20, make_context=no_context)


def test_more_requests_than_there_is_room_for_are_a_fault() -> None:
    store = make_store(max_rows=30)
    store.prepare(A, 0, 1, max_tokens=20, make_context=no_context)
    with pytest.raises(InternalError, match="request b of 11 tokens was started: 20 of 30 rows are taken"):
        store.prepare(B, 0, 1, max_tokens=11, make_context=no_context)
    store.prepare(B, 0, 1, max_tokens=10, make_context=no_context)


NUM_BLOCKS = 24
SPEC = make_spec(windows=(None,) * 3)


def make_pool(
    tier: Tier, order: KVOrder, dtype: DType, *, device: str = "cpu", slow: SlowTier | None = None, block_size: int = 16
) -> KVPool:
    """A pool of random rows."""
    kv = KVSpec.of(SPEC, dtype=dtype, block_size=block_size, order=order)
    pool: KVPool
    if order is KVOrder.TILES:
        native = AttentionPool(ThreadPool(2))
        pool = TiledKVPool(kv, tier, NUM_BLOCKS, native=native, pinned=device == "cuda", slow=slow)
    else:
        pool = RowKVPool(kv, tier, NUM_BLOCKS, device=torch.device(device), pinned=False, slow=slow)
    generator = torch.Generator().manual_seed(list(Tier).index(tier))
    for block_id in range(NUM_BLOCKS):
        rows = torch.randn(2, kv.num_layers, kv.num_kv_heads, kv.block_size, kv.head_dim, generator=generator)
        pool.write_block(block_id, *rows.to(pool.device))
    return pool


def choose_blocks(num: int, *, seed: int) -> list[BlockRef]:
    """Of both tiers, in any order."""
    generator = random.Random(seed)
    free = {tier: generator.sample(range(NUM_BLOCKS), NUM_BLOCKS) for tier in (Tier.GPU, Tier.DRAM)}
    return [BlockRef(tier, BlockId(free[tier].pop())) for tier in generator.choices(list(free), k=num)]


def check_rows(rows: HostRows, blocks: list[BlockRef], pools: Mapping[Tier, KVPool], num_keys: int) -> None:
    context = ContextRows(blocks, num_keys, pools=pools)
    assert rows.length == num_keys
    for part, own in ((KVPart.K, rows.k), (KVPart.V, rows.v)):
        for layer_idx in range(len(own)):
            assert torch.equal(own[layer_idx, :, :num_keys], context.read(part, layer_idx, own.dtype).cpu())


def prepare(
    store: RowStore, name: RequestId, start: int, blocks: list[BlockRef], pools: Mapping[Tier, KVPool], *, most: int
) -> HostRows:
    rows = store.prepare(
        name, start, 1, max_tokens=most, make_context=lambda: ContextRows(blocks, start + 1, pools=pools)
    )
    assert rows is not None
    return rows


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize(
    ("gpu", "dram", "device", "block_size"),
    [
        (KVOrder.ROWS, KVOrder.TILES, "cpu", 16),
        (KVOrder.TILES, KVOrder.TILES, "cpu", 32),
        (KVOrder.ROWS, KVOrder.ROWS, "cpu", 5),
        pytest.param(KVOrder.ROWS, KVOrder.TILES, "cuda", 16, marks=pytest.mark.gpu),
        pytest.param(KVOrder.ROWS, KVOrder.ROWS, "cuda", 5, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_rows_are_what_the_blocks_of_both_tiers_hold(
    dtype: DType, gpu: KVOrder, dram: KVOrder, device: str, block_size: int, seed: int
) -> None:
    pools = {
        Tier.GPU: make_pool(Tier.GPU, gpu, dtype, device=device, block_size=block_size),
        Tier.DRAM: make_pool(Tier.DRAM, dram, dtype, block_size=block_size),
    }
    store = RowStore(SPEC, pools, max_rows=8 * block_size)
    blocks = choose_blocks(8, seed=seed)
    rows = prepare(store, A, 3 * block_size - 2, blocks, pools, most=8 * block_size)
    check_rows(rows, blocks, pools, 3 * block_size - 2)
    # Steps that keep no rows have passed by.
    rows.k[:, :, 2 * block_size :] = rows.v[:, :, 2 * block_size :] = torch.nan
    rows.length = 2 * block_size + 1
    missing = 2 * block_size
    assert prepare(store, A, 6 * block_size + 3, blocks, pools, most=8 * block_size) is rows
    assert rows.k[:, :, missing].isnan().all(), "a row that was there was read again"
    rows.length = missing
    prepare(store, A, 6 * block_size + 3, blocks, pools, most=8 * block_size)
    check_rows(rows, blocks, pools, 6 * block_size + 3)
    assert rows.k[:, :, 6 * block_size + 3 :].isnan().all(), "a row behind the last was written"


def test_rows_of_requests_that_follow_each_other_in_the_same_memory_are_their_own() -> None:
    """Memory was once taken anew for each request; now it holds the rows of others."""
    pools = {tier: make_pool(tier, KVOrder.TILES, DType.BF16) for tier in (Tier.GPU, Tier.DRAM)}
    store = RowStore(SPEC, pools, max_rows=200)
    generator = random.Random(3)
    live: dict[RequestId, tuple[HostRows, list[BlockRef], int]] = {}
    for i in range(60):
        name, most = RequestId(f"r{i}"), generator.randint(2, 120)
        while store.num_rows + most > store.max_rows:
            gone = generator.choice(list(live))
            rows, blocks, start = live.pop(gone)
            check_rows(rows, blocks, pools, start)
            store.forget(gone)
        blocks, start = choose_blocks(8, seed=i), generator.randint(1, most - 1)
        live[name] = prepare(store, name, start, blocks, pools, most=most), blocks, start
    for name, (rows, blocks, start) in live.items():
        check_rows(rows, blocks, pools, start)
        store.forget(name)
    assert store.num_rows == 0


def test_memory_that_there_is_not_is_said_once_and_each_request_without_rows_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pools = {tier: make_pool(tier, KVOrder.ROWS, DType.FP32) for tier in (Tier.GPU, Tier.DRAM)}
    store = RowStore(SPEC, pools, max_rows=1 << 44)
    for name in (A, A, B):
        assert store.prepare(name, 0, 1, max_tokens=20, make_context=no_context) is None
    assert (store.num_refusals, store.num_rows) == (2, 0)
    store.forget(A)
    assert caplog.text.count("keys are read where they lie in their pools, which is slower: rows of K and V: no") == 1


def test_rows_of_emulated_memory_are_copied_at_its_pace() -> None:
    kv = KVSpec.of(SPEC, dtype=DType.FP32, block_size=16, order=KVOrder.TILES)
    layout = HostLayout(mapping=KVMapping.K_DRAM_V_CXL, num_near=NUM_BLOCKS)
    v_bytes = 40 * kv.num_layers * kv.num_kv_heads * kv.row_bytes(KVPart.V)
    slow = SlowTier(SlowMemory(latency_s=0.0, bytes_per_s=v_bytes / 0.1), kv, layout, torch.device("cpu"))
    pools = {
        Tier.GPU: make_pool(Tier.GPU, KVOrder.ROWS, DType.FP32),
        Tier.DRAM: make_pool(Tier.DRAM, KVOrder.TILES, DType.FP32, slow=slow),
    }
    store = RowStore(SPEC, pools, max_rows=64)
    blocks = [BlockRef(Tier.DRAM, BlockId(block_id)) for block_id in (5, 2, 9, 4)]
    start = time.perf_counter()
    rows = prepare(store, A, 40, blocks, pools, most=64)
    assert 0.1 <= time.perf_counter() - start < 0.2, "rows of V alone are slow, and no more of them than are wanted"
    check_rows(rows, blocks, pools, 40)


def test_runs_are_joined_where_both_sides_go_on_and_cut_where_nothing_is_wanted() -> None:
    assert find_runs([0, 4, 8, 20], [-6, -2, 2, 6], 4, 9) == [RowRun(6, 0, 6), RowRun(20, 6, 3)]
    assert find_runs([0, 4], [0, 8], 4, 12) == [RowRun(0, 0, 4), RowRun(4, 8, 4)]
    assert find_runs([], [], 4, 12) == find_runs([0], [12], 4, 12) == find_runs([0], [-4], 4, 12) == []


@pytest.mark.gpu
def test_rows_of_many_requests_on_a_gpu_are_pinned_twice_in_all() -> None:
    """Rows of each request were once pinned at its first step and unpinned at its end."""
    pinned: list[int] = []
    system = HostMemory()

    def pin(tensor: Tensor, owner: object) -> str | None:
        pinned.append(tensor.nbytes)
        return system.pin(tensor, owner)

    pools = {
        Tier.GPU: make_pool(Tier.GPU, KVOrder.ROWS, DType.BF16, device="cuda"),
        Tier.DRAM: make_pool(Tier.DRAM, KVOrder.TILES, DType.BF16, device="cuda"),
    }
    home = RowHome(HostLayout(mapping=KVMapping.DRAM, num_near=NUM_BLOCKS), memory=HostMemory(pin=pin))
    store = RowStore(SPEC, pools, max_rows=200, home=home)
    for i in range(20):
        name, blocks = RequestId(f"r{i}"), choose_blocks(8, seed=i)
        rows = prepare(store, name, 100 + i, blocks, pools, most=128 + i)
        check_rows(rows, blocks, pools, 100 + i)
        assert torch.equal(rows.k_there[:, :, : rows.length].cpu(), rows.k[:, :, : rows.length])
        store.forget(name)
    assert len(pinned) == 2


@pytest.mark.parametrize(
    ("policy", "options", "form"),
    [
        ("hybridgen", {"exact_layers": 1, "near_tokens": 3, "policy_tokens": 4}, {"is_early": True}),
        ("hybridgen", {"exact_layers": 1, "near_tokens": 3, "policy_tokens": 4}, {"is_early": True, "is_fixed": True}),
        ("infinigen", {"exact_layers": 1, "policy_tokens": 6}, {"is_early": True, "is_fixed": True}),
        ("h2o", {"policy_tokens": 8}, {"is_early": True, "is_fixed": True}),
        ("quest", {"policy_tokens": 12, "page_tokens": 4, "exact_layers": 1}, {"is_early": True, "is_fixed": True}),
        ("streaming_llm", {"policy_tokens": 8}, {"is_early": True, "is_fixed": True}),
        ("h2o", {"policy_tokens": 8}, {"has_rows": True}),
        ("keyformer", {"policy_tokens": 8}, {"has_rows": True}),
    ],
)
def test_answers_do_not_depend_on_whose_memory_rows_lie_in_nor_on_whether_they_move(
    tmp_path: Path, policy: str, options: dict[str, int], form: dict[str, bool]
) -> None:
    tiny = load_tiny_model("llama", tmp_path)
    settings = policy_settings(policy, **options)
    sizes = {"a": 28, "b": 34, "c": 28, "d": 48}
    tokens = {name: random_tokens(size, seed=size + ord(name)) for name, size in sizes.items()}
    alone = {}
    for name in "bd":
        world = SelectiveWorld(tiny, settings, block_size=16, **form)
        world.add(name, tokens[name], num_prompt=20)
        alone[name] = world.run(name, chunks=[20])
    world = SelectiveWorld(tiny, settings, block_size=16, max_rows=90, gpu_from=1, seed=5, **form)
    states: dict[str, list[Tensor]] = {name: [] for name in tokens}

    def step(names: str, count: int = 1) -> None:
        for name, hidden in world.step([(name, count) for name in names]).items():
            states[name].append(hidden)

    for name in "abc":
        world.add(name, tokens[name], num_prompt=20)
        step(name, 20)
    for _ in range(4):
        step("abc")
    world.end("a")
    world.end("c")
    world.add("d", tokens["d"], num_prompt=20)
    step("d", 20)
    b_rows = store_of(world)._rows[RequestId("b")]
    assert b_rows.start == 28
    for _ in range(10):
        step("bd")
    assert b_rows.start == 0, "nothing moved: the test would prove nothing"
    while len(torch.cat(states["d"])) < 48:
        step("d")
    for name in "bd":
        torch.testing.assert_close(torch.cat(states[name]), alone[name])


def store_of(world: SelectiveWorld) -> RowStore:
    store = world.attention._row_store
    if world.attention.early is not None:
        store = world.attention.early.requests.row_store
    assert store is not None
    return store


def test_near_rows_of_requests_that_sit_a_step_out_are_dropped_where_there_is_no_room_for_them(tmp_path: Path) -> None:
    tiny = load_tiny_model("llama", tmp_path)
    settings = policy_settings("hybridgen", exact_layers=1, near_tokens=3, policy_tokens=4)
    tokens = {name: random_tokens(20, seed=seed) for seed, name in enumerate("ab")}
    alone = {}
    for name in "ab":
        world = SelectiveWorld(tiny, settings, is_early=True)
        world.add(name, tokens[name], num_prompt=12)
        alone[name] = world.run(name, chunks=[12])
    world = SelectiveWorld(tiny, settings, is_early=True, max_requests=1)
    states = {name: [] for name in "ab"}
    for name in "ab":
        world.add(name, tokens[name], num_prompt=12)
        states[name].append(world.step([(name, 12)])[name])
    early = world.attention.early
    assert early is not None
    for _ in range(8):
        for name in "ab":
            states[name].append(world.step([(name, 1)])[name])
            assert early.num_near_requests == 1
    for name in "ab":
        torch.testing.assert_close(torch.cat(states[name]), alone[name])

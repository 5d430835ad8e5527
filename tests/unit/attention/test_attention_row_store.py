"""What a policy keeps of K and V beside the blocks is bounded: rows by what was announced, near rows by requests."""

from pathlib import Path

import pytest
import torch

from ambidex.attention.context_rows import ContextRows
from ambidex.attention.row_store import RowStore
from ambidex.core.dtypes import DType
from ambidex.core.errors import InternalError
from ambidex.core.ids import RequestId, Tier
from ambidex.core.kv_spec import KVSpec
from ambidex.storage.kv_pool import RowKVPool
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

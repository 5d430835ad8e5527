"""What captured decode steps and the stream lane take from the accelerator's budget."""

from dataclasses import replace

import pytest

from ambidex.core.config import EngineConfig
from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import (
    FIXED_SCORE_BYTES,
    NEAR_SLACK,
    PREDICTOR_QUERIES,
    SCORE_BUFFERS,
    BoxState,
    KeptRows,
    KVOrder,
    KVSpec,
    PredictorState,
    StreamBuffers,
    SumState,
)
from ambidex.core.model_spec import Activation, ModelSpec
from ambidex.core.policy import PolicyName, resolve_policy
from ambidex.core.units import GIB, MIB
from ambidex.cost.workspace import BYTES_PER_GRAPH, graph_bytes
from ambidex.engine.kept_rows import choose_policy_state
from ambidex.engine.memory import FreeMemory, MemoryPlan, WeightBytes, fixed_bytes, plan_memory

SPEC = ModelSpec(
    architecture="llama", num_layers=2, hidden_size=64, intermediate_size=128, num_q_heads=4, num_kv_heads=2,
    head_dim=16, vocab_size=1000, max_context_len=512, norm_eps=1e-5, activation=Activation.SILU, rope=None,
    windows=(None, None), tie_embeddings=False,
)  # fmt: skip
FREE = FreeMemory(accelerator=GIB, dram=GIB, is_shared=False)


def plan(gpu_memory: int, buckets: tuple[int, ...], *, stream: StreamBuffers | None = None) -> MemoryPlan:
    spec = KVSpec.of(SPEC, dtype=DType.BF16, block_size=16)
    config = EngineConfig(model="any", gpu_memory=gpu_memory, max_context_len=512)
    return plan_memory(
        config,
        SPEC,
        {Tier.GPU: spec, Tier.DRAM: spec},
        free=FREE,
        weights=WeightBytes(on_gpu=MIB),
        fixed=fixed_bytes(config, SPEC, activations=DType.BF16, graph_buckets=buckets, stream=stream),
    )


def test_graph_bytes_are_activations_and_logits_of_the_largest_and_an_allowance_for_each() -> None:
    activations = 4 * 64 * 2 + max(3 * 128 * 2, 3 * 64 * (2 + 4))  # the MLP's, or attention's
    assert graph_bytes(SPEC, (1, 2, 4), num_bytes=2) == 4 * (activations + 1000 * (2 + 8)) + 3 * BYTES_PER_GRAPH
    assert graph_bytes(SPEC, (), num_bytes=2) == 0


def test_graphs_stand_in_the_ledger_and_leave_less_for_kv() -> None:
    with_graphs, without = plan(80 * MIB, (1, 2)), plan(80 * MIB, ())
    owners = {entry.owner: entry.num_bytes for entry in with_graphs.ledger.entries(Tier.GPU)}
    assert owners["graphs"] == graph_bytes(SPEC, (1, 2), num_bytes=2)
    assert "graphs" not in {entry.owner for entry in without.ledger.entries(Tier.GPU)}
    assert with_graphs.ledger.free(Tier.GPU) == without.ledger.free(Tier.GPU) - owners["graphs"]


def test_a_budget_without_room_for_graphs_is_refused_with_their_size() -> None:
    with pytest.raises(ConfigError, match=r"CUDA graphs 48\.\d MiB: give at least"):
        plan(40 * MIB, (1, 2, 4))


def test_stream_buffers_hold_a_ring_of_pieces_and_the_rows_of_one() -> None:
    kv = KVSpec.of(SPEC, dtype=DType.INT8, block_size=64, order=KVOrder.TILES)
    buffers = StreamBuffers.of(kv, max_context_len=200, number_bytes=2)
    row_size, heads = kv.row_size, kv.num_kv_heads
    tokens = 4 * 64  # blocks: the context is shorter than a full piece
    assert buffers.num_bytes == tokens * (3 * 2 * heads * (row_size + 4) + 2 * heads * SPEC.head_dim * 2)


def test_stream_buffers_stand_in_the_ledger() -> None:
    kv = KVSpec.of(SPEC, dtype=DType.BF16, block_size=16, order=KVOrder.TILES)
    buffers = StreamBuffers.of(kv, max_context_len=SPEC.max_context_len, number_bytes=2)
    without, memory = plan(GIB, ()), plan(GIB, (), stream=buffers)
    taken = {entry.owner: entry.num_bytes for entry in memory.ledger.entries(Tier.GPU)}
    assert taken["stream"] == buffers.num_bytes > 0
    assert "stream" not in {entry.owner for entry in without.ledger.entries(Tier.GPU)}


def test_near_rows_of_a_policy_stand_in_the_ledger_of_the_accelerator() -> None:
    rows = KeptRows(num_layers=2, num_kv_heads=2, head_dim=16, number_bytes=2, num_q_heads=4, num_near=10)
    config = EngineConfig(model="any", max_running_requests=3, max_context_len=512, policy=PolicyName.HYBRIDGEN)
    fixed = fixed_bytes(config, SPEC, activations=DType.BF16, rows=rows)
    near = 3 * (10 + 1 + NEAR_SLACK) * 2 * 2 * 2 * 16 * 2  # requests, rows, K and V, layers, heads, numbers, bytes
    assert fixed.near_rows == near + 512 * 4 * (2 + 4)  # and the scores of one request, as they come and in fp32
    of_all = fixed_bytes(config, SPEC, activations=DType.BF16, rows=replace(rows, is_fixed=True))
    scores = 3 * 512 * (4 * 2 + 2 * 4)  # in steps of fixed form those of all requests, and a number of each KV head
    assert of_all.near_rows == fixed.near_rows + scores
    predicting = replace(rows, is_fixed=True, is_scored=False, num_near=0)  # near is a step's own key alone
    found = fixed_bytes(config, SPEC, activations=DType.BF16, rows=predicting).near_rows
    assert found == 3 * 2 * 2 * 2 * 16 * 2 + 512 * 4 * 4 + 3 * 512 * 2 * 4, "own rows, scores in fp32, the fixed form's"
    assert predicting.score_bytes == 0
    many = replace(rows, is_fixed=True).max_fixed_keys(1000, 4096)
    assert many == FIXED_SCORE_BYTES // (4 * 2 + 2 * 4)
    spec = KVSpec.of(SPEC, dtype=DType.BF16, block_size=16)
    memory = plan_memory(
        config, SPEC, {Tier.GPU: spec, Tier.DRAM: spec}, free=FREE, weights=WeightBytes(on_gpu=MIB), fixed=fixed,
        rows=rows,
    )  # fmt: skip
    taken = {entry.owner: entry.num_bytes for entry in memory.ledger.entries(Tier.GPU)}
    assert taken["near rows"] == fixed.near_rows
    in_dram = {entry.owner: entry.num_bytes for entry in memory.ledger.entries(Tier.DRAM)}
    assert memory.max_kept_rows == sum(memory.num_blocks.values()) * 16
    assert in_dram["rows"] == memory.max_kept_rows * (2 * 2 * 2 * 16 * 2 + SCORE_BUFFERS * 4 * 2)


def test_graphs_of_each_mode_of_a_policy_stand_in_the_ledger() -> None:
    config = EngineConfig(model="any", policy=PolicyName.HYBRIDGEN)
    one, two = (
        fixed_bytes(config, SPEC, activations=DType.BF16, graph_buckets=(1, 2, 4), graph_modes=num_modes).graphs
        for num_modes in (1, 2)
    )
    assert two - one == 3 * BYTES_PER_GRAPH


def test_an_accelerator_without_room_for_near_rows_is_refused_with_their_size() -> None:
    rows = KeptRows(num_layers=2, num_kv_heads=2, head_dim=16, number_bytes=2, num_q_heads=4, num_near=100_000)
    config = EngineConfig(
        model="any", gpu_memory=40 * MIB, max_context_len=512, policy=PolicyName.HYBRIDGEN, near_tokens=100_000
    )
    spec = KVSpec.of(SPEC, dtype=DType.BF16, block_size=16)
    fixed = fixed_bytes(config, SPEC, activations=DType.BF16, rows=rows)
    with pytest.raises(ConfigError, match=r"hybridgen \d+\.\d GiB: give at least .*, or a smaller `near_tokens`, "):
        plan_memory(
            config, SPEC, {Tier.GPU: spec, Tier.DRAM: spec}, free=FREE, weights=WeightBytes(on_gpu=MIB), fixed=fixed,
            rows=rows,
        )  # fmt: skip


PREDICTOR = PredictorState(num_layers=1, num_kv_heads=2, num_q_heads=4, head_dim=16, num_columns=3)
PREDICTED_BYTES = 2 * 3 * 4
"""Of a token: heads, columns, fp32."""


def plan_predictor(**settings: object) -> MemoryPlan:
    spec = KVSpec.of(SPEC, dtype=DType.BF16, block_size=16)
    values = {"max_running_requests": 3, "policy": PolicyName.INFINIGEN, **settings}
    config = EngineConfig(model="any", **values)  # type: ignore[arg-type]
    fixed = fixed_bytes(config, SPEC, activations=DType.BF16, state=PREDICTOR)
    return plan_memory(
        config, SPEC, {Tier.GPU: spec, Tier.DRAM: spec}, free=FREE, weights=WeightBytes(on_gpu=MIB), fixed=fixed,
        state=PREDICTOR,
    )  # fmt: skip


def test_what_a_predictor_keeps_stands_in_the_ledger_of_the_accelerator() -> None:
    memory = plan_predictor(max_context_len=512)
    turns = 3 * 2 * 16 * 3  # requests, heads, head_dim, columns
    queries = 2 * PREDICTOR_QUERIES * 4 * 16  # prompts, queries, heads, head_dim
    keys = 512 * 2 * 16
    taken = {entry.owner: entry.num_bytes for entry in memory.ledger.entries(Tier.GPU)}
    assert memory.max_state_tokens == 3 * 512, "all requests, as long as they may be"
    assert memory.max_kept_tokens == memory.max_state_tokens
    assert taken["predictor"] == 4 * (turns + queries + keys) + memory.max_state_tokens * PREDICTED_BYTES


def test_predictor_takes_at_most_half_of_what_blocks_could_have() -> None:
    whole = plan_predictor(max_context_len=512, gpu_memory=GIB)
    fixed = sum(entry.num_bytes for entry in whole.ledger.entries(Tier.GPU) if entry.owner in ("weights", "workspace"))
    fixed += PREDICTOR.fixed_bytes(3, 512)
    tight = plan_predictor(max_context_len=512, gpu_memory=fixed + 2 * 600 * PREDICTED_BYTES)
    assert tight.max_state_tokens == 600
    assert tight.num_blocks[Tier.GPU] == 600 * PREDICTED_BYTES // (16 * 2 * 2 * 2 * 16 * 2)


def test_context_that_a_predictor_has_no_room_for_is_refused_or_shortened() -> None:
    whole = plan_predictor(max_context_len=512, gpu_memory=GIB)
    fixed = sum(entry.num_bytes for entry in whole.ledger.entries(Tier.GPU) if entry.owner in ("weights", "workspace"))
    budget = fixed + PREDICTOR.fixed_bytes(3, 512) + 2 * 100 * PREDICTED_BYTES
    with pytest.raises(ConfigError, match=r"keeps columns of K .* room for those of 100 tokens, and a context has 512"):
        plan_predictor(max_context_len=512, gpu_memory=budget)
    memory = plan_predictor(gpu_memory=budget)
    assert memory.max_context_len == 100
    assert memory.max_context_reason == "the columns of K on the accelerator that `policy` infinigen has room for"


def test_an_accelerator_without_room_for_a_predictor_is_refused_with_its_size() -> None:
    with pytest.raises(ConfigError, match=r"its predictor \d.*KiB: give at least"):
        plan_predictor(max_context_len=512, gpu_memory=MIB)


@pytest.mark.parametrize(
    ("settings", "num_layers"),
    [
        ({"policy": "infinigen"}, 3),
        ({"policy": "infinigen", "exact_layers": 0}, 4),
        ({"policy": "infinigen", "exact_layers": 9}, 0),
        ({"policy": "hybridgen", "hybridgen_mode": "pre"}, 3),
        ({"policy": "hybridgen", "hybridgen_feedback": "mode"}, 3),
        ({"policy": "hybridgen"}, None),
        ({"policy": "h2o"}, None),
        ({}, None),
    ],
)
def test_policies_that_predict_scores_have_a_predictor(settings: dict[str, object], num_layers: int | None) -> None:
    spec = replace(SPEC, num_layers=5, windows=(None,) * 5)
    config = EngineConfig(model="any", **settings)  # type: ignore[arg-type]
    found = choose_policy_state(spec, resolve_policy(config), is_fixed=False)
    assert (None if found is None else found.num_layers) == num_layers
    assert found is None or found.num_columns == 16 * 20 // 100


def test_sums_of_what_keys_get_stand_in_the_ledger_of_the_accelerator() -> None:
    """Twice, four bytes and a flag of each KV head and layer."""
    spec = KVSpec.of(SPEC, dtype=DType.BF16, block_size=16)
    config = EngineConfig(model="any", policy=PolicyName.H2O, max_running_requests=3, max_context_len=512)
    state = SumState(num_layers=SPEC.num_layers, num_kv_heads=SPEC.num_kv_heads)
    memory = plan_memory(
        config, SPEC, {Tier.GPU: spec, Tier.DRAM: spec}, free=FREE, weights=WeightBytes(on_gpu=MIB),
        fixed=fixed_bytes(config, SPEC, activations=DType.BF16, state=state), state=state,
    )  # fmt: skip
    taken = {entry.owner: entry.num_bytes for entry in memory.ledger.entries(Tier.GPU)}
    assert memory.max_kept_tokens == 3 * 512, "all requests, as long as they may be"
    assert taken["sums"] == 3 * 512 * 2 * 5 * SPEC.num_layers * SPEC.num_kv_heads
    assert "predictor" not in taken


def test_boxes_of_pages_stand_in_the_ledger_of_the_accelerator() -> None:
    """Two numbers of each channel of a page, KV head and layer that chooses; and their bounds in a step."""
    spec = KVSpec.of(SPEC, dtype=DType.BF16, block_size=16)
    config = EngineConfig(
        model="any", policy=PolicyName.QUEST, policy_tokens=30, page_tokens=10, exact_layers=1, max_running_requests=3,
        max_context_len=512,
    )  # fmt: skip
    settings = resolve_policy(config)
    assert choose_policy_state(SPEC, settings, is_fixed=False) is None
    state = choose_policy_state(SPEC, settings, is_fixed=True)
    assert state == BoxState(num_layers=1, num_kv_heads=2, head_dim=16, page_tokens=10)
    assert state is not None
    rows = KeptRows(
        num_layers=2, num_kv_heads=2, head_dim=16, number_bytes=2, num_q_heads=4, is_scored=False, is_fixed=True,
        page_tokens=10,
    )  # fmt: skip
    fixed = fixed_bytes(config, SPEC, activations=DType.BF16, state=state, rows=rows)
    assert fixed.near_rows == 3 * 2 * 2 * 2 * 16 * 2 + 512 * 4 * 4 + 3 * 512 * 2, (
        "own rows, scores, 16 / 10 bytes a key"
    )
    memory = plan_memory(
        config, SPEC, {Tier.GPU: spec, Tier.DRAM: spec}, free=FREE, weights=WeightBytes(on_gpu=MIB), fixed=fixed,
        state=state,
    )  # fmt: skip
    taken = {entry.owner: entry.num_bytes for entry in memory.ledger.entries(Tier.GPU)}
    assert memory.max_kept_tokens == 3 * 512, "all requests, as long as they may be"
    assert taken["boxes"] == 3 * 512 * 26, "256 bytes of 10 tokens, rounded up"
    assert "sums" not in taken

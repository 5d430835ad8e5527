"""What captured decode steps take from the accelerator's budget."""

import pytest

from ambidex.core.config import EngineConfig
from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import KVSpec
from ambidex.core.model_spec import Activation, ModelSpec
from ambidex.core.units import GIB, MIB
from ambidex.engine.memory import BYTES_PER_GRAPH, FreeMemory, MemoryPlan, graph_bytes, plan_memory

SPEC = ModelSpec(
    architecture="llama", num_layers=2, hidden_size=64, intermediate_size=128, num_q_heads=4, num_kv_heads=2,
    head_dim=16, vocab_size=1000, max_context_len=512, norm_eps=1e-5, activation=Activation.SILU, rope=None,
    windows=(None, None), tie_embeddings=False,
)  # fmt: skip
FREE = FreeMemory(accelerator=GIB, dram=GIB, is_shared=False)


def plan(gpu_memory: int, buckets: tuple[int, ...]) -> MemoryPlan:
    spec = KVSpec.of(SPEC, dtype=DType.BF16, block_size=16)
    config = EngineConfig(model="any", gpu_memory=gpu_memory, max_context_len=512)
    return plan_memory(
        config,
        SPEC,
        {Tier.GPU: spec, Tier.DRAM: spec},
        activations=DType.BF16,
        free=FREE,
        weights_bytes=MIB,
        graph_buckets=buckets,
    )


def test_graph_bytes_are_activations_and_logits_of_the_largest_and_an_allowance_for_each() -> None:
    activations = (4 * 64 + 3 * 128 + 3 * 64) * 2 + 3 * 4 * 64
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

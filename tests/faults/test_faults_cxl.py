"""A CXL tier that cannot be had: the engine says so once, counts it, keeps K and V in DRAM, and answers the same."""

import errno
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ambidex import EngineConfig
from ambidex.core.config import DeviceKind
from ambidex.core.errors import ConfigError, MachineError
from ambidex.core.ids import Fallback, KVPart, Tier
from ambidex.core.policy import PolicyName
from ambidex.core.units import MIB
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.hw.numa import NumaNode
from ambidex.hw.topology import Topology
from ambidex.storage.host_memory import HostMemory
from ambidex.storage.pinned import register_pinned
from ambidex.storage.row_home import RowHome
from fault_runs import SPLIT, run, tokens
from numa_world import FakeKernel

NEAR = NumaNode(node_id=0, cores=(0, 1), memory_bytes=64 * MIB, free_bytes=64 * MIB, distances={0: 10, 1: 40})
FAR = NumaNode(node_id=1, cores=(), memory_bytes=64 * MIB, free_bytes=8 * MIB)


def topology(*nodes: NumaNode) -> Topology:
    return Topology(
        cpu_model="CPU", cpu_flags=frozenset(), online_cores=(0, 1), allowed_cores=(0, 1), cpu_quota=None,
        numa_nodes=nodes,
    )  # fmt: skip


def build(folder: Path, kernel: FakeKernel, *nodes: NumaNode, **settings: Any) -> Engine:
    memory = HostMemory(advise=lambda _: None, numa=kernel.calls(), topology=lambda: topology(*nodes))
    config = EngineConfig(model=str(folder), num_threads=1, **{**SPLIT, "cxl_memory": MIB, **settings})
    return build_engine(config, host_memory=memory)


@pytest.fixture(scope="module")
def wanted(folder: Path) -> list[tuple[int, ...]]:
    return tokens(run(build_engine(EngineConfig(model=str(folder), num_threads=1, **SPLIT))))


def check_without_tier(engine: Engine, said: str, log: str, wanted: list[tuple[int, ...]]) -> None:
    assert engine.stats.fallbacks[Fallback.NO_CXL] == 1
    assert said in engine.report.why("fallbacks", Fallback.NO_CXL)
    assert log.count(said) == 1
    assert engine.figures.ledger.budget(Tier.CXL) == 0
    assert tokens(run(engine)) == wanted
    assert Tier.CXL not in engine.stats.peak_kv_bytes


def test_tier_that_is_there_is_used(folder: Path, wanted: list[tuple[int, ...]]) -> None:
    kernel = FakeKernel()
    engine = build(folder, kernel, NEAR, FAR)
    assert not engine.stats.fallbacks
    assert engine.report.value("kv", "cxl_tier") == "NUMA node 1"
    assert {nodes for _, _, _, nodes in kernel.policies} == {(1,)}
    assert tokens(run(engine)) == wanted
    assert engine.stats.peak_kv_bytes[Tier.CXL] > 0


def test_interleaved_tier_is_used(folder: Path, wanted: list[tuple[int, ...]]) -> None:
    kernel = FakeKernel()
    engine = build(folder, kernel, NEAR, FAR, kv_mapping="interleave")
    assert {nodes for _, _, _, nodes in kernel.policies} == {(0, 1)}
    assert tokens(run(engine)) == wanted


def test_node_with_cores_can_be_named(folder: Path) -> None:
    other = NumaNode(node_id=1, cores=(8, 9), memory_bytes=64 * MIB, free_bytes=8 * MIB)
    assert build(folder, FakeKernel(), NEAR, other, cxl_node=1).report.value("kv", "cxl_tier") == "NUMA node 1"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (errno.EPERM, "this process may not"),
        (errno.EINVAL, "does not exist, has gone"),
        (errno.ENOMEM, "no memory left"),
        (errno.ENOSYS, "without NUMA"),
    ],
)
def test_kernel_that_refuses(
    folder: Path, wanted: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture, error: int, said: str
) -> None:
    check_without_tier(build(folder, FakeKernel(refuse=error), NEAR, FAR), said, caplog.text, wanted)


def test_kernel_that_does_not_say_where_pages_lie(
    folder: Path, wanted: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(folder, FakeKernel(silent=errno.EPERM), NEAR, FAR)
    check_without_tier(engine, "does not say where pages lie", caplog.text, wanted)


def test_node_that_fills_up_meanwhile(
    folder: Path, wanted: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    kernel = FakeKernel(free_pages={0: 1 << 20, 1: 5})
    check_without_tier(build(folder, kernel, NEAR, FAR), "pages came to lie on node 1", caplog.text, wanted)


def test_node_that_went_meanwhile(
    folder: Path, wanted: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    kernel = FakeKernel(free_pages={0: 1 << 20})
    check_without_tier(build(folder, kernel, NEAR, FAR), "does not exist, has gone", caplog.text, wanted)


@pytest.mark.parametrize(
    ("nodes", "settings", "said"),
    [
        ((NEAR,), {}, "no NUMA node of memory alone that this process may use (nodes: 0)"),
        ((NEAR,), {"cxl_node": 1}, "node 1 is not there, or has gone (nodes: 0)"),
        ((NEAR, FAR), {"cxl_node": 0}, "node 0 is where this process's cores are"),
        ((NEAR, NumaNode(node_id=1, cores=(), memory_bytes=MIB, is_allowed=False)), {}, "no NUMA node of memory alone"),
        (
            (NEAR, NumaNode(node_id=1, cores=(), memory_bytes=MIB, is_allowed=False)),
            {"cxl_node": 1},
            "this process's cpuset leaves out node 1",
        ),
        ((NEAR, NumaNode(node_id=1, cores=(), memory_bytes=0)), {"cxl_node": 1}, "node 1 has no memory"),
        ((NEAR, NumaNode(node_id=1, cores=(), memory_bytes=MIB, free_bytes=0)), {}, "node 1 has no free memory"),
    ],
)
def test_node_that_is_not_there(
    folder: Path,
    wanted: list[tuple[int, ...]],
    caplog: pytest.LogCaptureFixture,
    nodes: tuple[NumaNode, ...],
    settings: Mapping[str, Any],
    said: str,
) -> None:
    check_without_tier(build(folder, FakeKernel(), *nodes, **settings), said, caplog.text, wanted)


def test_node_with_less_than_is_asked_for_gives_what_it_has(
    folder: Path, wanted: list[tuple[int, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(folder, FakeKernel(), NEAR, FAR, cxl_memory=16 * MIB)
    assert engine.stats.fallbacks[Fallback.NO_CXL] == 1
    assert caplog.text.count("node 1 has 8.0 MiB free of 16.0 MiB that are asked for") == 1
    assert engine.figures.ledger.budget(Tier.CXL) == 8 * MIB
    assert tokens(run(engine)) == wanted


def test_dram_that_cannot_take_over_is_an_error_that_says_what_it_needs(folder: Path) -> None:
    with pytest.raises(ConfigError, match="raise `dram_memory`"):
        build(
            folder, FakeKernel(refuse=errno.EPERM), NEAR, FAR, dram_memory=8192, max_context_len=128, kv_gpu_tokens=32
        )


def test_emulated_tier_that_dram_does_not_hold_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"`cxl_memory` is 1024\.0 TiB, emulated in DRAM"):
        build(folder, FakeKernel(), NEAR, cxl_memory=1 << 50, emulate_cxl="300ns,20GB/s")


def test_malformed_topology_is_an_error_without_a_traceback_of_ours(folder: Path) -> None:
    def fail() -> Topology:
        raise MachineError("/sys/devices/system/node/node1/cpulist says 'x'")

    config = EngineConfig(model=str(folder), cxl_memory=MIB, **SPLIT)
    with pytest.raises(MachineError, match="cpulist says"):
        build_engine(config, host_memory=HostMemory(topology=fail))


@pytest.mark.gpu
def test_pages_that_move_as_they_are_pinned_are_no_tier(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    kernel = FakeKernel()

    def pin(tensor: Tensor, owner: object) -> str | None:
        kernel.move_all()
        return register_pinned(tensor, owner)

    memory = HostMemory(advise=lambda _: None, pin=pin, numa=kernel.calls(), topology=lambda: topology(NEAR, FAR))
    config = EngineConfig(model=str(folder), device=DeviceKind.CUDA, num_threads=1, **SPLIT)
    on_gpu = tokens(run(build_engine(config)))
    engine = build_engine(replace(config, cxl_memory=MIB), host_memory=memory)
    check_without_tier(engine, "has moved as it was pinned for the GPU", caplog.text, on_gpu)


def test_where_no_memory_is_left_for_rows_of_a_policy_they_are_read_from_blocks(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"policy": PolicyName.HYBRIDGEN, "exact_layers": 1, "near_tokens": 3}
    expected = tokens(run(build(folder, FakeKernel(), NEAR, FAR, **options)))
    kernel, allocate = FakeKernel(), RowHome.allocate

    def allocate_late(home: RowHome, part: KVPart, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        kernel.refuse = errno.ENOMEM  # the node has filled up since the pool was placed
        return allocate(home, part, shape, dtype)

    monkeypatch.setattr(RowHome, "allocate", allocate_late)
    engine = build(folder, kernel, NEAR, FAR, **options)
    assert tokens(run(engine)) == expected
    assert 1 <= engine.stats.fallbacks[Fallback.NO_ROWS] <= len(expected)
    assert caplog.text.count("keys are read where they lie in their pools") == 1
    assert engine.report.value("compute", "policy_rows") == "none"
    assert engine.report.why("compute", "policy_rows").startswith("K and V are read from the blocks: rows of V: ")
    engine.core.scheduler.check()

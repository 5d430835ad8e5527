"""A whole engine on a machine of two NUMA nodes: run in a guest by `run.sh`, with a folder of a tiny model.

Tokens with V in the CXL tier, with K spilled there and with pages interleaved are those of all in DRAM, and the kernel
says of every page of K and V that it lies where the mapping has it. Takes minutes: torch is imported under emulation.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

import numpy as np

from ambidex import EngineConfig, SamplingParams
from ambidex.core.ids import Tier
from ambidex.core.units import MIB
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.storage.numa_calls import NUMA_CALLS, PAGE_BYTES
from fault_runs import run, tokens

PROMPTS = ("a prompt that is longer than what stays near, " * 2, "another one", "x" * 100)
GREEDY = SamplingParams(max_output_tokens=16, temperature=0.0, ignore_eos=True)
SPLIT: dict[str, Any] = {
    "block_size": 16, "kv_gpu_tokens": 96, "num_sink_tokens": 16, "recent_window": 16, "num_threads": 1,
}  # fmt: skip
MAPPINGS: dict[str, dict[str, Any]] = {
    "dram": {},
    "k-dram-v-cxl": {"cxl_memory": 8 * MIB},
    "k-dram-v-cxl, K spilled": {"cxl_memory": 8 * MIB, "dram_memory": 100_000},
    "interleave": {"cxl_memory": 8 * MIB, "kv_mapping": "interleave"},
}
POLICIES = ("exact", "hybridgen")


def count_pages(address: int, num_bytes: int) -> dict[int, int]:
    """Pages of memory by node; those that nobody has touched are left out."""
    first = address // PAGE_BYTES * PAGE_BYTES
    nodes = NUMA_CALLS.find_nodes(np.arange(first, address + num_bytes, PAGE_BYTES, dtype=np.uint64))
    assert not isinstance(nodes, int), f"move_pages answers {nodes}"
    return {node: int((nodes == node).sum()) for node in np.unique(nodes[nodes >= 0]).tolist()}


def main(folder: str) -> int:
    """Answer the prompts by each policy under each mapping; exit code 1: tokens differ, or a tier was not used."""
    num_wrong = 0
    for policy in POLICIES:
        wanted = None
        for name, settings in MAPPINGS.items():
            engine = build_engine(EngineConfig(model=folder, policy=policy, **SPLIT, **settings))
            found = tokens(run(engine, PROMPTS, GREEDY))
            wanted = wanted or found
            used = engine.stats.peak_kv_bytes.get(Tier.CXL, 0)
            is_right = found == wanted and (used > 0) == bool(settings) and not engine.stats.fallbacks.get("no_cxl")
            num_wrong += not is_right
            verdict, tokens_are = "ok" if is_right else "FAILED", "equal" if found == wanted else "different"
            told = (
                f"{used} B in the CXL tier at most, {engine.stats.num_moves} moves, pages by node {find_pages(engine)}"
            )
            print(f"{verdict:8}{policy}, {name}: tokens {tokens_are}, {told}", flush=True)
    return int(num_wrong > 0)


def find_pages(engine: Engine) -> dict[str, dict[int, int]]:
    """Pages of K and of V of the pool in host memory, by node."""
    runner = engine.core.executor
    while not hasattr(runner, "_attention"):
        runner = runner._steps  # type: ignore[attr-defined]  # what merges two tiers into one pool
    host = runner._attention.pools[Tier.DRAM]
    return {name: count_pages(part.data_ptr(), part.nbytes) for name, part in (("K", host.k), ("V", host.v))}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

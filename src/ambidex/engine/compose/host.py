"""Host memory as it is got: K and V on their nodes, or paced as if they were; and what became of it, for people."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ambidex.core.ids import KVPart, Tier
from ambidex.core.kv_mapping import KVMapping
from ambidex.core.units import format_size
from ambidex.engine.compose.choices import Choices
from ambidex.engine.compose.parts import make_pools
from ambidex.engine.report import ReportRow
from ambidex.storage.copy import CopyBlock
from ambidex.storage.host_memory import HostMemory
from ambidex.storage.kv_parts import find_moved_parts, place_parts
from ambidex.storage.kv_pool import KVPool


def place_host(choices: Choices, memory: HostMemory) -> tuple[Choices, Mapping[KVPart, Tensor] | None]:
    """Get the memory of the CXL tier. Where the kernel does not give it there, all is laid out anew without the tier.

    Returns:
        The choices as they hold now, and K and V of the pool in host memory; None: it may allocate them itself.
    Raises:
        ConfigError: DRAM alone does not hold what is needed.
    Cost: touches what lies in the CXL tier.
    """
    if choices.cxl.nodes is None:
        return choices, None
    placed = place_parts(choices.kv.specs[Tier.DRAM], choices.memory.host.layout, choices.cxl.nodes, memory)
    if not isinstance(placed, str):
        return choices, placed
    cxl = choices.cxl.without(placed)
    return replace(choices, cxl=cxl, memory=choices.plan(cxl)), None


def make_placed_pools(
    choices: Choices, memory: HostMemory, parts: Mapping[KVPart, Tensor] | None
) -> tuple[Choices, dict[Tier, KVPool]]:
    """The pools. Where what lies in the CXL tier moves away as it is pinned, all is laid out anew without the tier, as
    `place_host` has it.

    Args:
        parts: K and V of the pool in host memory, if they are placed. The caller must not hold them.
    Raises:
        ConfigError: DRAM alone does not hold what is needed.
    """
    pools = make_pools(choices, memory, parts)
    if parts is None or choices.cxl.nodes is None or not pools[Tier.DRAM].is_pinned:
        return choices, pools
    moved = find_moved_parts(choices.kv.specs[Tier.DRAM], choices.memory.host.layout, choices.cxl.nodes, parts, memory)
    if moved is None:
        return choices, pools
    del pools, parts
    cxl = choices.cxl.without(moved)
    choices = replace(choices, cxl=cxl, memory=choices.plan(cxl))
    return choices, make_pools(choices, memory)


def paced_copy(copy: CopyBlock) -> CopyBlock:
    """Another way of copying, for pools of which a part plays slower memory."""

    def copy_slowly(source: KVPool, source_id: int, target: KVPool, target_id: int) -> None:
        ends = ((source, source_id), (target, target_id))
        slow = [(pool, pool.slow, block_id) for pool, block_id in ends if pool.slow is not None]
        if not slow:
            copy(source, source_id, target, target_id)
            return
        slow_bytes = sum(tier.bytes_of_block(block_id) for _, tier, block_id in slow)
        with slow[0][1].reading(slow_bytes, sum(pool.spec.bytes_per_block for pool, _, _ in slow)):
            copy(source, source_id, target, target_id)

    return copy_slowly


def cxl_rows(choices: Choices) -> list[ReportRow]:
    """Where K and V in host memory lie, for people."""
    layout, ledger = choices.memory.host.layout, choices.memory.ledger
    if layout.mapping is KVMapping.DRAM:
        return []
    if layout.mapping is KVMapping.INTERLEAVE:
        what = "pages of K and V in turn on both tiers"
    else:
        what = "V lies in the CXL tier"
        if layout.first_cxl_layer:
            what += f", that of the first {layout.first_cxl_layer} layers in DRAM"
        if layout.num_spilled:
            what += f"; K, too, of {layout.num_spilled} of {layout.num_blocks} blocks, the oldest"
    rows = [
        ReportRow(section="kv", name="mapping", value=layout.mapping.value, why=what),
        ReportRow(
            section="kv", name="cxl_tier", value=choices.cxl.name, why=f"{format_size(choices.cxl.num_bytes)} of it"
        ),
    ]
    rows += [
        ReportRow(section="memory cxl", name=entry.owner, value=format_size(entry.num_bytes))
        for entry in ledger.entries(Tier.CXL)
    ]
    return [*rows, ReportRow(section="memory cxl", name="budget", value=format_size(ledger.budget(Tier.CXL)))]

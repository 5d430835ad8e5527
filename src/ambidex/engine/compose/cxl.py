"""The CXL tier: which node it is, or that it is emulated, or why there is none."""

from dataclasses import dataclass, replace
from typing import Final

from ambidex.core.config import EngineConfig
from ambidex.core.kv_mapping import KVMapping, SlowMemory, parse_slow_memory
from ambidex.core.units import format_size
from ambidex.hw.topology import Topology
from ambidex.storage.host_memory import HostMemory
from ambidex.storage.kv_parts import Nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class CxlTier:
    """What the CXL tier is. Without one the mapping is `dram`; `refusals` say what was asked for and not got."""

    mapping: KVMapping = KVMapping.DRAM
    num_bytes: int = 0
    nodes: Nodes | None = None
    node_free_bytes: int = 0
    slow: SlowMemory | None = None
    refusals: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What it is, for people."""
        if self.slow is not None:
            return f"emulated ({self.slow})"
        return "none" if self.nodes is None else f"NUMA node {self.nodes.cxl}"

    def without(self, reason: str) -> "CxlTier":
        """No tier, after it was refused."""
        return CxlTier(refusals=(*self.refusals, reason))


NO_TIER: Final = CxlTier()


def choose_cxl(config: EngineConfig, memory: HostMemory) -> CxlTier:
    """What the settings and the machine make of it. What the machine has not is a refusal, not an error."""
    if config.cxl_memory is None:
        return NO_TIER
    if config.emulate_cxl is not None:
        return CxlTier(
            mapping=config.kv_layout, num_bytes=config.cxl_memory, slow=parse_slow_memory(config.emulate_cxl)
        )
    topology = memory.topology()
    cxl = _find_node(config.cxl_node, topology)
    local = topology.local_node
    if isinstance(cxl, str):
        return NO_TIER.without(cxl)
    if local is None or local.node_id == cxl:
        return NO_TIER.without(f"node {cxl} is where this process's cores are: name another with --cxl-node")
    free = next(node.free_bytes for node in topology.numa_nodes if node.node_id == cxl)
    tier = CxlTier(
        mapping=config.kv_layout,
        num_bytes=min(config.cxl_memory, free),
        nodes=Nodes(cxl=cxl, local=local.node_id),
        node_free_bytes=free,
    )
    if free == 0:
        return NO_TIER.without(f"node {cxl} has no free memory")
    if free >= config.cxl_memory:
        return tier
    less = f"node {cxl} has {format_size(free)} free of {format_size(config.cxl_memory)} that are asked for"
    return replace(tier, refusals=(less,))


def _find_node(asked: int | None, topology: Topology) -> int | str:
    """The node of the CXL tier, or why there is none."""
    known = ", ".join(str(node.node_id) for node in topology.numa_nodes)
    if asked is None:
        found = topology.cxl_nodes
        if found:
            return found[0].node_id
        return f"this machine has no NUMA node of memory alone that this process may use (nodes: {known})"
    node = next((node for node in topology.numa_nodes if node.node_id == asked), None)
    if node is None:
        return f"node {asked} is not there, or has gone (nodes: {known})"
    if not node.is_allowed:
        return f"this process's cpuset leaves out node {asked}"
    return asked if node.memory_bytes else f"node {asked} has no memory"

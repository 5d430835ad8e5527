"""Which parts of the data plane are replaced by ones that tell a tracer what they do: all here, in one place."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ambidex.attention.cpu import CPULane
from ambidex.attention.readers import Reader
from ambidex.attention.traced import CudaClock, HostClock, TracedCPULane, TracedReader
from ambidex.core.ids import Tier
from ambidex.core.trace import Tracer, Track
from ambidex.storage.copy import CopyBlock
from ambidex.storage.kv_pool import KVPool


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTracing:
    """What stands in for plain parts; where nobody keeps a timeline, None and the plain `copy`.

    `wrap` and `cpu_lane` are for `TieredAttention`, `copy` for `CopyEngine`, `device_clock` (only on a GPU) for
    `ModelRunner`.
    """

    copy: CopyBlock
    wrap: Callable[[Tier, Reader], Reader] | None = None
    cpu_lane: CPULane | None = None
    device_clock: CudaClock | None = None


def trace_lanes(tracer: Tracer, device: torch.device, copy: CopyBlock) -> LaneTracing:
    """The parts for a tracer.

    Args:
        copy: how a block is copied.
    """
    if not tracer.is_on:
        return LaneTracing(copy=copy)
    host = HostClock(tracer)
    device_clock = CudaClock(tracer, device) if device.type == "cuda" else None
    accelerator = device_clock or host

    def wrap(tier: Tier, reader: Reader) -> Reader:
        if tier is Tier.GPU:
            return TracedReader(reader, accelerator, Track.GPU_LANE)
        return TracedReader(reader, host, Track.CPU_LANE)

    def traced_copy(source: KVPool, source_id: int, target: KVPool, target_id: int) -> None:
        with accelerator.measure(Track.COPIES, f"block {source_id} from {source.tier} to {target.tier}"):
            copy(source, source_id, target, target_id)

    return LaneTracing(wrap=wrap, cpu_lane=TracedCPULane(host), copy=traced_copy, device_clock=device_clock)

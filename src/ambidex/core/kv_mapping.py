"""How K and V in host memory are laid over DRAM and the CXL tier, as plain values.

                     K                                  V                        who reads the slower tier
    dram             DRAM                               DRAM                     nobody
    k-dram-v-cxl     DRAM; the oldest in CXL            CXL; the first layers    DMA to the accelerator; the CPU, where
                     where DRAM is full                 in DRAM if it is full    it computes with V itself
    interleave       pages in turn on both              the same                 everybody

Source of the last two: arXiv:2604.18529, "semantic-aware mapping" and its rival.
"""

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from ambidex.core.errors import ConfigError
from ambidex.core.ids import KVPart


class KVMapping(StrEnum):
    """Where K and V of blocks in host memory lie. `auto`: K in DRAM and V in the CXL tier if it has a budget."""

    AUTO = "auto"
    DRAM = "dram"
    K_DRAM_V_CXL = "k-dram-v-cxl"
    INTERLEAVE = "interleave"


_TIME: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ns|us|µs)\s*")
_RATE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(MB|GB)(?:/s)?\s*", re.IGNORECASE)
_SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6}
_BYTES: Final = {"mb": 1e6, "gb": 1e9}
MAX_LATENCY_S: Final = 1e-3
"""Longer than any memory's: what is meant is another unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowMemory:
    """A memory that is emulated: each read or copy of it takes at least its latency and its bytes at its rate."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        """What one read of so many bytes takes at least; nothing for none."""
        return self.latency_s + num_bytes / self.bytes_per_s if num_bytes > 0 else 0.0

    def __str__(self) -> str:
        return f"{self.latency_s * 1e9:g} ns, {self.bytes_per_s / 1e9:g} GB/s"


def parse_slow_memory(text: str) -> SlowMemory:
    """Read `LATENCY,BANDWIDTH`, such as `300ns,20GB/s`.

    Raises:
        ConfigError: it is something else, or no memory's.
    """
    latency, comma, rate = text.partition(",")
    time, speed = _TIME.fullmatch(latency), _RATE.fullmatch(rate)
    if not comma or time is None or speed is None:
        raise ConfigError(
            f"`emulate_cxl` is {text[:60]!r}: it must be a latency in ns or us and a rate in MB/s or GB/s, such as "
            f"300ns,20GB/s"
        )
    latency_s = float(time[1]) * _SECONDS[time[2]]
    bytes_per_s = float(speed[1]) * _BYTES[speed[2].lower()]
    if not (0 <= latency_s <= MAX_LATENCY_S and math.isfinite(bytes_per_s) and bytes_per_s > 0):
        raise ConfigError(
            f"`emulate_cxl` is {text[:60]!r}: the latency must be at most {MAX_LATENCY_S * 1e6:.0f} us, the rate above "
            f"0"
        )
    return SlowMemory(latency_s=latency_s, bytes_per_s=bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLayout:
    """Which bytes of the blocks in host memory lie in the CXL tier. `mapping` is one of the three, never `auto`.

    Blocks 0 … `num_near` − 1 have K in DRAM, the `num_spilled` behind them in the CXL tier. V of layers from
    `first_cxl_layer` on lies in the CXL tier. Where pages are interleaved, no block is spilled.
    """

    mapping: KVMapping
    num_near: int
    num_spilled: int = 0
    first_cxl_layer: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in host memory."""
        return self.num_near + self.num_spilled

    def cxl_share(self, part: KVPart, layer_idx: int) -> float:
        """Share of the bytes of K or V of a layer that lie in the CXL tier, of blocks that are not spilled."""
        if self.mapping is KVMapping.INTERLEAVE:
            return 0.5
        is_far = self.mapping is KVMapping.K_DRAM_V_CXL and part is KVPart.V and layer_idx >= self.first_cxl_layer
        return float(is_far)

"""How fast the CPU multiplies with weights in DRAM and how fast the link brings them, measured when an engine starts,
and what follows for steps of each size.

    cpu(T)   bytes of weights a second with T tokens: what DRAM gives, or operations a second · bytes a number / (2 · T)
    link     bytes a second of a pinned copy

Both lanes end together when the CPU takes cpu(T) / (cpu(T) + link) of the bytes in DRAM.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ambidex.core.units import MIB
from ambidex.kernels.linear import LinearContext
from ambidex.mlp.parts import Part
from ambidex.mlp.split_site import Level

TOKENS: Final = (1, 4, 8, 16, 32, 64, 128)
"""Sizes of steps that are measured; a step in between has the level of the next larger one."""
_PROBE_BYTES: Final = 512 * MIB
"""Of weights read for each figure: more than the caches of a server CPU's cores hold."""
_NUM_PROBES: Final = 2
_AS_FAST: Final = 0.95
"""Of the rate of torch's products, from which native ones are taken: they are recorded, one call for all of a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRates:
    """Bytes of weights a second: of the CPU by tokens of a step, and of the link."""

    cpu: dict[int, float]
    link: float
    most_native_tokens: int
    """Up to which the native products are the faster ones."""

    def levels(self, *, on_cpu: int, streamed: int) -> list[Level]:
        """What the CPU takes of its part in steps of each size; nothing where it would take less than a tenth.

        Args:
            on_cpu, streamed: bytes in DRAM of its part, and of what always travels.
        """
        made = []
        for num_tokens, rate in self.cpu.items():
            share = (on_cpu + streamed) / max(1, on_cpu) * rate / (rate + self.link)
            if share < 0.1:
                break
            made.append(Level(most_tokens=num_tokens, cpu_share=min(1.0, share)))
        return made


def keep_whole(levels: Sequence[Level], most_tokens: int) -> list[Level]:
    """The same levels, but in steps of up to `most_tokens` the CPU multiplies all of its part: a solver has divided
    what lies in DRAM for such steps, and has counted that both lanes read it."""
    return [Level(most_tokens=most_tokens, cpu_share=1.0), *(lv for lv in levels if lv.most_tokens > most_tokens)]


def measure_rates(
    parts: Sequence[Part], linear: LinearContext, chunks: Sequence[Tensor], slots: Sequence[Tensor]
) -> LaneRates:
    """Measure both lanes, one after the other.

    Args:
        parts, linear: as in `measure_cpu`.
        chunks, slots: what travels, and where to; on a GPU.
    """
    cpu, most_native_tokens = measure_cpu(parts, linear)
    return LaneRates(cpu=cpu, link=_link_rate(chunks, slots), most_native_tokens=most_native_tokens)


def measure_cpu(parts: Sequence[Part], linear: LinearContext) -> tuple[dict[int, float], int]:
    """Bytes of weights a second that the CPU multiplies, by tokens, and up to how many the native products are faster.

    Quantised weights have native products alone, which is nothing to find out.

    Args:
        parts: what the CPU multiplies, with weights in DRAM.
        linear: what their products share; how it multiplies is set to what is found.
    Cost: about half a second for weights that do not fit the caches.
    """
    plain_parts = [part for part in parts if not part.is_quantized]
    if not plain_parts:
        linear.most_native_tokens = TOKENS[-1]
        some = _take(parts, _PROBE_BYTES)
        return {num: _cpu_rate(some, torch.randn(num, some[0].num_in)) for num in TOKENS}, TOKENS[-1]
    some = _take(plain_parts, _PROBE_BYTES)
    # By native tokens (all or none), and whether torch's products have the weights first.
    rates: dict[tuple[int, bool], dict[int, float]] = {}
    for most, weight_first in ((TOKENS[-1], False), (0, False), (0, True)):
        linear.most_native_tokens, linear.weight_first = most, weight_first
        rates[most, weight_first] = {num: _cpu_rate(some, torch.randn(num, some[0].num_in)) for num in TOKENS}
    native = rates[TOKENS[-1], False]
    linear.weight_first = sum(list(rates[0, True].values())[-3:]) > sum(list(rates[0, False].values())[-3:])
    plain = rates[0, linear.weight_first]
    linear.most_native_tokens = max((num for num in TOKENS if native[num] >= _AS_FAST * plain[num]), default=0)
    cpu = {num: native[num] if num <= linear.most_native_tokens else plain[num] for num in TOKENS}
    return cpu, linear.most_native_tokens


def _cpu_rate(parts: Sequence[Part], x: Tensor) -> float:
    best = 0.0
    for _ in range(_NUM_PROBES):
        start = time.perf_counter()
        for part in parts:
            part(x)
        best = max(best, sum(part.num_bytes for part in parts) / (time.perf_counter() - start))
    return best


def _link_rate(chunks: Sequence[Tensor], slots: Sequence[Tensor]) -> float:
    best = 0.0
    for _ in range(_NUM_PROBES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        num_bytes = 0
        for chunk in chunks:
            slots[0][: chunk.numel()].view(torch.int64).copy_(chunk.view(torch.int64), non_blocking=True)
            num_bytes += chunk.nbytes
            if num_bytes >= _PROBE_BYTES:
                break
        torch.cuda.synchronize()
        best = max(best, num_bytes / (time.perf_counter() - start))
    return best


def _take(parts: Sequence[Part], num_bytes: int) -> list[Part]:
    """The first parts of one width that together have so many bytes."""
    taken: list[Part] = []
    for part in parts:
        if part.num_in == parts[0].num_in:
            taken.append(part)
            num_bytes -= part.num_bytes
        if num_bytes <= 0:
            break
    return taken

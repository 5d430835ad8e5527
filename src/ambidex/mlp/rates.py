"""How fast the CPU multiplies with weights in DRAM and how fast the link brings them, measured when an engine starts,
and what follows for steps of each size.

    cpu(T)   bytes of weights a second with T tokens: what DRAM gives, or operations a second · bytes a number / (2 · T)
    link     bytes a second of a pinned copy
    beside   bytes a second of both together, with one token: DRAM serves both

Both lanes end together when the CPU takes c / (c + link) of the bytes in DRAM, c = min(cpu(T), beside − link). Where
the CPU leaves out neurons, it reads a share r of its bytes: with a share s of all for the CPU DRAM needs
(s r + 1 − s) / beside, which falls with s, and the CPU s / cpu(T), which grows: s is where they meet, if the link does
not need more.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from ambidex.core.errors import UnrecordableError
from ambidex.core.units import MIB
from ambidex.kernels.cpu.recorded import Arena, Program, Recording
from ambidex.kernels.linear import LinearContext
from ambidex.mlp.host_lane import HostSide
from ambidex.mlp.split_site import Level

TOKENS: Final = (1, 4, 8, 16, 32, 64, 128)
"""Sizes of steps that are measured; a step in between has the level of the next larger one."""
_PROBE_BYTES: Final = 512 * MIB
"""Of weights read for each figure: more than the caches of a server CPU's cores hold."""
_NUM_PROBES: Final = 2
_NUM_BESIDE: Final = 5
_LEAST_LEFT: Final = 0.1
"""Of what DRAM gives, for the CPU: a measurement that leaves it less is one of a machine that others use."""
_PIECE_BYTES: Final = 8 * MIB
"""Of copies beside the CPU, that are counted one by one."""
_AS_FAST: Final = 0.95
"""Of the rate of torch's products, from which native ones are taken: they are recorded, one call for all of a place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneRates:
    """Bytes of weights a second: of the CPU by tokens of a step, and of the link."""

    cpu: dict[int, float]
    link: float
    most_native_tokens: int
    """Up to which the native products are the faster ones."""
    beside: float = math.inf
    """Of both at once, one token a step; inf: they do not get in each other's way."""
    reads: float = 1.0
    """Share of its bytes that the CPU reads; the rates count them all."""

    def levels(self, *, on_cpu: int, streamed: int) -> list[Level]:
        """What the CPU takes of its part in steps of each size; nothing where it would take less than a tenth.

        Args:
            on_cpu, streamed: bytes in DRAM of its part, and of what always travels.
        """
        made = []
        for num_tokens, rate in self.cpu.items():
            share = (on_cpu + streamed) / max(1, on_cpu) * self._cpu_share(rate)
            if share < 0.1:
                break
            made.append(Level(most_tokens=num_tokens, cpu_share=min(1.0, share)))
        return made

    def _cpu_share(self, rate: float) -> float:
        """Of all bytes in DRAM, for the CPU."""
        if self.beside == math.inf:
            return rate / (rate + self.link)
        if self.reads < 1.0:
            return max(rate / (rate + self.link), 1.0 / (self.beside / rate + 1.0 - self.reads))
        rate = min(rate, max(self.beside - self.link, _LEAST_LEFT * self.beside))
        return rate / (rate + self.link)


def keep_whole(levels: Sequence[Level], most_tokens: int) -> list[Level]:
    """The same levels, but in steps of up to `most_tokens` the CPU multiplies all of its part: a solver has divided
    what lies in DRAM for such steps, and has counted that both lanes read it."""
    return [Level(most_tokens=most_tokens, cpu_share=1.0), *(lv for lv in levels if lv.most_tokens > most_tokens)]


def measure_rates(
    sides: Sequence[HostSide], linear: LinearContext, chunks: Sequence[Tensor], slots: Sequence[Tensor]
) -> LaneRates:
    """Measure both lanes, one after the other.

    Args:
        sides, linear: as in `measure_cpu`.
        chunks, slots: what travels, and where to; on a GPU.
    """
    cpu, most_native_tokens = measure_cpu(sides, linear)
    return LaneRates(
        cpu=cpu,
        link=_link_rate(chunks, slots),
        most_native_tokens=most_native_tokens,
        beside=_rate_beside(sides, linear, chunks, slots),
    )


@torch.inference_mode()
def measure_cpu(sides: Sequence[HostSide], linear: LinearContext) -> tuple[dict[int, float], int]:
    """Bytes of weights a second that the CPU multiplies, by tokens, and up to how many the native products are faster.

    Both forms are measured as a captured step has them: native products are recorded, all of a place as one program.
    Quantised weights have native products alone, which is nothing to find out.

    Args:
        sides: what the CPU multiplies, with weights in DRAM.
        linear: what their products share; how it multiplies is set to what is found.
    Cost: about half a second for weights that do not fit the caches.
    """
    plain_sides = [side for side in sides if not side.parts[0].is_quantized]
    some = _take(plain_sides or sides, _PROBE_BYTES)
    linear.most_native_tokens = TOKENS[-1]
    native = {num: _native_rate(some, num, linear) for num in TOKENS}
    if not plain_sides:
        return native, TOKENS[-1]
    plain: dict[bool, dict[int, float]] = {}  # by whether torch's products have the weights first
    linear.most_native_tokens = 0
    for weight_first in (False, True):
        linear.weight_first = weight_first
        plain[weight_first] = {num: _rate(some, _Step(some, num).run) for num in TOKENS}
    linear.weight_first = sum(list(plain[True].values())[-3:]) > sum(list(plain[False].values())[-3:])
    torchs = plain[linear.weight_first]
    linear.most_native_tokens = max((num for num in TOKENS if native[num] >= _AS_FAST * torchs[num]), default=0)
    cpu = {num: native[num] if num <= linear.most_native_tokens else torchs[num] for num in TOKENS}
    return cpu, linear.most_native_tokens


class _Step:
    """What a step does for some places, x and answers in the formats in which they cross the link."""

    def __init__(self, sides: Sequence[HostSide], num_tokens: int) -> None:
        self._sides = sides
        first = sides[0].parts[0].numbers.ins[0]
        dtype = first.dtype if isinstance(first, Tensor) else torch.bfloat16
        self._x = torch.randn(num_tokens, sides[0].shape.num_in).to(dtype)
        self._answers = [torch.empty(num_tokens, side.answer_width) for side in sides]

    def run(self) -> None:
        """Compute all places, op by op."""
        for side, answer in zip(self._sides, self._answers, strict=True):
            answer.copy_(side.compute(self._x.float()))

    def record(self) -> Program | None:
        """The same as one program; None: an op has no native form."""
        recording = Recording(Arena())
        try:
            with recording:
                self.run()
        except UnrecordableError:
            return None
        recording.program.keep(self)
        return recording.program


def _native_rate(sides: Sequence[HostSide], num_tokens: int, linear: LinearContext) -> float:
    """Of products that are recorded, if they can be."""
    step = _Step(sides, num_tokens)
    can_record = linear.pool is not None and all(side.is_recordable for side in sides)
    program = step.record() if can_record else None
    return _rate(sides, step.run if program is None else program.run)


@torch.inference_mode()
def _rate_beside(
    sides: Sequence[HostSide], linear: LinearContext, chunks: Sequence[Tensor], slots: Sequence[Tensor]
) -> float:
    """Bytes a second that the CPU multiplies, with one token, and that copies bring meanwhile."""
    some = _take(sides, _PROBE_BYTES)
    step = _Step(some, 1)
    program = step.record() if linear.pool is not None else None
    num_bytes = sum(side.num_bytes for side in some)
    size = min(_PIECE_BYTES, slots[0].numel())
    pieces = [chunk[start : start + size] for chunk in chunks for start in range(0, chunk.numel(), size)]
    samples = []
    for _ in range(_NUM_BESIDE):
        torch.cuda.synchronize()
        ends: list[tuple[torch.cuda.Event, int]] = []
        left = 2 * num_bytes  # copies go on for longer than the CPU takes
        for piece in itertools.cycle(pieces):
            slots[0][: piece.numel()].copy_(piece, non_blocking=True)
            ends.append((torch.cuda.current_stream().record_event(), piece.numel()))
            left -= piece.numel()
            if left <= 0:
                break
        before = _count_ended(ends)
        start = time.perf_counter()
        if program is not None:
            program.run()
        else:
            step.run()
        seconds = time.perf_counter() - start
        samples.append((num_bytes + _count_ended(ends) - before) / seconds)
        torch.cuda.synchronize()
    return statistics.median(samples)


def _count_ended(ends: Sequence[tuple[torch.cuda.Event, int]]) -> int:
    """Bytes of copies that have ended."""
    ended = 0
    for end, num_bytes in ends:
        ended += num_bytes if end.query() else 0  # type: ignore[no-untyped-call]  # torch has no types here
    return ended


def _rate(sides: Sequence[HostSide], run: Callable[[], object]) -> float:
    best = 0.0
    for _ in range(_NUM_PROBES):
        start = time.perf_counter()
        run()
        best = max(best, sum(side.num_bytes for side in sides) / (time.perf_counter() - start))
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


def _take(sides: Sequence[HostSide], num_bytes: int) -> list[HostSide]:
    """The first sides of one width that together have so many bytes."""
    taken: list[HostSide] = []
    for side in sides:
        if side.shape.num_in == sides[0].shape.num_in:
            taken.append(side)
            num_bytes -= side.num_bytes
        if num_bytes <= 0:
            break
    return taken

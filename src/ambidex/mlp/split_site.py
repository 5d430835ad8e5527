"""`SplitSite`: a place of a model whose weights lie on several tiers, each part multiplied by its own lane.

    GPU         its own rows         | chunk | chunk | …            | joins all
    link      … chunk | chunk | chunk of the next place …           runs ahead through the whole step
    CPU         rows in DRAM, where they lie                        | answer

It stands in for the layers of the place, which a model calls as always.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ambidex.core.ids import Lane
from ambidex.mlp.cuts import SiteShape
from ambidex.mlp.host_lane import Answer, HostSide
from ambidex.mlp.parts import Part, join
from ambidex.storage.weight_ring import Lap, WeightRing


@dataclass(frozen=True, slots=True)
class StreamedPart:
    """A part whose numbers travel: chunk `place` of a lap."""

    lap: Lap
    place: int
    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class HostParts:
    """What becomes of a place's rows in DRAM in steps of some size."""

    side: HostSide | None
    """What the CPU multiplies."""
    streamed: tuple[StreamedPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Steps of up to `most_tokens` tokens, and the share of its rows that the CPU multiplies in them.

    The rest of them travels to the accelerator like the rows that always do: with many tokens the CPU's time is that of
    products, not of reading, and the link is the faster way.
    """

    most_tokens: int
    cpu_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """A place where the CPU has a part, and when in a step it comes."""

    side: HostSide
    layer_idx: int | None
    """None: behind all layers."""
    is_before_attention: bool

    def __str__(self) -> str:
        if self.layer_idx is None:
            return "the last projection"
        part = "MLP" if self.side.shape.num_out else "projections" if self.is_before_attention else "attention's output"
        return f"layer {self.layer_idx}, {part}"


BeginHost = Callable[[HostSide, Tensor], Callable[[], Answer]]


class WeightLanes:
    """What all places of a model share.

    Args:
        ring: brings what is streamed.
        dtype: of x.
        most_native_tokens: of a step in which the CPU's products are native ones alone, which can be recorded.
        levels: ascending in tokens; beyond the last one the CPU multiplies nothing.
        begin_host: the CPU lane, see `HostLane.begin`.
        owner: of the memory in DRAM, which is pinned as long as it lives.
    """

    def __init__(
        self,
        ring: WeightRing,
        *,
        dtype: torch.dtype,
        most_native_tokens: int,
        levels: Sequence[Level],
        begin_host: BeginHost,
        owner: object,
    ) -> None:
        self.ring = ring
        self.dtype = dtype
        self.most_native_tokens = most_native_tokens
        self.begin_host = begin_host
        self._owner = owner
        self.set_levels(levels)

    def set_levels(self, levels: Sequence[Level]) -> None:
        """Begin anew, with other levels or the same: places and what travels are to be said again."""
        self.levels = (*levels, Level(most_tokens=sys.maxsize, cpu_share=0.0))
        self._places: list[list[HostPlace]] = [[] for _ in self.levels]
        self._laps: list[Lap | None] = [None] * len(self.levels)

    def is_native(self, num_tokens: int) -> bool:
        """Whether the CPU's products of such steps can be recorded."""
        return num_tokens <= self.most_native_tokens

    def level_of(self, num_tokens: int) -> int:
        """The index of the level of a step."""
        return next(index for index, level in enumerate(self.levels) if num_tokens <= level.most_tokens)

    def set_lap(self, level: int, lap: Lap) -> None:
        """Say what travels in a step."""
        self._laps[level] = lap

    def num_bytes(self, num_tokens: int) -> dict[Lane, int]:
        """Bytes of weights in DRAM that the CPU multiplies, and that cross the link, in a step of so many tokens."""
        lap = self._laps[self.level_of(num_tokens)]
        parts = [part for place in self.places(num_tokens) for part in place.side.parts]
        return {
            Lane.CPU: sum(part.num_bytes for part in parts),
            Lane.STREAM: sum(chunk.nbytes for chunk in lap.chunks) if lap is not None else 0,
        }

    def add_place(self, level: int, place: HostPlace) -> None:
        """Add a place where the CPU has a part, behind those that come before it in a step."""
        self._places[level].append(place)

    def places(self, num_tokens: int) -> Sequence[HostPlace]:
        """Where the CPU has a part in steps of so many tokens, in the order of use."""
        return self._places[self.level_of(num_tokens)]

    @contextmanager
    def handing_over(self, begin_host: BeginHost) -> Iterator[None]:
        """Launch steps whose CPU lane is another."""
        usual, self.begin_host = self.begin_host, begin_host
        try:
            yield
        finally:
            self.begin_host = usual


class SplitSite:
    """Computes a place.

    Args:
        on_gpu: the accelerator's own rows, which are always there; None: there are none.
        resident: more of them, behind those.
        levels: the others, by level.
        sizes: widths of the answers, one for each matrix, or one.
        bias: [answer_width] on the accelerator, added at the end; None: there is none.
    """

    def __init__(
        self,
        shape: SiteShape,
        on_gpu: Part | None,
        levels: Sequence[HostParts],
        lanes: WeightLanes,
        *,
        sizes: Sequence[int],
        bias: Tensor | None,
        resident: Sequence[Part] = (),
    ) -> None:
        self._shape = shape
        self._on_gpu = (*([on_gpu] if on_gpu is not None else ()), *resident)
        self._levels = tuple(levels)
        self._lanes = lanes
        self._sizes = list(sizes)
        self._bias = bias

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, K] → [T, N] for each matrix, in the dtype of x."""
        lanes = self._lanes
        host = self._levels[lanes.level_of(x.shape[0])]
        answer = lanes.begin_host(host.side, x) if host.side is not None else None
        is_counted = answer is not None  # where the CPU counts its own
        products = [(part.rows, part(x, is_counted=is_counted)) for part in self._on_gpu]
        for streamed in host.streamed:
            lanes.ring.take(streamed.lap, streamed.place)
            products.append((streamed.part.rows, streamed.part(x)))
            lanes.ring.free(streamed.lap, streamed.place)
        if answer is not None:
            products.append(answer())
        y = join(self._shape, products, x.dtype)
        if self._bias is not None:
            y = y + self._bias
        if len(self._sizes) == 1:
            return (y,)
        split = torch.split(y, self._sizes, dim=-1)
        return tuple(part.contiguous() for part in split) if y.device.type == "cpu" else split

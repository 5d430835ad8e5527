"""`SplitSite`: a place of a model whose weights lie on several tiers, each part multiplied by its own lane.

    GPU         its own rows         | chunk | chunk | …            | joins all
    link      … chunk | chunk | chunk of the next place …           runs ahead through the whole step
    CPU         rows in DRAM, where they lie                        | answer

It stands in for the layers of the place, which a model calls as always.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

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
class SiteParts:
    """Who computes what."""

    on_gpu: Part | None
    host: HostSide | None
    few: tuple[StreamedPart, ...]
    """In steps of few tokens: what the CPU does not multiply."""
    many: tuple[StreamedPart, ...]
    """In steps of many tokens: all that lies in DRAM, since products, not reading, would take the CPU's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlace:
    """A place where the CPU has a part, and when in a step it comes."""

    side: HostSide
    layer_idx: int | None
    """None: behind all layers."""
    is_before_attention: bool


BeginHost = Callable[[HostSide, Tensor], Callable[[], Answer]]


class WeightLanes:
    """What all places of a model share.

    Args:
        ring: brings what is streamed.
        dtype: of x.
        most_cpu_tokens: tokens of a step up to which the CPU multiplies.
        begin_host: the CPU lane, see `HostLane.begin`.
        owner: of the memory in DRAM, which is pinned as long as it lives.

    Attributes:
        places: where the CPU has a part, in the order of use.
    """

    def __init__(
        self,
        ring: WeightRing,
        *,
        dtype: torch.dtype,
        most_cpu_tokens: int,
        begin_host: BeginHost,
        owner: object,
    ) -> None:
        self.ring = ring
        self.dtype = dtype
        self.most_cpu_tokens = most_cpu_tokens
        self.begin_host = begin_host
        self.places: list[HostPlace] = []
        self._owner = owner

    def has_host(self, num_tokens: int) -> bool:
        """Whether the CPU has a part in steps of so many tokens."""
        return bool(self.places) and num_tokens <= self.most_cpu_tokens

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
        sizes: widths of the answers, one for each matrix, or one.
        bias: [answer_width] on the accelerator, added at the end; None: there is none.
    """

    def __init__(
        self, shape: SiteShape, parts: SiteParts, lanes: WeightLanes, *, sizes: Sequence[int], bias: Tensor | None
    ) -> None:
        self._shape = shape
        self._parts = parts
        self._lanes = lanes
        self._sizes = list(sizes)
        self._bias = bias

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """x [T, K] → [T, N] for each matrix, in the dtype of x."""
        parts = self._parts
        is_few = x.shape[0] <= self._lanes.most_cpu_tokens
        answer = self._lanes.begin_host(parts.host, x) if is_few and parts.host is not None else None
        products = [(parts.on_gpu.rows, parts.on_gpu(x))] if parts.on_gpu is not None else []
        for streamed in parts.few if is_few else parts.many:
            self._lanes.ring.take(streamed.lap, streamed.place)
            products.append((streamed.part.rows, streamed.part(x)))
            self._lanes.ring.free(streamed.lap, streamed.place)
        if answer is not None:
            products.append(answer())
        y = join(self._shape, products, x.dtype)
        if self._bias is not None:
            y = y + self._bias
        if len(self._sizes) == 1:
            return (y,)
        split = torch.split(y, self._sizes, dim=-1)
        return tuple(part.contiguous() for part in split) if y.device.type == "cpu" else split

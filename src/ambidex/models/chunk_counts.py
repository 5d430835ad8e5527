"""From a placement to how many chunks of each place lie where, and back: numbers only.

chunks of a place in DRAM    0 … near | … on_cpu | … N      near: on the accelerator, too; the last ones travel
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.layers.mlp import Neurons
from ambidex.models.site_plans import ALIGNMENT_BYTES, SitePlan


@dataclass(frozen=True, slots=True)
class ChunkCounts:
    """Of one place: the chunks on the accelerator, and how many of the next ones are the CPU's part."""

    near: int
    on_cpu: int


def find_counts(
    plans: Sequence[SitePlan], placement: Placement, *, number_bytes: int, most_bytes: int
) -> tuple[ChunkCounts, ...]:
    """The whole chunks that come nearest to a placement, errors of one place made good by the next.

    Args:
        number_bytes: of a plain number.
        most_bytes: that chunks may take on the accelerator.
    """
    found: list[ChunkCounts] = []
    left, more, more_on_cpu = most_bytes, 0.0, 0.0
    for plan in plans:
        split = _split_of(plan, placement)
        sizes = chunk_bytes(plan, number_bytes)
        fixed = plan.shape.num_bytes(len(plan.cuts.on_gpu), number_bytes)
        wanted = split.on_gpu * (fixed + sum(sizes)) - fixed + more
        near = taken = 0
        while near < len(sizes) and taken + sizes[near] / 2 <= wanted and sizes[near] <= left - taken:
            taken += sizes[near]
            near += 1
        left -= taken
        largest = max(sizes, default=0) / 2
        more = min(largest, max(-largest, wanted - taken))
        rest, away = len(sizes) - near, split.on_cpu + split.streamed
        share = rest * split.on_cpu / away + more_on_cpu if away else float(rest)
        on_cpu = min(rest, max(0, int(share + 0.5)))
        more_on_cpu = min(0.5, max(-0.5, share - on_cpu)) if away and rest else more_on_cpu
        found.append(ChunkCounts(near, on_cpu))
    return tuple(found)


def placement_of(
    plans: Sequence[SitePlan], counts: Sequence[ChunkCounts], num_layers: int, *, number_bytes: int
) -> Placement:
    """The shares, in bytes, that chunks make of each part of a placement."""
    sums: dict[tuple[int | None, bool], list[int]] = {}
    for plan, count in zip(plans, counts, strict=True):
        sizes = chunk_bytes(plan, number_bytes)
        fixed = plan.shape.num_bytes(len(plan.cuts.on_gpu), number_bytes)
        end = count.near + count.on_cpu
        parts = (fixed + sum(sizes[: count.near]), sum(sizes[count.near : end]), sum(sizes[end:]))
        total = sums.setdefault((plan.layer_idx, isinstance(plan.site, Neurons)), [0, 0, 0])
        for lane, num_bytes in enumerate(parts):
            total[lane] += num_bytes

    def split(layer_idx: int | None, *, is_mlp: bool) -> WeightSplit:
        gpu, cpu, streamed = sums.get((layer_idx, is_mlp), [1, 0, 0])
        whole = gpu + cpu + streamed
        on_gpu = max(0.0, 1.0 - cpu / whole - streamed / whole)  # below 0 by rounding where nothing lies there
        return WeightSplit(on_gpu=on_gpu, on_cpu=cpu / whole, streamed=streamed / whole)

    layers = tuple(
        LayerPlacement(attention=split(idx, is_mlp=False), mlp=split(idx, is_mlp=True)) for idx in range(num_layers)
    )
    return Placement(layers=layers, head=split(None, is_mlp=False))


def chunk_bytes(plan: SitePlan, number_bytes: int) -> list[int]:
    """Bytes of each chunk of a place, with what alignment takes."""
    sizes = [plan.shape.num_bytes(len(rows), number_bytes) for rows in plan.cuts.chunks]
    return [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]


def waiting_chunks(now: Sequence[int], target: Sequence[ChunkCounts]) -> Iterator[tuple[int, int]]:
    """Places and chunks that are to come to the accelerator, place after place."""
    for place, (num, count) in enumerate(zip(now, target, strict=True)):
        for index in range(num, count.near):
            yield place, index


def _split_of(plan: SitePlan, placement: Placement) -> WeightSplit:
    if plan.layer_idx is None:
        return placement.head
    layer = placement.layers[plan.layer_idx]
    return layer.mlp if isinstance(plan.site, Neurons) else layer.attention

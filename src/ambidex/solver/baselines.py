"""Simple placements, as other systems have them: what the solver is held against, and never worse than.

all_gpu        everything in GPU memory
layer_split    whole layers on the GPU while they fit, the others on the CPU; keys follow (llama.cpp's -ngl)
all_streamed   weights in DRAM, all of them travel in every step (FlexGen's streaming); keys on the GPU while they fit
all_cpu        weights in DRAM, multiplied there
weights_first  weights fill the GPU evenly over layers, the CPU has the rest; keys take what is left
kv_first       keys fill the GPU, weights take what is left
half_half      each may have half of what is free
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.cost.workload import KVShares
from ambidex.solver.problem import MARGIN_BYTES, PlacementProblem

ON_CPU: Final = WeightSplit(on_gpu=0.0, on_cpu=1.0)
STREAMED: Final = WeightSplit(on_gpu=0.0, streamed=1.0)

Candidate = tuple[Placement, KVShares]


def simple_placements(problem: PlacementProblem) -> Iterator[tuple[str, Placement, KVShares]]:
    """All that can be made for a problem without pins; whether they fit is for the caller to look at."""
    for name, make in BASELINES.items():
        for keys_on_cpu in (True, False):
            candidate = make(problem, keys_on_cpu)
            if candidate is not None:
                yield name, *candidate


def keys_in(problem: PlacementProblem, free_bytes: float, *, on_cpu: bool) -> KVShares | None:
    """Keys fill so many bytes of GPU memory; the rest is attended by the CPU, or streamed as far as it can be.

    None: too few bytes.
    """
    units = problem.units
    share = min(1.0, free_bytes / units.kv_gpu_bytes)
    if share < units.least_kv_on_gpu:
        return None
    return _divide_keys(problem, share, on_cpu=on_cpu)


def _divide_keys(problem: PlacementProblem, on_gpu: float, *, on_cpu: bool) -> KVShares:
    streamed = 0.0 if on_cpu else min(1 - on_gpu, problem.most_kv_streamed)
    return KVShares(on_gpu=on_gpu, on_cpu=1 - on_gpu - streamed, streamed=streamed)


def _free(problem: PlacementProblem) -> float:
    head = problem.units.head_bytes if problem.is_head_whole else 0
    return problem.gpu_bytes - problem.gpu_fixed_bytes - problem.ring_bytes - head - MARGIN_BYTES


def _head_bytes(problem: PlacementProblem) -> int:
    """Of a head that may be divided."""
    return 0 if problem.is_head_whole else problem.units.head_bytes


def _kv_bytes(problem: PlacementProblem, kv: KVShares) -> float:
    return max(problem.least_kv_bytes, kv.on_gpu * problem.units.kv_gpu_bytes)


def _layer_bytes(problem: PlacementProblem) -> list[int]:
    return [layer.attention_bytes + layer.mlp_bytes for layer in problem.units.layers]


def _head(problem: PlacementProblem, split: WeightSplit) -> WeightSplit:
    return WeightSplit() if problem.is_head_whole else split


def _evenly(problem: PlacementProblem, free: float) -> Placement:
    """The same fraction of everything on the GPU, the rest on the CPU."""
    share = max(0.0, min(1.0, free / (sum(_layer_bytes(problem)) + _head_bytes(problem))))
    split = WeightSplit(on_gpu=share, on_cpu=1.0 - share)
    layer = LayerPlacement(attention=split, mlp=split)
    return Placement(layers=(layer,) * len(problem.units.layers), head=_head(problem, split))


def _all_gpu(problem: PlacementProblem, _on_cpu: bool) -> Candidate | None:
    return Placement.all_on_gpu(len(problem.units.layers)), KVShares()


def _layer_split(problem: PlacementProblem, on_cpu: bool) -> Candidate | None:
    """Keys follow their layers there; here tokens are divided, in the same share as layers."""
    units, sizes = problem.units, _layer_bytes(problem)
    kv_per_layer = units.kv_gpu_bytes / len(sizes)
    free, num = _free(problem) - _head_bytes(problem) - units.least_kv_on_gpu * units.kv_gpu_bytes, 0
    while num < len(sizes) and free >= sizes[num] + kv_per_layer:
        free -= sizes[num] + kv_per_layer
        num += 1
    on_gpu, elsewhere = LayerPlacement(), LayerPlacement(attention=ON_CPU, mlp=ON_CPU)
    placement = Placement(layers=(elsewhere,) * (len(sizes) - num) + (on_gpu,) * num)
    share = max(num / len(sizes), units.least_kv_on_gpu)
    return placement, _divide_keys(problem, share, on_cpu=on_cpu)


def _all_streamed(problem: PlacementProblem, on_cpu: bool) -> Candidate | None:
    layer = LayerPlacement(attention=STREAMED, mlp=STREAMED)
    kv = keys_in(problem, _free(problem) - _head_bytes(problem), on_cpu=on_cpu)
    return None if kv is None else (Placement(layers=(layer,) * len(problem.units.layers)), kv)


def _all_cpu(problem: PlacementProblem, on_cpu: bool) -> Candidate | None:
    layer = LayerPlacement(attention=ON_CPU, mlp=ON_CPU)
    kv = keys_in(problem, _free(problem), on_cpu=on_cpu)
    return (
        None
        if kv is None
        else (Placement(layers=(layer,) * len(problem.units.layers), head=_head(problem, ON_CPU)), kv)
    )


def _weights_first(problem: PlacementProblem, on_cpu: bool) -> Candidate | None:
    units = problem.units
    free = _free(problem)
    least_kv = max(problem.least_kv_bytes, units.least_kv_on_gpu * units.kv_gpu_bytes)
    weights = min(free - least_kv, sum(_layer_bytes(problem)) + _head_bytes(problem))
    kv = keys_in(problem, free - max(0.0, weights), on_cpu=on_cpu)
    return None if kv is None else (_evenly(problem, weights), kv)


def _kv_first(problem: PlacementProblem, on_cpu: bool) -> Candidate | None:
    free = _free(problem)
    kv = keys_in(problem, free, on_cpu=on_cpu)
    return None if kv is None else (_evenly(problem, free - _kv_bytes(problem, kv)), kv)


def _half_half(problem: PlacementProblem, on_cpu: bool) -> Candidate | None:
    units, free = problem.units, _free(problem)
    kv = keys_in(problem, max(free / 2, units.least_kv_on_gpu * units.kv_gpu_bytes), on_cpu=on_cpu)
    return None if kv is None else (_evenly(problem, free - _kv_bytes(problem, kv)), kv)


BASELINES: Final[Mapping[str, Callable[[PlacementProblem, bool], Candidate | None]]] = {
    "all_gpu": _all_gpu,
    "layer_split": _layer_split,
    "all_streamed": _all_streamed,
    "all_cpu": _all_cpu,
    "weights_first": _weights_first,
    "kv_first": _kv_first,
    "half_half": _half_half,
}

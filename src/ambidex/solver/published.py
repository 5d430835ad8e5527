"""The rules by which FlexGen and MoE-Lightning choose batch and placement, over this engine's own terms of cost.

Both take a decode step to be as long as the longest of what runs side by side in each layer, choose shares by a linear
program for every batch, and the batch with the most tokens a second:

    flexgen         T = Σ max(link, GPU)         link: (1 − w) weights + (1 − c) keys     arXiv:2303.06865, section 4.3
    moe_lightning   T = Σ max(link, CPU, GPU)    link: (1 − w) weights; CPU: all keys     arXiv:2411.11217, section 4.2

    w · weights + c · keys + what is fixed ≤ GPU memory,   (1 − w) weights + (1 − c) keys ≤ DRAM

What differs from the authors' programs:

- seconds come from measured rates of this engine's ops (`cost/units.py`), which are its roof lines, not from FLOP/s
- flexgen: keys in DRAM travel (cpu_cache_compute off), as in HybridGen's comparison; the paper's own program lets the
  CPU attend. There is no disk; activations stay on the GPU; new keys on their way to DRAM, and prompts, which this
  engine computes beside decode, are left out of T
- moe_lightning: attention on the CPU and no keys kept on the GPU, the artifact's defaults (cg = 0, cc = 1); a step is
  one micro-batch (`engine/lane_preset.py`), so that its size is no question; budgets are the user's, not 0.86 and 0.8
  of the memories
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from ambidex.core.errors import ConfigError
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.core.policy import PolicyName
from ambidex.cost.step import predict_step
from ambidex.cost.workload import KVShares
from ambidex.solver.problem import MARGIN_BYTES, PlacementProblem, measure_memory
from ambidex.solver.solve import Solution

TIE: Final = 1e-6
"""Weight of what breaks ties: of two choices as fast, the one with more weights on the GPU, then more keys."""
_MS: Final = 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedChoice:
    """What a rule chose for one batch: shares of weights and of keys on the GPU, and its own T in seconds."""

    weights_on_gpu: float
    kv_on_gpu: float
    step_s: float


def flexgen_rule(problem: PlacementProblem) -> PublishedChoice | None:
    """FlexGen's choice for one batch; None if nothing fits."""
    least = max(problem.units.least_kv_on_gpu, 1.0 - problem.most_kv_streamed)
    return _choose(problem, keys_travel=True, kv_bounds=(least, 1.0))


def moe_lightning_rule(problem: PlacementProblem) -> PublishedChoice | None:
    """MoE-Lightning's choice for one batch; None if nothing fits."""
    least = problem.units.least_kv_on_gpu
    return _choose(problem, keys_travel=False, kv_bounds=(least, least))


Rule = Callable[[PlacementProblem], PublishedChoice | None]
RULES: Final[Mapping[PolicyName, Rule]] = {
    PolicyName.FLEXGEN: flexgen_rule,
    PolicyName.MOE_LIGHTNING: moe_lightning_rule,
}


def batches_up_to(most: int) -> list[int]:
    """The batches that are tried: all small ones, then every sixteenth, and the largest."""
    return sorted({*range(1, min(most, 32) + 1), *range(48, most + 1, 16), most})


def rule_name(name: PolicyName) -> str:
    """What a solution says of how it was found."""
    return f"chosen by {name}'s rule"


def choose_batch(name: PolicyName, problems: Iterable[tuple[int, PlacementProblem]]) -> tuple[int, Solution]:
    """The batch with the most tokens a second by a rule, and its placement with what this engine predicts of it.

    Args:
        problems: a problem for each batch that may be chosen.
    Raises:
        ConfigError: not even the smallest batch fits.
    """
    best: tuple[float, int, PlacementProblem, PublishedChoice] | None = None
    for batch, problem in problems:
        choice = RULES[name](problem)
        if choice is not None and (best is None or batch / choice.step_s > best[0] * (1 + TIE)):
            best = batch / choice.step_s, batch, problem, choice
    if best is None:
        raise ConfigError(
            f"`policy` {name} with `placement` auto finds no share of weights and keys that fits for even one request: "
            f"raise `gpu_memory` or `dram_memory`, or lower `max_context_len`"
        )
    _, batch, problem, choice = best
    placement, kv = apply_choice(problem, choice, name)
    return batch, Solution(
        placement=placement,
        kv=kv,
        step=predict_step(problem.units, placement, kv),
        memory=measure_memory(problem, placement, kv),
        how=rule_name(name),
    )


def apply_choice(problem: PlacementProblem, choice: PublishedChoice, name: PolicyName) -> tuple[Placement, KVShares]:
    """The shares as this engine has them: the same for every layer; what is not on the GPU travels, or is the CPU's."""
    split = WeightSplit(on_gpu=choice.weights_on_gpu, streamed=1.0 - choice.weights_on_gpu)
    layer = LayerPlacement(attention=split, mlp=split)
    head = WeightSplit() if problem.is_head_whole else split
    away = 1.0 - choice.kv_on_gpu
    kv = (
        KVShares(on_gpu=choice.kv_on_gpu, on_cpu=0.0, streamed=away)
        if name is PolicyName.FLEXGEN
        else KVShares(on_gpu=choice.kv_on_gpu, on_cpu=away, streamed=0.0)
    )
    return Placement(layers=(layer,) * len(problem.units.layers), head=head), kv


def _choose(problem: PlacementProblem, *, keys_travel: bool, kv_bounds: tuple[float, float]) -> PublishedChoice | None:
    """The faster of two programs: all weights on the GPU, or some in DRAM and a ring for them on the GPU."""
    if problem.pins.kv is not None:
        kv_bounds = (problem.pins.kv.on_gpu, problem.pins.kv.on_gpu)
    found = [
        choice
        for bounds, ring_bytes in (((1.0, 1.0), 0), ((0.0, 1.0), problem.ring_bytes))
        if (choice := _solve(problem, keys_travel, bounds, kv_bounds, ring_bytes)) is not None
    ]
    return min(found, key=lambda choice: choice.step_s, default=None)


def _solve(
    problem: PlacementProblem,
    keys_travel: bool,
    weight_bounds: tuple[float, float],
    kv_bounds: tuple[float, float],
    ring_bytes: int,
) -> PublishedChoice | None:
    """One program over w, c and the time of each layer, in milliseconds and in shares of what there is."""
    from scipy.optimize import linprog  # a second or more, and few engines solve anything

    units = problem.units
    places = [*_layers(problem, keys_travel)]
    num = len(places)
    weights = sum(place.weight_bytes for place in places)
    whole = units.head_bytes if problem.is_head_whole else 0
    room = problem.gpu_bytes - problem.gpu_fixed_bytes - ring_bytes - whole - MARGIN_BYTES
    rows: list[list[float]] = []
    limits: list[float] = []
    for idx, place in enumerate(places):  # link: (1 − w) · weights + (1 − c) · keys ≤ t, rates in bytes
        times = [0.0] * num
        times[idx] = -1.0
        link_weights = _MS * units.link_s_per_byte * place.weight_bytes
        link_keys = _MS * units.link_s_per_byte * place.travelling_bytes
        rows.append([-link_weights, -link_keys, *times])
        limits.append(-link_weights - link_keys)
        cpu = _MS * place.cpu_kv_s
        rows.append([0.0, -cpu, *times])
        limits.append(-cpu)
    least_kv = problem.least_kv_bytes
    for kv_bytes, constant in ((units.kv_gpu_bytes, 0), (0, least_kv)):
        rows.append([weights / MARGIN_BYTES, kv_bytes / MARGIN_BYTES, *[0.0] * num])
        limits.append((room - constant) / MARGIN_BYTES)
    if problem.dram_bytes is not None:
        rows.append([-weights / MARGIN_BYTES, -units.kv_dram_bytes / MARGIN_BYTES, *[0.0] * num])
        limits.append((problem.dram_bytes - weights - units.kv_dram_bytes) / MARGIN_BYTES)
    gpu = [(_MS * place.gpu_s, None) for place in places]
    scale, total = sum(low for low, _ in gpu) or 1.0, weights + units.kv_gpu_bytes
    found = linprog(
        [-2 * TIE * scale * weights / total, -TIE * scale * units.kv_gpu_bytes / total, *[1.0] * num],
        A_ub=rows,
        b_ub=limits,
        bounds=[weight_bounds, kv_bounds, *gpu],
    )
    if found.x is None or not found.success:
        return None
    w, c = (min(1.0, max(0.0, float(share))) for share in found.x[:2])
    return PublishedChoice(weights_on_gpu=w, kv_on_gpu=c, step_s=sum(float(time) for time in found.x[2:]) / _MS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A layer or the head: bytes of its weights and of keys that travel, seconds of both sides."""

    weight_bytes: int
    travelling_bytes: int
    gpu_s: float
    cpu_kv_s: float


def _layers(problem: PlacementProblem, keys_travel: bool) -> Iterable[_Place]:
    for layer in problem.units.layers:
        gpu_kv_s = layer.gpu_kv_s if keys_travel else 0.0
        yield _Place(
            weight_bytes=layer.attention_bytes + layer.mlp_bytes,
            travelling_bytes=layer.kv_bytes if keys_travel else 0,
            gpu_s=layer.gpu_attention_s + layer.gpu_mlp_s + gpu_kv_s,
            cpu_kv_s=0.0 if keys_travel else layer.cpu_kv_s,
        )
    head_bytes = 0 if problem.is_head_whole else problem.units.head_bytes
    yield _Place(weight_bytes=head_bytes, travelling_bytes=0, gpu_s=problem.units.gpu_head_s, cpu_kv_s=0.0)

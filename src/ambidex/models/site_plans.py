"""Which rows of each place of a model lie where, and how many bytes that is: numbers only, also without storage.

plan_sites        the cuts of every place, in the order of use, as a `Placement` says
measure_weights   bytes of what can be divided, part by part
count_bytes       bytes of planned cuts on each tier
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from torch import nn

from ambidex.core.errors import ConfigError
from ambidex.core.placement import Placement, WeightSizes, WeightSplit
from ambidex.core.units import MIB
from ambidex.layers.mlp import Neurons
from ambidex.mlp.cuts import Cuts, SiteShape
from ambidex.mlp.neuron_mover import NeuronMover
from ambidex.mlp.predictor import Predictor
from ambidex.mlp.screen import Screen
from ambidex.models.base import CausalLM, LinearSite
from ambidex.models.quantized import count_weights_bytes, names_of_parameters
from ambidex.models.site_layers import kinds_of_layers, layers_of, neuron_biases, shape_of

ALIGNMENT_BYTES: Final = 512
"""Each part begins at a multiple, as matrix products want it, and is filled up to one; that costs no more than this."""
_NO_KINDS: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSizes:
    """The buffers in GPU memory through which weights in DRAM travel.

    A chunk of 64 MiB takes a PCIe 5 x16 link 1.2 ms, beside which a launch is nothing; four of them let the link run on
    for 5 ms while the GPU attends or waits for the CPU.
    """

    chunk_bytes: int = 64 * MIB
    num_slots: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SitePlan:
    """A place of a model and the cuts of its rows."""

    site: LinearSite | Neurons
    shape: SiteShape
    cuts: Cuts
    layer_idx: int | None
    """None: behind all layers."""
    is_before_attention: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedBytes:
    """What divided matrices take: on the GPU, in DRAM for the CPU and for the link, and the ring on the GPU.

    `movable` bytes of those on the GPU lie in DRAM, too.
    """

    on_gpu: int
    on_cpu: int
    streamed: int
    ring: int
    movable: int = 0


def plan_sites(
    model: CausalLM,
    placement: Placement,
    *,
    chunk_bytes: int,
    number_bytes: int,
    kinds: Mapping[str, str] = _NO_KINDS,
    movable_share: float = 0.0,
    skips_neurons: bool = False,
) -> list[SitePlan]:
    """Cut the rows of every place, in the order of use.

    Args:
        chunk_bytes: of a chunk in DRAM, at most.
        number_bytes: of a plain number.
        kinds: GGUF types of matrices that stay as they are stored, by name; those of a place must all be of one.
        movable_share: of the rows on the GPU, that may leave it later.
        skips_neurons: whether the last matrix of an MLP lies neuron by neuron; quantised ones never do.
    Raises:
        ConfigError: the placement is for another number of layers, or divides a table that is shared.
    """
    layers = model.layer_sites()
    if len(placement.layers) != len(layers):
        raise ConfigError(f"`placement` has {len(placement.layers)} layers: the model has {len(layers)}")
    plans: list[SitePlan] = []
    of_layers = kinds_of_layers(model, kinds)

    def add(
        site: LinearSite | Neurons, split: WeightSplit, layer_idx: int | None, *, is_before_attention: bool = False
    ) -> None:
        shape = shape_of(site, of_layers)
        if skips_neurons and shape.num_out and shape.kind is None:
            shape = replace(shape, is_neuron_major=True)
        cuts = Cuts.of(shape, split, chunk_bytes=chunk_bytes, number_bytes=number_bytes, movable_share=movable_share)
        plans.append(
            SitePlan(site=site, shape=shape, cuts=cuts, layer_idx=layer_idx, is_before_attention=is_before_attention)
        )

    for layer_idx, (sites, layer) in enumerate(zip(layers, placement.layers, strict=True)):
        for place, site in enumerate(sites.attention):
            add(site, layer.attention, layer_idx, is_before_attention=place == 0)
        add(sites.mlp, layer.mlp, layer_idx)
    if not is_head_shared(model):
        add(model.lm_head, placement.head, None)
    elif placement.head.on_gpu != 1.0:
        raise ConfigError(
            "`placement` divides the last projection, which is the model's table of tokens: leave it whole"
        )
    return plans


def measure_weights(
    model: CausalLM,
    number_bytes: int,
    *,
    kinds: Mapping[str, str] = _NO_KINDS,
    whole_kinds: Mapping[str, str] = _NO_KINDS,
) -> WeightSizes:
    """Bytes of a model's weights, which may have no storage.

    Args:
        number_bytes: of a number of a matrix.
        kinds: as in `plan_sites`; whole_kinds: the same of matrices that are never divided.
    """
    of_layers = kinds_of_layers(model, kinds)

    def size(*sites: LinearSite | Neurons) -> int:
        shapes = [shape_of(site, of_layers) for site in sites]
        return sum(shape.num_bytes(shape.num_rows, number_bytes) for shape in shapes)

    layers = model.layer_sites()
    attention = tuple(size(*sites.attention) for sites in layers)
    mlp = tuple(size(sites.mlp) for sites in layers)
    heads = () if is_head_shared(model) else (model.lm_head,)
    divisible = {
        layer.weight
        for site in (*(site for sites in layers for site in (*sites.attention, sites.mlp)), *heads)
        for layer in layers_of(site)
    }
    of_weights = count_weights_bytes(model, whole_kinds)
    whole = sum(num_bytes for weight, num_bytes in of_weights.items() if weight not in divisible)
    return WeightSizes(whole=whole, attention=attention, mlp=mlp, head=size(*heads))


def is_head_shared(model: CausalLM) -> bool:
    """Whether the last projection is the table of tokens."""
    names = names_of_parameters(model)
    return isinstance(model.lm_head.weight, nn.Parameter) and len(names[model.lm_head.weight]) > 1


def count_bytes(plans: Sequence[SitePlan], sizes: RingSizes, number_bytes: int) -> DividedBytes:
    """Bytes of divided matrices, with what alignment takes."""

    def total(groups: Sequence[tuple[SiteShape, range]]) -> int:
        return sum(aligned(shape.num_bytes(len(rows), number_bytes)) for shape, rows in groups)

    on_cpu = [(plan.shape, rows) for plan in plans for rows in plan.cuts.on_cpu]
    streamed = [(plan.shape, rows) for plan in plans for rows in plan.cuts.streamed]
    num_slots, slot_bytes = ring_of(plans, sizes, number_bytes)
    movable = total([(plan.shape, rows) for plan in plans for rows in plan.cuts.movable])
    return DividedBytes(
        on_gpu=total([(plan.shape, plan.cuts.on_gpu) for plan in plans]) + movable,
        movable=movable,
        on_cpu=total(on_cpu),
        streamed=total(streamed),
        ring=num_slots * slot_bytes,
    )


def count_screens(plans: Sequence[SitePlan]) -> int:
    """Bytes of the 8-bit copies that `make_screens` makes, at most."""
    return sum(
        Screen.num_bytes(len(rows), plan.shape.num_in)
        for plan in plans
        for rows in plan.cuts.on_cpu
        if plan.shape.is_neuron_major and Screen.refusal(plan.shape.num_in) is None
    )


def count_predictors(plans: Sequence[SitePlan], ranks: Sequence[int], number_bytes: int) -> int:
    """Bytes of the matrices that `make_predictors` takes, at most.

    Args:
        ranks: of each layer's predictor.
    """
    return sum(
        Predictor.num_bytes(ranks[plan.layer_idx], plan.shape.num_in, sum(map(len, plan.cuts.on_cpu)), number_bytes)
        for plan in plans
        if plan.shape.is_neuron_major and plan.cuts.on_cpu and plan.layer_idx is not None
    )


def can_change_places(plan: SitePlan) -> bool:
    """Whether neurons of a place lie on the accelerator and with the CPU, and biases can follow them."""
    has_bias = bool(neuron_biases(plan.site))
    return (
        plan.shape.is_neuron_major
        and len(plan.cuts.on_gpu) > 0
        and len(plan.cuts.on_cpu) > 0
        and not (has_bias and plan.shape.num_ins > 1)  # several biases may be copied into one vector
    )


def most_moved_pairs(plans: Sequence[SitePlan], num_bytes: int, number_bytes: int) -> tuple[int, int]:
    """Pairs of neurons that change places at a time within a budget, at least one, and the bytes of their buffers."""
    moving = [plan for plan in plans if can_change_places(plan)]
    if not moving:
        return 0, 0
    neuron_bytes = moving[0].shape.num_bytes(1, number_bytes)
    most = min(max(len(plan.cuts.on_gpu) for plan in moving), max(_num_on_cpu(plan) for plan in moving))
    pairs = max(1, min(most, num_bytes // NeuronMover.buffer_bytes(neuron_bytes, 1)))
    return pairs, NeuronMover.buffer_bytes(neuron_bytes, pairs)


def _num_on_cpu(plan: SitePlan) -> int:
    return sum(len(rows) for rows in plan.cuts.on_cpu)


def aligned(size: int) -> int:
    """Bytes of a part with what alignment takes."""
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def ring_of(plans: Sequence[SitePlan], sizes: RingSizes, number_bytes: int) -> tuple[int, int]:
    """Number of slots, and bytes of each: the largest chunk's."""
    chunks = [plan.shape.num_bytes(len(rows), number_bytes) for plan in plans for rows in plan.cuts.chunks]
    return min(sizes.num_slots, len(chunks)), aligned(max(chunks, default=0))

"""Divides the weights of a model over tiers, as a `Placement` says: memory for each part, and what computes with it.

plan_sites     which rows of each place lie where: numbers only, also of a model without storage
divide         memory, and pieces in the place of the parameters; `models/weights.py` fills them
DividedWeights.bind    when they are filled: each place computes with its parts
DividedWeights.rebind  later: other chunks lie on the GPU, or the CPU multiplies others (`models/weight_moves.py`)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor, nn

from ambidex.core.errors import ConfigError
from ambidex.core.model_spec import Activation
from ambidex.core.placement import Placement, WeightSizes, WeightSplit
from ambidex.core.sparsity import NeuronMask
from ambidex.core.units import MIB
from ambidex.kernels.linear import LinearContext
from ambidex.layers.linear import Linear
from ambidex.layers.mlp import Neurons
from ambidex.layers.split_matrix import Piece, SplitMatrix
from ambidex.mlp.cuts import Cuts, SiteShape
from ambidex.mlp.host_lane import HostSide
from ambidex.mlp.hot_neurons import NeuronMap
from ambidex.mlp.neuron_cache import CachedLayer, NeuronCounts
from ambidex.mlp.neuron_mover import NeuronMover, NeuronPlace
from ambidex.mlp.parts import Part, Rows
from ambidex.mlp.screen import Screen
from ambidex.mlp.sparse_side import SparseContext, SparseSide, find_scattered, lay_out
from ambidex.mlp.split_site import HostParts, HostPlace, SplitSite, StreamedPart, WeightLanes
from ambidex.models.base import CausalLM, LinearSite
from ambidex.models.quantized import count_weights_bytes, names_of_parameters
from ambidex.storage.host_memory import HOST_MEMORY, HostMemory
from ambidex.storage.lane_clock import LaneClock
from ambidex.storage.weight_ring import Lap, WeightRing

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
    chunk_size: int,
    kinds: Mapping[str, str] = _NO_KINDS,
    movable_share: float = 0.0,
    skips_neurons: bool = False,
) -> list[SitePlan]:
    """Cut the rows of every place, in the order of use.

    Args:
        chunk_size: numbers of a chunk in DRAM, at most.
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
    of_layers = _kinds_of_layers(model, kinds)

    def add(
        site: LinearSite | Neurons, split: WeightSplit, layer_idx: int | None, *, is_before_attention: bool = False
    ) -> None:
        shape = _shape_of(site, of_layers)
        if skips_neurons and shape.num_out and shape.kind is None:
            shape = replace(shape, is_neuron_major=True)
        cuts = Cuts.of(shape, split, chunk_size=chunk_size, movable_share=movable_share)
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
    of_layers = _kinds_of_layers(model, kinds)

    def size(*sites: LinearSite | Neurons) -> int:
        shapes = [_shape_of(site, of_layers) for site in sites]
        return sum(shape.num_bytes(shape.num_rows, number_bytes) for shape in shapes)

    layers = model.layer_sites()
    attention = tuple(size(*sites.attention) for sites in layers)
    mlp = tuple(size(sites.mlp) for sites in layers)
    heads = () if is_head_shared(model) else (model.lm_head,)
    divisible = {
        layer.weight
        for site in (*(site for sites in layers for site in (*sites.attention, sites.mlp)), *heads)
        for layer in _layers_of(site)
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
        return sum(_aligned(shape.num_bytes(len(rows), number_bytes)) for shape, rows in groups)

    on_cpu = [(plan.shape, rows) for plan in plans for rows in plan.cuts.on_cpu]
    streamed = [(plan.shape, rows) for plan in plans for rows in plan.cuts.streamed]
    num_slots, slot_bytes = _ring_of(plans, sizes, number_bytes)
    movable = total([(plan.shape, rows) for plan in plans for rows in plan.cuts.movable])
    return DividedBytes(
        on_gpu=total([(plan.shape, plan.cuts.on_gpu) for plan in plans]) + movable,
        movable=movable,
        on_cpu=total(on_cpu),
        streamed=total(streamed),
        ring=num_slots * slot_bytes,
    )


class DividedWeights:
    """The memory of divided weights.

    Args:
        plans: every place of the model.
        device: of the accelerator's parts; dtype: of all plain numbers.
        linear, host_linear: what the products of the accelerator and of the CPU share.
        memory: who is asked for pinned memory and huge pages; `pin_refusal` and `page_refusal` say why there is none.
        clock: is told how long copies and waits for them take; None: nobody is.
    """

    def __init__(
        self,
        model: CausalLM,
        plans: Sequence[SitePlan],
        *,
        sizes: RingSizes,
        device: torch.device,
        dtype: torch.dtype,
        linear: LinearContext,
        host_linear: LinearContext,
        memory: HostMemory = HOST_MEMORY,
        clock: LaneClock | None = None,
    ) -> None:
        self._plans = plans
        self._device = device
        self._sparse: SparseContext | None = None
        self._biases: dict[LinearSite | Neurons, list[Tensor]] = {}
        self._screens: dict[LinearSite | Neurons, Screen] = {}
        self._linear, self._host_linear, self._dtype = linear, host_linear, dtype
        near = _Arena([(plan.shape, plan.cuts.on_gpu) for plan in plans], dtype, device)
        far = _Arena([(plan.shape, rows) for plan in plans for rows in plan.cuts.chunks], dtype, torch.device("cpu"))
        self.page_refusal = memory.advise(far.memory) if far.memory.numel() else None
        self.pin_refusal = memory.pin(far.memory, self) if device.type == "cuda" and far.memory.numel() else None
        self._far_memory = far.memory  # pinned as long as this object lives
        self.num_bytes = (near.memory.nbytes, far.memory.nbytes)
        """On the accelerator, without the ring, and in DRAM."""
        self._rows = [
            (near.take(plan.shape, plan.cuts.on_gpu), [far.take(plan.shape, rows) for rows in plan.cuts.chunks])
            for plan in plans
        ]
        self._near: list[list[Tensor]] = [[] for _ in plans]  # of each place's first chunks, on the accelerator
        self._num_on_cpu = [len(plan.cuts.on_cpu) for plan in plans]
        self._sides: list[list[Part]] = []
        self._own: list[Part | None] = []
        num_slots, slot_bytes = _ring_of(plans, sizes, dtype.itemsize)
        self.ring = WeightRing(num_slots, slot_bytes, device=device, clock=clock)
        self.matrices: dict[str, SplitMatrix] = {}
        names = {module: name for name, module in model.named_modules()}
        for plan, (gpu, host) in zip(plans, self._rows, strict=True):
            for layer, matrix in _make_matrices(plan, [gpu, *host]):
                del layer.weight  # a parameter cannot be replaced by something else
                layer.weight = matrix
                self.matrices[f"{names[layer]}.weight"] = matrix

    def bind(
        self, lanes: WeightLanes, sparse: SparseContext | None = None, *, counts_neurons: bool = False
    ) -> dict[int, CachedLayer]:
        """Let each place compute with its parts; the weights and biases are filled.

        Args:
            sparse: what the CPU's parts of MLPs share that leave out neurons; None: they compute all.
            counts_neurons: count which neurons are active, where some lie on the accelerator and some with the CPU.
        Returns:
            Those MLPs by layer, if they are counted.
        """
        self._sparse = sparse
        self._sides = [self._host_parts(plan, host) for plan, host in self._host_rows()]
        self._near = [
            [rows.memory.to(self._device, copy=True) for rows in host[: len(plan.cuts.movable)]]
            for plan, host in self._host_rows()
        ]
        self._own = [self._part(plan, gpu, None) if len(gpu.rows) else None
                     for plan, (gpu, _) in zip(self._plans, self._rows, strict=True)]  # fmt: skip
        cached: dict[int, CachedLayer] = {}
        if counts_neurons and sparse is not None:
            sides = [
                parts[len(plan.cuts.movable) :][: len(plan.cuts.on_cpu)]
                for plan, parts in zip(self._plans, self._sides, strict=True)
            ]
            cached = self._count_neurons(self._own, sides)
        self._bind(lanes, cached)
        return cached

    def rebind(self, lanes: WeightLanes, near: Sequence[Sequence[Tensor]], num_on_cpu: Sequence[int]) -> None:
        """Let each place compute with others of its chunks; no step is under way, and no neurons are counted.

        Args:
            lanes: with the levels that hold from now on.
            near: of each place's first chunks, their bytes on the accelerator.
            num_on_cpu: how many of each place's next chunks are the CPU's part.
        """
        self._near, self._num_on_cpu = [list(chunks) for chunks in near], list(num_on_cpu)
        lanes.set_levels(lanes.levels[:-1])
        self._bind(lanes, {})

    @property
    def near(self) -> list[list[Tensor]]:
        """Of each place's first chunks, their bytes on the accelerator."""
        return [list(chunks) for chunks in self._near]

    @property
    def num_on_cpu(self) -> list[int]:
        """How many of each place's next chunks are the CPU's part."""
        return list(self._num_on_cpu)

    @property
    def plans(self) -> Sequence[SitePlan]:
        """Every place."""
        return self._plans

    def chunks_of(self, place: int) -> list[Tensor]:
        """All chunks of a place in DRAM, in the order of their rows."""
        return [rows.memory for rows in self._rows[place][1]]

    def _bind(self, lanes: WeightLanes, cached: Mapping[int, CachedLayer]) -> None:
        by_level = [self._bind_level(lanes, idx, level.cpu_share, cached) for idx, level in enumerate(lanes.levels)]
        for place, (plan, (_, host)) in enumerate(zip(self._plans, self._rows, strict=True)):
            plan.site.stand_in = SplitSite(
                plan.shape,
                self._own[place],
                [parts[place] for parts in by_level],
                lanes,
                sizes=_answer_sizes(plan.site),
                bias=_last_bias(plan.site),
                resident=[
                    self._part(plan, rows, memory) for rows, memory in zip(host, self._near[place], strict=False)
                ],
            )

    def _count_neurons(self, near: Sequence[Part | None], sides: Sequence[Sequence[Part]]) -> dict[int, CachedLayer]:
        """The MLPs whose neurons may change places, with counters that their parts add to."""
        places = {
            plan.layer_idx: NeuronPlace(
                near=own, table=table, rows=rows,
                biases=[*_neuron_biases(plan.site), *self._host_biases(plan)],
                screen=self._screens.get(plan.site),
            )
            for plan, own, parts in zip(self._plans, near, sides, strict=True)
            if can_change_places(plan) and own is not None and find_scattered(plan.shape, parts) is None
            for table, rows in [lay_out(plan.shape, parts)]
            if plan.layer_idx is not None
        }  # fmt: skip
        num_near = sum(place.num_near for place in places.values())
        counters = torch.zeros(num_near, dtype=torch.int32, device=self.ring.device)
        cached: dict[int, CachedLayer] = {}
        start = 0
        for layer_idx, place in places.items():
            place.near.counts = counters[start : start + place.num_near]
            start += place.num_near
            cached[layer_idx] = CachedLayer(
                place=place,
                counts=NeuronCounts(place.near.counts, place.num_far),
                neurons=NeuronMap(range(place.num_near), range(place.num_near, place.num_near + place.num_far)),
            )
        return cached

    def _bind_level(
        self, lanes: WeightLanes, level: int, cpu_share: float, cached: Mapping[int, CachedLayer]
    ) -> list[HostParts]:
        """What becomes of each place's rows in DRAM if the CPU multiplies a share of its chunks."""
        num_on_cpu = _share_out(self._num_on_cpu, cpu_share)
        away = [host[len(near) :] for near, (_, host) in zip(self._near, self._host_rows(), strict=True)]
        sides = [parts[len(near) :] for near, parts in zip(self._near, self._sides, strict=True)]
        travelling = [host[num:] for num, host in zip(num_on_cpu, away, strict=True)]
        lap = Lap(lanes.ring, [rows.memory for host in travelling for rows in host])
        lanes.set_lap(level, lap)
        made: list[HostParts] = []
        first = 0
        for plan, parts, num, host in zip(self._plans, sides, num_on_cpu, travelling, strict=True):
            counted = cached.get(plan.layer_idx) if plan.layer_idx is not None else None
            side = self._make_side(plan, parts[:num], counted) if num else None
            made.append(HostParts(side=side, streamed=self._streamed(plan, host, lap, first)))
            first += len(host)
            if side is not None:
                lanes.add_place(
                    level,
                    HostPlace(side=side, layer_idx=plan.layer_idx, is_before_attention=plan.is_before_attention),
                )
        return made

    def _make_side(self, plan: SitePlan, parts: Sequence[Part], counted: CachedLayer | None) -> HostSide:
        if self._sparse is not None and is_sparse(plan.shape, parts):
            counts = None if counted is None else counted.counts
            return SparseSide(plan.shape, parts, self._sparse, counts, self._screens.get(plan.site))
        return HostSide(plan.shape, parts)

    def make_screens(self) -> None:
        """Copy the first rows of the CPU's parts of MLPs in 8 bits; the weights are filled.

        Cost: reads them once, and writes a half.
        """
        for plan, host in self._host_rows():
            parts = self._host_parts(plan, host[: len(plan.cuts.on_cpu)])
            if parts and is_sparse(plan.shape, parts) and Screen.refusal(plan.shape.num_in) is None:
                weights = [part.numbers.ins[0] for part in parts]
                self._screens[plan.site] = Screen(
                    [rows for rows in weights if isinstance(rows, Tensor)], self._host_linear
                )

    def host_neurons(self) -> list[tuple[SiteShape, list[Part], Screen | None]]:
        """The CPU's parts of each MLP whose neurons can be left out, for measurements: the weights are filled."""
        found = [
            (plan.shape, self._host_parts(plan, host[: len(plan.cuts.on_cpu)]), self._screens.get(plan.site))
            for plan, host in self._host_rows()
            if plan.shape.is_neuron_major and plan.cuts.on_cpu
        ]
        return [(shape, parts, screen) for shape, parts, screen in found if is_sparse(shape, parts)]

    def host_parts(self) -> list[Part]:
        """Parts that the CPU multiplies, of one place after the other, for measurements: the weights are filled."""
        found = []
        for plan, host in self._host_rows():
            first = len(plan.cuts.movable)
            found += self._host_parts(plan, host[first : first + len(plan.cuts.on_cpu)])
        return found

    def host_chunks(self) -> list[Tensor]:
        """All numbers in DRAM, chunk by chunk."""
        return [rows.memory for _, host in self._host_rows() for rows in host]

    def _host_rows(self) -> list[tuple[SitePlan, list[Rows]]]:
        return [(plan, host) for plan, (_, host) in zip(self._plans, self._rows, strict=True)]

    def _streamed(self, plan: SitePlan, host: Sequence[Rows], lap: Lap, first: int) -> tuple[StreamedPart, ...]:
        return tuple(
            StreamedPart(lap, place, self._part(plan, rows, lap.memory_of(place)))
            for place, rows in enumerate(host, start=first)
        )

    def _part(self, plan: SitePlan, rows: Rows, memory: Tensor | None) -> Part:
        """A part on the accelerator, with its numbers elsewhere than in DRAM if `memory` is given."""
        numbers = rows if memory is None else Rows(plan.shape, rows.rows, memory, self._dtype)
        part = Part(numbers, _activation_of(plan.site), self._linear, _mask_of(plan.site))
        part.bind(_neuron_biases(plan.site))
        return part

    def _host_parts(self, plan: SitePlan, host: Sequence[Rows]) -> list[Part]:
        parts = [Part(rows, _activation_of(plan.site), self._host_linear, _mask_of(plan.site)) for rows in host]
        for part in parts:
            part.bind(self._host_biases(plan))
        return parts

    def _host_biases(self, plan: SitePlan) -> list[Tensor]:
        """The biases before the activation as the CPU adds them: one copy, which all parts see; they are filled."""
        if plan.site not in self._biases:
            self._biases[plan.site] = [bias.to("cpu", torch.float32, copy=True) for bias in _neuron_biases(plan.site)]
        return self._biases[plan.site]


def is_sparse(shape: SiteShape, parts: Sequence[Part]) -> bool:
    """Whether neurons of the CPU's parts of a place can be left out."""
    return shape.is_neuron_major and find_scattered(shape, parts) is None


def count_screens(plans: Sequence[SitePlan]) -> int:
    """Bytes of the 8-bit copies that `make_screens` makes, at most."""
    return sum(
        Screen.num_bytes(len(rows), plan.shape.num_in)
        for plan in plans
        for rows in plan.cuts.on_cpu
        if plan.shape.is_neuron_major and Screen.refusal(plan.shape.num_in) is None
    )


def can_change_places(plan: SitePlan) -> bool:
    """Whether neurons of a place lie on the accelerator and with the CPU, and biases can follow them."""
    has_bias = bool(_neuron_biases(plan.site))
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


def _share_out(counts: Sequence[int], share: float) -> list[int]:
    """A share of each count as a whole number, so that the sums up to any place are right to within one half."""
    taken: list[int] = []
    wanted = 0.0
    for count in counts:
        wanted += count * share
        taken.append(min(count, max(0, int(wanted + 0.5) - sum(taken))))
    return taken


class _Arena:
    """One flat memory for the parts of a tier, given out in the order in which they were counted."""

    def __init__(self, groups: Sequence[tuple[SiteShape, range]], dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        size = sum(_aligned(shape.num_bytes(len(rows), dtype.itemsize)) for shape, rows in groups)
        # Quantised rows are packed bit by bit into zeros; plain numbers need none.
        make = torch.zeros if any(shape.kind for shape, _ in groups) else torch.empty
        self.memory = make(size, dtype=torch.uint8, device=device)
        self._used = 0

    def take(self, shape: SiteShape, rows: range) -> Rows:
        size = _aligned(shape.num_bytes(len(rows), self._dtype.itemsize))
        memory = self.memory[self._used : self._used + size]
        self._used += size
        return Rows(shape, rows, memory, self._dtype)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _ring_of(plans: Sequence[SitePlan], sizes: RingSizes, number_bytes: int) -> tuple[int, int]:
    """Number of slots, and bytes of each: the largest chunk's."""
    chunks = [plan.shape.num_bytes(len(rows), number_bytes) for plan in plans for rows in plan.cuts.chunks]
    return min(sizes.num_slots, len(chunks)), _aligned(max(chunks, default=0))


def _kinds_of_layers(model: CausalLM, kinds: Mapping[str, str]) -> dict[Linear, str]:
    return {
        module: kinds[f"{name}.weight"]
        for name, module in model.named_modules()
        if isinstance(module, Linear) and f"{name}.weight" in kinds
    }


def _layers_of(site: LinearSite | Neurons) -> tuple[Linear, ...]:
    return (*site.ins, site.out) if isinstance(site, Neurons) else site.ins


def _shape_of(site: LinearSite | Neurons, kinds: Mapping[Linear, str]) -> SiteShape:
    found = {kinds.get(layer) for layer in _layers_of(site)}
    kind = found.pop() if len(found) == 1 else None
    num_rows = [layer.weight.shape[0] for layer in site.ins]
    num_in = site.ins[0].weight.shape[1]
    if isinstance(site, Neurons):
        return SiteShape(
            num_in=num_in,
            num_rows=num_rows[0],
            num_ins=len(num_rows),
            num_out=site.out.weight.shape[0],
            kind=kind,
        )
    return SiteShape(num_in=num_in, num_rows=sum(num_rows), kind=kind)


def _answer_sizes(site: LinearSite | Neurons) -> list[int]:
    layers = (site.out,) if isinstance(site, Neurons) else site.ins
    return [layer.weight.shape[0] for layer in layers]


def _activation_of(site: LinearSite | Neurons) -> Activation | None:
    return site.activation if isinstance(site, Neurons) else None


def _mask_of(site: LinearSite | Neurons) -> NeuronMask | None:
    return site.mask if isinstance(site, Neurons) else None


def _neuron_biases(site: LinearSite | Neurons) -> list[Tensor]:
    """Those before the activation."""
    return [layer.bias for layer in site.ins if layer.bias is not None] if isinstance(site, Neurons) else []


def _last_bias(site: LinearSite | Neurons) -> Tensor | None:
    """What is added to the answers of all matrices side by side."""
    layers = (site.out,) if isinstance(site, Neurons) else site.ins
    biases = [layer.bias for layer in layers if layer.bias is not None]
    if not biases:
        return None
    return torch.cat(
        [biases[0].new_zeros(layer.weight.shape[0]) if layer.bias is None else layer.bias for layer in layers]
    )


def _make_matrices(plan: SitePlan, parts: Sequence[Rows]) -> list[tuple[Linear, SplitMatrix]]:
    """Each matrix of a place in pieces, which are views of the parts."""
    site = plan.site
    parts = [part for part in parts if len(part.rows)]
    made: list[tuple[Linear, SplitMatrix]] = []
    first = 0  # row of the place
    for place, layer in enumerate(site.ins):
        num_rows, width = layer.weight.shape
        pieces = []
        for part in parts:
            if isinstance(site, Neurons):
                pieces.append(Piece(part.rows.start, part.ins[place]))
                continue
            start, stop = max(part.rows.start, first), min(part.rows.stop, first + num_rows)
            if start >= stop:
                continue
            if part.joint_in is not None:
                pieces.append(Piece(start - first, part.joint_in[start - part.rows.start : stop - part.rows.start]))
            else:
                pieces.append(Piece(start - first, part.ins[0], first=start - part.rows.start, num=stop - start))
        first += num_rows
        made.append((layer, SplitMatrix((num_rows, width), pieces, axis=0)))
    if isinstance(site, Neurons):
        num_out, num_rows = site.out.weight.shape
        columns = [Piece(part.rows.start, part.out) for part in parts if part.out is not None]
        made.append((site.out, SplitMatrix((num_out, num_rows), columns, axis=1)))
    return made

"""`DividedWeights`: the weights of a model over tiers: memory for each part, and what computes with it.

divide    memory, and pieces in the place of the parameters; `models/weights.py` fills them
bind      when they are filled: each place computes with its parts
rebind    later: other chunks lie on the GPU, or the CPU multiplies others (`models/weight_moves.py`)

Which rows lie where is planned before, without memory (`models/site_plans.py`).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ambidex.formats.neuron_predictor import PredictorFile
from ambidex.kernels.linear import LinearContext
from ambidex.layers.mlp import Neurons
from ambidex.layers.split_matrix import SplitMatrix
from ambidex.mlp.cuts import SiteShape
from ambidex.mlp.host_lane import HostSide
from ambidex.mlp.hot_neurons import NeuronMap
from ambidex.mlp.neuron_cache import CachedLayer, NeuronCounts
from ambidex.mlp.neuron_mover import NeuronPlace
from ambidex.mlp.parts import Part, Rows
from ambidex.mlp.predictor import Predictor
from ambidex.mlp.screen import Screen
from ambidex.mlp.sparse_side import SparseContext, SparseSide, find_scattered, lay_out
from ambidex.mlp.split_site import HostParts, HostPlace, SplitSite, StreamedPart, WeightLanes
from ambidex.models.base import CausalLM, LinearSite
from ambidex.models.site_layers import (
    activation_of,
    answer_sizes,
    last_bias,
    make_matrices,
    mask_of,
    neuron_biases,
)
from ambidex.models.site_plans import RingSizes, SitePlan, aligned, can_change_places, ring_of
from ambidex.storage.host_memory import HOST_MEMORY, HostMemory
from ambidex.storage.lane_clock import LaneClock
from ambidex.storage.weight_ring import Lap, WeightRing


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
        self._predictors: dict[LinearSite | Neurons, Predictor] = {}
        self._linear, self._host_linear, self._dtype = linear, host_linear, dtype
        near = _Arena(
            [(plan.shape, plan.cuts.on_gpu) for plan in plans],
            dtype,
            lambda size: torch.empty(size, dtype=torch.uint8, device=device),
        )
        far = _Arena([(plan.shape, rows) for plan in plans for rows in plan.cuts.chunks], dtype, memory.allocate)
        self.page_refusal = memory.advise(far.memory) if far.memory.numel() else None
        for arena in (near, far):
            if arena.is_quantized:  # rows are packed bit by bit into zeros
                arena.memory.zero_()
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
        num_slots, slot_bytes = ring_of(plans, sizes, dtype.itemsize)
        self.ring = WeightRing(num_slots, slot_bytes, device=device, clock=clock)
        self.matrices: dict[str, SplitMatrix] = {}
        names = {module: name for name, module in model.named_modules()}
        for plan, (gpu, host) in zip(plans, self._rows, strict=True):
            for layer, matrix in make_matrices(plan.site, [gpu, *host]):
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
                sizes=answer_sizes(plan.site),
                bias=last_bias(plan.site),
                resident=[
                    self._part(plan, rows, memory) for rows, memory in zip(host, self._near[place], strict=False)
                ],
            )

    def _count_neurons(self, near: Sequence[Part | None], sides: Sequence[Sequence[Part]]) -> dict[int, CachedLayer]:
        """The MLPs whose neurons may change places, with counters that their parts add to."""
        places = {
            plan.layer_idx: NeuronPlace(
                near=own, table=table, rows=rows,
                biases=[*neuron_biases(plan.site), *self._host_biases(plan)],
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
            screen, predictor = self._screens.get(plan.site), self._predictors.get(plan.site)
            return SparseSide(plan.shape, parts, self._sparse, counts, screen, predictor)
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

    def make_predictors(self, file: PredictorFile) -> None:
        """Take what a file predicts of the neurons that the CPU has, in the format of the weights."""
        for plan, host in self._host_rows():
            parts = self._host_parts(plan, host[: len(plan.cuts.on_cpu)])
            if not parts or plan.layer_idx is None or not is_sparse(plan.shape, parts):
                continue
            first, second = map(torch.from_numpy, file.matrices(plan.layer_idx))
            rows = slice(parts[0].rows.start, parts[-1].rows.stop)
            self._predictors[plan.site] = Predictor(
                first.to(self._dtype),
                second[rows].to(self._dtype, copy=True),  # a view would keep all rows
                threshold=file.threshold,
                linear=self._host_linear,
            )

    def host_predictors(self) -> list[Predictor | None]:
        """Of each of `host_neurons`."""
        return [
            self._predictors.get(plan.site)
            for plan, host in self._host_rows()
            if plan.shape.is_neuron_major
            and plan.cuts.on_cpu
            and is_sparse(plan.shape, self._host_parts(plan, host[: len(plan.cuts.on_cpu)]))
        ]

    def host_neurons(self) -> list[tuple[SiteShape, list[Part], Screen | None]]:
        """The CPU's parts of each MLP whose neurons can be left out, for measurements: the weights are filled."""
        found = [
            (plan.shape, self._host_parts(plan, host[: len(plan.cuts.on_cpu)]), self._screens.get(plan.site))
            for plan, host in self._host_rows()
            if plan.shape.is_neuron_major and plan.cuts.on_cpu
        ]
        return [(shape, parts, screen) for shape, parts, screen in found if is_sparse(shape, parts)]

    def host_sides(self) -> list[HostSide]:
        """What the CPU multiplies of each place, all neurons of it, for measurements: the weights are filled."""
        found = []
        for plan, host in self._host_rows():
            first = len(plan.cuts.movable)
            parts = self._host_parts(plan, host[first : first + len(plan.cuts.on_cpu)])
            found += [HostSide(plan.shape, parts)] if parts else []
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
        part = Part(numbers, activation_of(plan.site), self._linear, mask_of(plan.site))
        part.bind(neuron_biases(plan.site))
        return part

    def _host_parts(self, plan: SitePlan, host: Sequence[Rows]) -> list[Part]:
        parts = [Part(rows, activation_of(plan.site), self._host_linear, mask_of(plan.site)) for rows in host]
        for part in parts:
            part.bind(self._host_biases(plan))
        return parts

    def _host_biases(self, plan: SitePlan) -> list[Tensor]:
        """The biases before the activation as the CPU adds them: one copy, which all parts see; they are filled."""
        if plan.site not in self._biases:
            self._biases[plan.site] = [bias.to("cpu", torch.float32, copy=True) for bias in neuron_biases(plan.site)]
        return self._biases[plan.site]


def is_sparse(shape: SiteShape, parts: Sequence[Part]) -> bool:
    """Whether neurons of the CPU's parts of a place can be left out."""
    return shape.is_neuron_major and find_scattered(shape, parts) is None


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

    def __init__(
        self,
        groups: Sequence[tuple[SiteShape, range]],
        dtype: torch.dtype,
        allocate: Callable[[int], Tensor],
    ) -> None:
        self._dtype = dtype
        self.memory = allocate(sum(aligned(shape.num_bytes(len(rows), dtype.itemsize)) for shape, rows in groups))
        self.is_quantized = any(shape.kind for shape, _ in groups)
        self._used = 0

    def take(self, shape: SiteShape, rows: range) -> Rows:
        size = aligned(shape.num_bytes(len(rows), self._dtype.itemsize))
        memory = self.memory[self._used : self._used + size]
        self._used += size
        return Rows(shape, rows, memory, self._dtype)

"""The model with its weights, where they belong; and, where they are divided, who computes with them."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ambidex.core.config import EngineConfig, LoadFormat
from ambidex.core.sparsity import NeuronCache as CacheChoice
from ambidex.core.sparsity import NeuronFigures, SparsityKind
from ambidex.cost.sparsity import expected_reads
from ambidex.engine.compose.choices import Choices
from ambidex.engine.compose.sparsity import set_masks
from ambidex.kernels.cpu.picked import PickedPool
from ambidex.kernels.linear import LinearContext
from ambidex.mlp.host_lane import HostLane
from ambidex.mlp.hot_neurons import AveragedNeurons, StaticNeurons
from ambidex.mlp.neuron_cache import CachedLayer, NeuronCache
from ambidex.mlp.rates import LaneRates, keep_whole, measure_rates
from ambidex.mlp.sparse_rates import (
    NO_COSTS,
    costs_of,
    measure_costs,
    measure_screens,
    screen_costs_of,
    sparse_rates,
)
from ambidex.mlp.sparse_side import SparseContext, SparsityCounts
from ambidex.mlp.split_site import Level, WeightLanes
from ambidex.models.base import CausalLM
from ambidex.models.divided import DividedWeights
from ambidex.models.registry import build_model
from ambidex.models.site_plans import plan_sites
from ambidex.models.weights import load_weights, make_dummy_weights
from ambidex.runner.device import TORCH_DTYPES, activation_dtype
from ambidex.storage.host_memory import HostMemory
from ambidex.storage.lane_clock import LaneClock

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """Divided weights and who computes with them; `rates` None: nobody measured them."""

    weights: DividedWeights
    lanes: WeightLanes
    rates: LaneRates | None
    sparse: SparseContext | None = None
    """What the CPU's parts of MLPs share that leave out neurons."""
    cache: NeuronCache | None = None
    """What keeps hot neurons on the accelerator."""

    def neuron_figures(self) -> NeuronFigures | None:
        """What was left out so far; None: nothing can be."""
        if self.sparse is None:
            return None
        counts = self.sparse.counts
        return NeuronFigures(
            num_neurons=counts.num_neurons,
            num_active=counts.num_active,
            num_rows=counts.num_rows,
            num_rows_read=counts.num_rows_read,
            num_screened=counts.num_screened,
            num_candidates=counts.num_candidates,
            num_checked=counts.num_checked,
            num_found=counts.num_found,
            cache=None if self.cache is None else self.cache.figures(),
        )


def load_model(
    config: EngineConfig,
    choices: Choices,
    progress: Progress | None,
    host_memory: HostMemory,
    cpu_levels: Sequence[Level] | None,
    clock: LaneClock | None,
    shape_dummy: Callable[[CausalLM], None] | None = None,
) -> tuple[CausalLM, Divided | None]:
    device, dtype = choices.device, TORCH_DTYPES[choices.dtype]
    tiles_from = choices.crossovers.tiles_from
    linear = LinearContext(choices.threads if device.type == "cpu" else None, tiles_from=tiles_from)
    is_divided = choices.weights.placement is not None
    model = build_model(
        choices.spec,
        device=device,
        dtype=dtype,
        activation_dtype=TORCH_DTYPES[activation_dtype(choices.dtype, device)],
        linear=linear,
        matrix_device=torch.device("meta") if choices.keeps_quantized or is_divided else None,
    )
    if choices.sparsity is not None:
        set_masks(model, choices.sparsity)
    divided = None
    host_linear = linear if device.type == "cpu" else LinearContext(choices.threads, tiles_from=tiles_from)
    if choices.weights.placement is not None:
        sizes = choices.weights.ring
        divided = DividedWeights(
            model,
            plan_sites(
                model,
                choices.weights.placement,
                chunk_bytes=sizes.chunk_bytes,
                number_bytes=choices.dtype.num_bytes,
                kinds=choices.weights.kinds,
                movable_share=choices.weights.movable_share,
                skips_neurons=choices.sparsity is not None,
            ),
            sizes=sizes,
            device=device,
            dtype=dtype,
            linear=linear,
            host_linear=host_linear,
            memory=host_memory,
            clock=clock,
        )
    matrices = divided.matrices if divided is not None else {}
    if config.load_format is LoadFormat.DUMMY:
        make_dummy_weights(model, choices.spec, seed=config.seed, device=device, dtype=dtype, divided=matrices)
        if shape_dummy is not None:
            shape_dummy(model)
    else:
        load_weights(
            model,
            choices.spec,
            choices.source,
            device=device,
            dtype=dtype,
            keeps_quantized=choices.keeps_quantized,
            divided=matrices,
            progress=progress,
        )
    if divided is None:
        return model.eval(), None
    levels, rates = [Level(most_tokens=sys.maxsize, cpu_share=1.0)], None
    sparse = _make_sparse(choices, divided, host_linear)
    if device.type == "cuda" and (sides := divided.host_sides()):
        rates = measure_rates(sides, host_linear, divided.host_chunks(), divided.ring.slots)
        if sparse is not None and choices.sparsity is not None:
            share = choices.sparsity.active_share
            reads = expected_reads(
                choices.spec, choices.sparsity.sparsity, choices.sparsity.profile, number_bytes=choices.dtype.num_bytes
            )
            found = sparse_rates(
                divided.host_neurons(), sparse, active_share=share, predictors=divided.host_predictors()
            )
            rates = replace(rates, cpu=found, reads=reads.at(1))
            sparse.counts = SparsityCounts()
        sizes_in_dram = choices.weights.parts
        assert sizes_in_dram is not None, "divided weights were counted"
        levels = rates.levels(on_cpu=sizes_in_dram.on_cpu, streamed=sizes_in_dram.streamed)
        if choices.weights.auto is not None:
            decided = config.max_running_requests if config.tune_weights else choices.weights.auto.workload.batch
            levels = keep_whole(levels, decided)
    if cpu_levels is not None:  # measured all the same, for the faster form of the CPU's products
        levels = list(cpu_levels)
    lanes = WeightLanes(
        divided.ring,
        dtype=TORCH_DTYPES[activation_dtype(choices.dtype, device)],
        most_native_tokens=host_linear.most_native_tokens,
        levels=levels,
        begin_host=HostLane(device).begin,
        owner=divided,
    )
    cached = divided.bind(lanes, sparse, counts_neurons=choices.weights.moved_pairs > 0)
    cache = _make_cache(config, choices, cached, device) if cached else None
    return model.eval(), Divided(weights=divided, lanes=lanes, rates=rates, sparse=sparse, cache=cache)


def _make_cache(
    config: EngineConfig, choices: Choices, cached: Mapping[int, CachedLayer], device: torch.device
) -> NeuronCache:
    """What keeps hot neurons on the accelerator, beginning with the most active of the profile if there is one."""
    layers = list(cached.values())
    num_neurons = max(layer.place.num_near + layer.place.num_far for layer in layers)
    activity = np.zeros((len(layers), max(num_neurons, choices.spec.intermediate_size)), dtype=np.float32)
    profile = choices.sparsity.profile if choices.sparsity is not None else None
    if profile is not None:
        activity[:, : choices.spec.intermediate_size] = profile.activity[list(cached)]
    is_dynamic = config.neuron_cache is CacheChoice.DYNAMIC
    cache = NeuronCache(
        layers,
        AveragedNeurons(activity.astype(np.float64)) if is_dynamic else StaticNeurons(),
        most_pairs=choices.weights.moved_pairs,
        moves=is_dynamic,
        device=device,
    )
    if profile is not None:
        cache.arrange(list(activity))
    return cache


def _make_sparse(choices: Choices, divided: DividedWeights, linear: LinearContext) -> SparseContext | None:
    """What the CPU's parts of MLPs share that leave out neurons, with costs as the machine's profile has them, or as
    measured now with these weights; None: there are none."""
    if choices.sparsity is not None and choices.sparsity.sparsity.kind is SparsityKind.RELU_SCREENED:
        divided.make_screens()
    if choices.sparsity is not None and choices.sparsity.predictor is not None:
        divided.make_predictors(choices.sparsity.predictor)
    places = divided.host_neurons() if choices.sparsity is not None else []
    if not places:
        return None
    # Where the accelerator is the CPU, torch has one thread in decode steps (`TorchThreads`).
    num_threads = 1 if choices.device.type == "cpu" else choices.num_threads
    threads = choices.threads
    context = SparseContext(
        linear=linear,
        num_threads=num_threads,
        costs=NO_COSTS,
        picked=None if threads is None else PickedPool(threads),
    )
    has_screens = any(screen is not None for _, _, screen in places)
    known, row_bytes = choices.crossovers.neurons(choices.dtype), places[0][0].num_in * choices.dtype.num_bytes
    if known is not None:
        context.costs = costs_of(known, row_bytes)
        context.screen_costs = screen_costs_of(known, row_bytes) if has_screens else None
        return context
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    with torch.inference_mode():
        context.costs = measure_costs(places, context)
        if has_screens:
            context.screen_costs = measure_screens(places, context)
    torch.set_num_threads(before)
    context.counts = SparsityCounts()
    return context

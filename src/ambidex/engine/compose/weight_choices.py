"""Where weights lie: as a file or the solver says, or what fits on the accelerator there and the rest in DRAM.

Nothing is loaded here: `weights.py` and `models/divided.py` carry it out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from ambidex.core.config import DTypeChoice, EngineConfig, LoadFormat
from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError
from ambidex.core.ids import Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.placement import Placement
from ambidex.core.sparsity import NeuronCache, SparsityKind
from ambidex.core.units import format_size
from ambidex.cost.sparsity import expected_reads
from ambidex.cost.weights import DIVIDED_ON_CPU, DIVIDED_ON_GPU, PLAIN, WHOLE_ON_CPU, Residence
from ambidex.engine.auto_placement import AUTO, AutoPlacement, Budgets, solve_weights
from ambidex.engine.compose.crossovers import read_machine_profile
from ambidex.engine.compose.sparsity import SparsityChoice
from ambidex.engine.kv_format import KVFormat
from ambidex.engine.lane_preset import streamed_share
from ambidex.engine.memory import FixedBytes, FreeMemory, WeightBytes, find_gpu_budget
from ambidex.engine.weights_plan import (
    KV_SHARE,
    MOVABLE_SHARE,
    NUM_SLOTS,
    STREAMED_SHARE,
    chunk_bytes_for,
    fill_placement,
    read_placement,
)
from ambidex.hw.profile import Curve, HardwareProfile
from ambidex.kernels.reference.quantized import RECORD_BYTES as GPU_KINDS
from ambidex.layers.linear import Linear
from ambidex.models.base import CausalLM
from ambidex.models.quantized import count_weights_bytes, find_kept
from ambidex.models.site_plans import (
    ALIGNMENT_BYTES,
    DividedBytes,
    RingSizes,
    count_bytes,
    count_predictors,
    count_screens,
    measure_weights,
    most_moved_pairs,
    plan_sites,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightChoices:
    """Where weights lie. `placement` None: all on the accelerator. `kinds`: GGUF types of what is divided as stored."""

    placement: Placement | None
    why: str
    ring: RingSizes
    bytes: WeightBytes
    parts: DividedBytes | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    auto: AutoPlacement | None = None
    """What was solved, if it was."""
    movable_share: float = 0.0
    """Of what lies on the accelerator, that may leave it while the engine runs."""
    moved_pairs: int = 0
    """Pairs of neurons that change places at a time; 0: none can."""


def choose_weights(
    config: EngineConfig,
    spec: ModelSpec,
    skeleton: CausalLM,
    dtype: DType,
    device: torch.device,
    kv: KVFormat,
    *,
    keeps_quantized: bool,
    free: FreeMemory,
    fixed: FixedBytes,
    ring: RingSizes | None,
    profile: HardwareProfile | None,
    dummy_kind: str | None,
    stream_blocks: int,
    sparsity: SparsityChoice | None,
) -> WeightChoices:
    """Where weights lie: as a file or the solver says, or what fits on the accelerator there and the rest in DRAM.

    Args:
        sparsity: what the CPU leaves out; if it does, all that lies in DRAM is its part where nobody has solved for it,
            of which the rates that are measured at start give some to the link.
    Raises:
        ConfigError: the file cannot be used, or what cannot be divided does not fit.
    """
    skips_neurons = sparsity is not None
    as_stored = find_kept(spec) if keeps_quantized else {}
    kinds = as_stored if device.type == "cpu" else _find_kinds_for_gpu(config, spec)
    if dummy_kind is not None:
        linears = [f"{name}.weight" for name, module in skeleton.named_modules() if isinstance(module, Linear)]
        kinds = dict.fromkeys(linears, dummy_kind)
    total = sum(count_weights_bytes(skeleton, as_stored).values())
    budget = find_gpu_budget(config, free)
    ring = ring or RingSizes(chunk_bytes=chunk_bytes_for(budget), num_slots=NUM_SLOTS)
    cut = partial(plan_sites, skeleton, chunk_bytes=ring.chunk_bytes, number_bytes=dtype.num_bytes)
    auto: AutoPlacement | None = None
    if config.placement == AUTO:
        profile = profile or read_machine_profile(device)
        num_parts = len(cut(Placement.all_on_gpu(spec.num_layers)))
        auto = solve_weights(
            config,
            spec,
            dtype=dtype,
            profile=profile,
            budgets=Budgets(
                gpu=budget,
                dram=(config.dram_memory if config.dram_memory is not None else free.dram)
                - (int(MOVABLE_SHARE * budget) if config.tune_weights else 0),
                gpu_fixed=fixed.total + num_parts * ALIGNMENT_BYTES,
                ring=ring.num_slots * ring.chunk_bytes,
                stream_blocks=stream_blocks,
            ),
            residence=find_residence(device, has_kinds=bool(kinds), is_whole=profile.gpu is None),
            kind=dummy_kind,
            mlp_reads=_find_reads(spec, sparsity, dtype),
        )
        placement, why = auto.placement, auto.why
        if placement.is_all_on_gpu and (device.type == "cpu" or not kinds):  # else only divided ones stay as stored
            return WeightChoices(placement=None, why=why, ring=ring, bytes=WeightBytes(on_gpu=total), auto=auto)
    elif config.placement is not None:
        placement, why = read_placement(config.placement, spec.num_layers), f"as {config.placement} says"
    else:
        least_kv = kv.specs[Tier.GPU].num_blocks(config.kv_gpu_tokens or 0) * kv.specs[Tier.GPU].bytes_per_block
        wanted, why = config.weights_gpu_memory, "asked for"
        if wanted is None and not free.is_shared and budget < total + fixed.total + least_kv:
            kept = least_kv if config.kv_gpu_tokens is not None else int((budget - fixed.total) * KV_SHARE)
            wanted, why = max(0, budget - fixed.total - kept), "what the budget leaves beside workspace and some KV"
        if wanted is None or wanted >= total:
            return WeightChoices(placement=None, why="they fit", ring=ring, bytes=WeightBytes(on_gpu=total))
        sizes = measure_weights(skeleton, dtype.num_bytes, kinds=kinds, whole_kinds=as_stored)
        share = streamed_share(config, STREAMED_SHARE if device.type == "cuda" and not skips_neurons else 0.0)
        in_dram = fill_placement(sizes, 0, streamed_share=share)
        nothing = cut(in_dram, kinds=kinds)
        least = sizes.whole + count_bytes(nothing, ring, dtype.num_bytes).ring + ALIGNMENT_BYTES * len(nothing)
        if config.neuron_cache is not NeuronCache.OFF:
            least += config.neuron_move_memory
        if wanted < least:
            raise ConfigError(
                f"`weights_gpu_memory` {format_size(wanted)} ({why}) is too small: embedding, norms and buffers for "
                f"weights on their way take {format_size(least)}: give at least that, or a larger `gpu_memory`"
            )
        placement = fill_placement(sizes, wanted - least, streamed_share=share)
    movable = MOVABLE_SHARE if config.tune_weights else 0.0
    sizes = measure_weights(skeleton, dtype.num_bytes, kinds=kinds, whole_kinds=as_stored)
    plans = cut(placement, kinds=kinds, movable_share=movable, skips_neurons=skips_neurons)
    parts = count_bytes(plans, ring, dtype.num_bytes)
    screens_rows = sparsity is not None and sparsity.sparsity.kind is SparsityKind.RELU_SCREENED
    screens = count_screens(plans) if screens_rows else 0
    if sparsity is not None and sparsity.predictor is not None:
        screens += count_predictors(plans, sparsity.predictor.ranks, dtype.num_bytes)
    pairs, moving = 0, 0
    if config.neuron_cache is not NeuronCache.OFF:
        pairs, moving = most_moved_pairs(plans, config.neuron_move_memory, dtype.num_bytes)
    return WeightChoices(
        placement=placement,
        why=why,
        ring=ring,
        bytes=WeightBytes(
            on_gpu=sizes.whole + parts.on_gpu,
            in_dram=parts.on_cpu + parts.streamed + parts.movable,
            screens=screens,
            ring=parts.ring,
            moving=moving,
        ),
        movable_share=movable,
        parts=parts,
        kinds=kinds,
        auto=auto,
        moved_pairs=pairs,
    )


def _find_reads(spec: ModelSpec, sparsity: SparsityChoice | None, dtype: DType) -> Curve | None:
    """Shares of MLPs that the CPU reads; None: all."""
    if sparsity is None:
        return None
    return expected_reads(spec, sparsity.sparsity, sparsity.profile, number_bytes=dtype.num_bytes)


def find_residence(device: torch.device, *, has_kinds: bool, is_whole: bool) -> Residence:
    """Which quantised matrices stay as they are stored."""
    if not has_kinds:
        return PLAIN
    if device.type == "cuda":
        return DIVIDED_ON_GPU
    return WHOLE_ON_CPU if is_whole else DIVIDED_ON_CPU


def _find_kinds_for_gpu(config: EngineConfig, spec: ModelSpec) -> dict[str, str]:
    """Matrices of a GGUF file that a GPU multiplies as they are stored, where they are divided, and their types."""
    if config.dtype is not DTypeChoice.AUTO or config.load_format is LoadFormat.DUMMY:
        return {}
    return {name: kind for name, kind in find_kept(spec).items() if kind in GPU_KINDS}

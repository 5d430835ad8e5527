"""The model with its weights, where they belong; and, where they are divided, who computes with them."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ambidex.core.config import EngineConfig, LoadFormat
from ambidex.engine.compose.choices import Choices
from ambidex.kernels.linear import LinearContext
from ambidex.mlp.host_lane import HostLane
from ambidex.mlp.rates import LaneRates, keep_whole, measure_rates
from ambidex.mlp.split_site import Level, WeightLanes
from ambidex.models.base import CausalLM
from ambidex.models.divided import (
    DividedWeights,
    plan_sites,
)
from ambidex.models.registry import build_model
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


def load_model(
    config: EngineConfig,
    choices: Choices,
    progress: Progress | None,
    host_memory: HostMemory,
    cpu_levels: Sequence[Level] | None,
    clock: LaneClock | None,
) -> tuple[CausalLM, Divided | None]:
    device, dtype = choices.device, TORCH_DTYPES[choices.dtype]
    linear = LinearContext(choices.threads if device.type == "cpu" else None)
    is_divided = choices.weights.placement is not None
    model = build_model(
        choices.spec,
        device=device,
        dtype=dtype,
        activation_dtype=TORCH_DTYPES[activation_dtype(choices.dtype, device)],
        linear=linear,
        matrix_device=torch.device("meta") if choices.keeps_quantized or is_divided else None,
    )
    divided = None
    host_linear = linear if device.type == "cpu" else LinearContext(choices.threads)
    if choices.weights.placement is not None:
        sizes = choices.weights.ring
        divided = DividedWeights(
            model,
            plan_sites(
                model,
                choices.weights.placement,
                chunk_size=sizes.chunk_bytes // choices.dtype.num_bytes,
                kinds=choices.weights.kinds,
                movable_share=choices.weights.movable_share,
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
        make_dummy_weights(model, seed=config.seed, device=device, dtype=dtype, divided=matrices)
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
    if device.type == "cuda" and (parts := divided.host_parts()):
        rates = measure_rates(parts, host_linear, divided.host_chunks(), divided.ring.slots)
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
    divided.bind(lanes)
    return model.eval(), Divided(weights=divided, lanes=lanes, rates=rates)

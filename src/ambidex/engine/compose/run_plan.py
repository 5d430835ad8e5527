"""What is said at start of an engine whose weights or keys do not all lie on the accelerator."""

import os
from collections.abc import Callable
from dataclasses import dataclass

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.ids import Tier
from ambidex.core.placement import Placement
from ambidex.cost.sparsity import expected_reads
from ambidex.cost.weights import count_weights
from ambidex.cost.workload import Workload
from ambidex.engine.auto_placement import Predict
from ambidex.engine.compose.choices import Choices
from ambidex.engine.compose.crossovers import read_machine_profile
from ambidex.engine.compose.weight_choices import find_residence
from ambidex.engine.compose.weights import Divided
from ambidex.engine.forecast import NearKeys, PlacedForecast
from ambidex.engine.run_plan import CONTEXT, Forecast, RunPlan, make_run_plan
from ambidex.hw.profile import HardwareProfile
from ambidex.hw.profile_file import has_profile


@dataclass(frozen=True, slots=True)
class Expected:
    """What is shown of an engine at start, and what its decode steps should take; None: nothing, nobody says."""

    plan: RunPlan | None = None
    predict_step: Predict | None = None


def expect_steps(
    config: EngineConfig,
    choices: Choices,
    divided: Divided | None,
    *,
    stream_share: float,
    kv_bytes: dict[Tier, int],
    profile: HardwareProfile | None,
    dummy_kind: str | None,
) -> Expected:
    """The plan of an engine that is built, and its predictions.

    Args:
        stream_share: of the keys in DRAM, that a GPU reads over the link.
        kv_bytes: that the pools of each tier hold.
        profile: of the machine; None: the one that `ambidex calibrate` wrote, if there is one.
        dummy_kind: as in `build_engine`.
    """
    auto, parts = choices.weights.auto, choices.weights.parts
    near = _near_keys(config, choices, stream_share)
    longest = choices.memory.max_context_len
    is_spread = (parts is not None and parts.on_cpu + parts.streamed > 0) or near.shares(1, longest).on_gpu < 1.0
    solved = None if auto is None else auto.predict_step_s
    if not is_spread:
        return Expected(predict_step=solved)
    forecast: Forecast | str
    predict: Predict | None = solved
    if auto is not None:
        forecast, batch, context = auto.predict_step, auto.workload.batch, auto.workload.context
    else:
        context = min(CONTEXT, max(1, longest // 2))
        capacity = config.block_size * sum(choices.memory.num_blocks.values())
        batch = max(1, min(config.max_running_requests, capacity // context))
        forecast = _make_forecast(config, choices, divided, near, profile, dummy_kind)
        if not isinstance(forecast, str):
            predict = forecast.step_s
    levels = (lambda _: 1.0) if divided is None else _cpu_share(divided)
    moved = 0 if parts is None else round(parts.on_cpu * (1 - levels(1)))
    plan = make_run_plan(
        weights={
            "gpu": choices.weights.bytes.on_gpu,
            "cpu": 0 if parts is None else parts.on_cpu - moved,
            "link": 0 if parts is None else parts.streamed + moved,
        },
        kv=kv_bytes,
        accelerator="GPU" if choices.device.type == "cuda" else "CPU",
        stream_share=stream_share,
        forecast=forecast,
        batches=(1, batch),
        context=context,
    )
    return Expected(plan, predict)


def _near_keys(config: EngineConfig, choices: Choices, stream_share: float) -> NearKeys:
    of_one = None
    if config.recent_window is not None:
        of_one = config.num_sink_tokens + config.recent_window + config.block_size
    return NearKeys(
        of_all=choices.memory.num_blocks[Tier.GPU] * config.block_size, of_one=of_one, stream_share=stream_share
    )


def _cpu_share(divided: Divided) -> Callable[[int], float]:
    lanes = divided.lanes
    return lambda num_tokens: lanes.levels[lanes.level_of(num_tokens)].cpu_share


def _make_forecast(
    config: EngineConfig,
    choices: Choices,
    divided: Divided | None,
    near: NearKeys,
    profile: HardwareProfile | None,
    dummy_kind: str | None,
) -> PlacedForecast | str:
    """What predicts steps, or why nothing does."""
    if not config.policy.attends_all:
        return f"`policy` {config.policy} chooses keys step by step, which nothing predicts"
    if profile is None and not has_profile(os.environ):
        return "nobody has measured this machine: run `ambidex calibrate` once, it takes a minute or two"
    is_cpu = choices.device.type == "cpu"
    kinds = choices.weights.kinds if divided is not None else {}
    sparsity = choices.sparsity
    try:
        profile = profile or read_machine_profile(choices.device)
        forecast = PlacedForecast(
            spec=choices.spec,
            weights=count_weights(
                choices.spec,
                residence=find_residence(
                    choices.device,
                    has_kinds=bool(kinds) or (divided is None and is_cpu and choices.keeps_quantized),
                    is_whole=divided is None,
                ),
                dtype=choices.dtype,
                kind=dummy_kind if divided is not None else None,
            ),
            dtype=choices.dtype,
            profile=profile,
            workload=Workload(chunk=config.max_tokens_per_step, kv_dtypes=config.kv_dtypes),
            placement=choices.weights.placement or Placement.all_on_gpu(choices.spec.num_layers),
            keys=near,
            cpu_share=(lambda _: 1.0) if divided is None else _cpu_share(divided),
            mlp_reads=None
            if sparsity is None
            else expected_reads(
                choices.spec, sparsity.sparsity, sparsity.profile, number_bytes=choices.dtype.num_bytes
            ),
        )
        forecast(1, 1)  # a rate that is missing is said now
    except ConfigError as error:
        return str(error)
    return forecast

"""Policies that say who reads what lies in DRAM (`core.policy.LANE_PRESETS`) → settings of this engine's lanes.

flexgen         all KV in DRAM, all of it over the link to the GPU in each layer and step; weights that do not fit
                travel once a step, which computes all running requests layer by layer: that is the zig-zag over a
                block whose batches are computed as one. So `max_running_requests` is the block, and a step's tokens
                are its activations
moe_lightning   all KV in DRAM, attended there by the CPU alone; weights that do not fit travel beside it, in pieces
                (pages) through a ring, so that no small transfer waits behind a whole layer

Where this engine differs from the authors' programs:

- a step is not cut into micro-batches: in moe_lightning the CPU's attention of some requests does not run beside the
  GPU's MLP of others, only beside weights on their way; in flexgen there is no batch inside the block
- the newest, unfinished block of a request is on the GPU, and so are its first `num_sink_tokens` tokens
- activations stay on the GPU; nothing lies on a disk
- keys that the buffers for streamed keys do not hold (a twentieth of the GPU's budget) are attended by the CPU, also in
  flexgen
- without a GPU there is no link: both read all keys where they lie, and a counter says so
"""

from dataclasses import replace
from typing import Any

from ambidex.core.config import EngineConfig
from ambidex.core.kv_spec import STEP_MOST_SHARE
from ambidex.core.policy import LANE_PRESETS


def follow_preset(config: EngineConfig, *, has_link: bool) -> EngineConfig:
    """The settings that a policy of that kind stands for; those of another policy as they are.

    Args:
        has_link: keys in DRAM can be read by a GPU.
    """
    preset = LANE_PRESETS.get(config.policy)
    if preset is None:
        return config
    changes: dict[str, Any] = {}
    if has_link:
        changes["stream_percent"] = preset.stream_percent
    if config.recent_window is None and not (preset.keeps_keys and config.placement is not None):
        changes["recent_window"] = 0
    return replace(config, **changes)


def most_streamed_share(config: EngineConfig) -> float:
    """Of a context's blocks that a decode step's buffers shall hold, within their share of the GPU's budget."""
    preset = LANE_PRESETS.get(config.policy)
    return max(STEP_MOST_SHARE, preset.stream_percent / 100) if preset is not None else STEP_MOST_SHARE


def streamed_share(config: EngineConfig, otherwise: float) -> float:
    """Of the weights in DRAM, what travels to the GPU in every step; the CPU multiplies the rest."""
    return 1.0 if config.policy in LANE_PRESETS else otherwise

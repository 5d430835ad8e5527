"""Where weights lie when they do not fit on the GPU: from a file, or by a rule. Plain values only."""

import logging
from pathlib import Path
from typing import Final

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.placement import LayerPlacement, Placement, WeightSizes, WeightSplit
from ambidex.core.units import MIB, format_size
from ambidex.solver.placement_file import read_pins, whole_placement

logger = logging.getLogger(__name__)

STREAMED_SHARE: Final = 0.35
"""Of the weights in DRAM, that a GPU reads over the link: link / (link + DRAM), so that both lanes end together.
Measured (H200 machine, 16 cores, PCIe 5 x16): 55 GB/s over the link beside 96 GB/s that 15 threads read."""
KV_SHARE: Final = 0.2
"""Of the accelerator's budget beside workspace, that is kept for KV where weights do not fit and nothing is said."""
RING_SHARE: Final = 0.05
"""Of the accelerator's budget, at most, for weights on their way."""
MOST_CHUNK_BYTES: Final = 64 * MIB
"""A chunk takes a PCIe 5 x16 link 1.2 ms, beside which a launch is nothing."""
MOVABLE_SHARE: Final = 0.25
"""Of the rows of each place on the GPU, that may leave it while an engine runs: as much DRAM is kept for them. More of
them would cut products into more pieces."""
NUM_SLOTS: Final = 4
"""Chunks on their way: the link runs on for 5 ms while the GPU attends or waits for the CPU."""


def fill_placement(sizes: WeightSizes, gpu_bytes: int, *, streamed_share: float) -> Placement:
    """Put on the GPU what fits: the last projection, then the same share of every layer's attention, then of every MLP.

    Attention comes first, since a part of it elsewhere costs two meetings of GPU and CPU in a layer.

    Args:
        gpu_bytes: for matrices that may be divided.
        streamed_share: of what lies in DRAM.
    """
    left = max(0, gpu_bytes)

    def split(num_bytes: int) -> WeightSplit:
        nonlocal left
        taken = min(left, num_bytes)
        left -= taken
        on_gpu = taken / num_bytes if num_bytes else 1.0
        streamed = (1.0 - on_gpu) * streamed_share
        return WeightSplit(on_gpu=on_gpu, streamed=streamed, on_cpu=1.0 - on_gpu - streamed)

    head = split(sizes.head)
    attention, mlp = split(sum(sizes.attention)), split(sum(sizes.mlp))
    return Placement(layers=(LayerPlacement(attention=attention, mlp=mlp),) * len(sizes.mlp), head=head)


def chunk_bytes_for(gpu_budget: int) -> int:
    """Bytes of a chunk of weights on their way, so that the ring takes no more than its share of the GPU's budget."""
    return max(1, min(MOST_CHUNK_BYTES, int(gpu_budget * RING_SHARE) // NUM_SLOTS))


def read_placement(path: str, num_layers: int) -> Placement:
    """Read where all weights of a model lie, from a file as `ambidex plan` writes it (`solver/placement_file.py`).

    What it says about keys and values is for the settings of KV, and a warning says so.

    Raises:
        ConfigError: the file cannot be read, is no placement, or leaves out a part of the model.
    """
    pins = read_pins(Path(path), num_layers)
    placement, kv = whole_placement(pins, num_layers, where=f"placement file {path}")
    if kv is not None:
        logger.warning("what %s says about keys and values is left to `kv_gpu_tokens` and `stream_percent`", path)
    return placement


def describe_split(on_gpu: int, on_cpu: int, streamed: int) -> str:
    """Where weights lie, for people."""
    total = max(1, on_gpu + on_cpu + streamed)
    parts = (("on the GPU", on_gpu), ("multiplied by the CPU", on_cpu), ("over the link", streamed))
    return ", ".join(f"{format_size(size)} {what} ({100 * size / total:.0f} %)" for what, size in parts if size)


def check_placement(config: EngineConfig, *, looks_ahead: bool, placement: Placement) -> None:
    """Refuse what cannot go together.

    Raises:
        ConfigError: a policy computes queries a layer early, and attention is divided.
    """
    if looks_ahead and any(layer.attention.on_gpu != 1.0 for layer in placement.layers):
        raise ConfigError(
            f"policy {config.policy} computes queries a layer ahead: the weights of attention must lie on the "
            f"accelerator as a whole; give a larger `weights_gpu_memory`, or a `placement` that divides MLPs only"
        )

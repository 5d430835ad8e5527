"""Where weights lie when they do not fit on the GPU: from a file, or by a rule. Plain values only."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from ambidex.core.config import EngineConfig
from ambidex.core.errors import AmbidexError, ConfigError
from ambidex.core.placement import LayerPlacement, Placement, WeightSizes, WeightSplit
from ambidex.core.units import MIB, format_size
from ambidex.formats.json_file import read_json_object

STREAMED_SHARE: Final = 0.35
"""Of the weights in DRAM, that a GPU reads over the link: link / (link + DRAM), so that both lanes end together.
Measured (H200 machine, 16 cores, PCIe 5 x16): 55 GB/s over the link beside 96 GB/s that 15 threads read."""
KV_SHARE: Final = 0.2
"""Of the accelerator's budget beside workspace, that is kept for KV where weights do not fit and nothing is said."""
RING_SHARE: Final = 0.05
"""Of the accelerator's budget, at most, for weights on their way."""
MOST_CHUNK_BYTES: Final = 64 * MIB
"""A chunk takes a PCIe 5 x16 link 1.2 ms, beside which a launch is nothing."""
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


def read_placement(path: str) -> Placement:
    """Read a placement: `{"layers": [{"attention": {"on_gpu": 1.0, …}, "mlp": {…}}, …], "head": {…}}`.

    Shares that are left out have the defaults of `WeightSplit`.

    Raises:
        ConfigError: the file cannot be read, is not of that form, or shares do not add up.
    """
    try:
        content = read_json_object(Path(path))
    except AmbidexError as error:
        raise ConfigError(f"`placement` {path}: {error}") from error
    top = _fields(content, path, "the placement", ("layers", "head"))
    layers = top.get("layers")
    if not isinstance(layers, list) or not layers:
        raise ConfigError(f"`placement` {path}: `layers` must be a list with an entry for each layer")
    made = []
    for place, layer in enumerate(layers):
        of_layer = _fields(layer, path, f"layer {place}", ("attention", "mlp"))
        splits = {name: _split(value, path, f"{name} of layer {place}") for name, value in of_layer.items()}
        made.append(LayerPlacement(**splits))
    head = _split(top["head"], path, "head") if "head" in top else WeightSplit()
    return Placement(layers=tuple(made), head=head)


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


def _split(value: object, path: str, where: str) -> WeightSplit:
    names = tuple(item.name for item in fields(WeightSplit))
    shares = _fields(value, path, where, names)
    for name, share in shares.items():
        if not isinstance(share, int | float) or isinstance(share, bool):
            raise ConfigError(f"`placement` {path}: {name} of {where} is {share!r}, not a number")
    if shares and "on_gpu" not in shares:
        shares = {"on_gpu": 0.0, **shares}
    try:
        return WeightSplit(**shares)
    except ConfigError as error:
        raise ConfigError(f"`placement` {path}: {where}: {error}") from error


def _fields(value: object, path: str, where: str, names: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"`placement` {path}: {where} must be an object with {', '.join(names)}")
    for name in value:
        if name not in names:
            raise ConfigError(
                f"`placement` {path}: {where} has an unknown field {name!r}: known are {', '.join(names)}"
            )
    return value

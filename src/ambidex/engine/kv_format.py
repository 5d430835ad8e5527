"""In which number format and order each tier keeps K and V, and why. Values only, no allocation."""

from collections.abc import Mapping
from dataclasses import dataclass

from ambidex.core.config import EngineConfig
from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError
from ambidex.core.ids import Tier
from ambidex.core.kv_dtypes import KVDTypes
from ambidex.core.kv_spec import TILE_TOKENS, KVOrder, KVSpec
from ambidex.core.model_spec import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFormat:
    """The KV cache as each tier keeps it, and the reason for the order of the tiers in host memory."""

    specs: Mapping[Tier, KVSpec]
    why: str


def choose_kv_format(
    config: EngineConfig, spec: ModelSpec, *, dtype: DType, has_row_ops: bool, has_native: bool
) -> KVFormat:
    """The format of both tiers.

    Args:
        dtype: the format of weights, which K and V have unless `config.kv_dtype` names another.
        has_row_ops: the accelerator is a GPU, or plays one: its tier keeps rows in `dtype`, as its own ops read them.
        has_native: the compiled module loads.
    Raises:
        ConfigError: integers are asked for, and the tiers in host memory cannot be in tile order.
    """
    host_dtypes = config.kv_dtypes or KVDTypes.both(dtype)
    order, why = choose_host_order(config.block_size, has_native)
    if host_dtypes.k.has_scales and order is not KVOrder.TILES:
        raise ConfigError(f"`kv_dtype` {host_dtypes} needs K and V in tile order, but {why}")
    host = KVSpec.of(spec, dtype=host_dtypes, block_size=config.block_size, order=order)
    gpu = KVSpec.of(spec, dtype=dtype, block_size=config.block_size) if has_row_ops else host
    return KVFormat(specs={Tier.GPU: gpu, Tier.DRAM: host}, why=why)


def choose_host_order(block_size: int, has_native: bool) -> tuple[KVOrder, str]:
    """The order of numbers of the tiers in host memory, and the reason."""
    if not has_native:
        return KVOrder.ROWS, "native CPU attention is missing: the compiled module does not load"
    if block_size % TILE_TOKENS:
        return KVOrder.ROWS, f"native CPU attention needs a `block_size` that {TILE_TOKENS} divides, not {block_size}"
    return KVOrder.TILES, "native CPU attention reads it in place"

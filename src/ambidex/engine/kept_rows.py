"""Which rows of K and V a policy keeps beside the blocks, and why there are none. Values only, no allocation."""

from collections.abc import Mapping

from ambidex.core.config import EngineConfig
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import KeptRows, KVSpec
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import PolicyName, PolicySettings


def choose_kept_rows(
    config: EngineConfig,
    spec: ModelSpec,
    settings: PolicySettings,
    kv: Mapping[Tier, KVSpec],
    *,
    is_native: bool,
    is_cuda: bool,
) -> tuple[KeptRows | None, str]:
    """The rows that the engine's policy keeps, and why; None: it reads K and V from the blocks.

    Beside a GPU all policies that choose keys step by step read what they chose from rows, HybridGen everywhere. Rows
    need one floating format on both tiers, and a part of the DRAM budget.

    Args:
        kv: the KV cache as each tier keeps it.
        is_native: the policy has a native form, which has copies of its own.
    """
    is_hybridgen = settings.name is PolicyName.HYBRIDGEN
    formats = {tier.dtypes for tier in kv.values()}
    if settings.is_exact or is_native or not (is_hybridgen or is_cuda):
        return None, "K and V are read from the blocks"
    if config.dram_memory == 0:
        return None, "K and V are read from the blocks: `dram_memory` is 0"
    if len(formats) != 1 or any(dtypes.k.has_scales for dtypes in formats):
        return None, f"K and V are read from the blocks, which are {' and '.join(sorted(map(str, formats)))}"
    rows = KeptRows(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        number_bytes=formats.pop().k.num_bytes,
        num_q_heads=spec.num_q_heads if is_hybridgen else 0,
        num_near=settings.near_tokens or 0,
    )
    return rows, "the CPU scores them, and chosen ones are read there" if is_hybridgen else "chosen ones are read there"

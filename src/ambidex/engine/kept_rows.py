"""What a policy keeps of K and V beside the blocks: rows, or why there are none, and what its predictor keeps. Values
only, no allocation."""

from collections.abc import Mapping

from ambidex.core.config import EngineConfig
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import (
    BoxState,
    KeptRows,
    KVOrder,
    KVSpec,
    PolicyState,
    PredictorState,
    SumState,
    num_partial_columns,
)
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import HybridGenFeedback, HybridGenMode, PolicyName, PolicySettings


def choose_kept_rows(
    config: EngineConfig,
    spec: ModelSpec,
    settings: PolicySettings,
    kv: Mapping[Tier, KVSpec],
    *,
    is_native: bool,
    is_cuda: bool,
    is_fixed: bool,
) -> tuple[KeptRows | None, str]:
    """The rows that the engine's policy keeps, and why; None: it reads K and V from the blocks.

    Beside a GPU all policies that choose keys step by step read what they chose from rows, those that look ahead, and
    steps of fixed form, everywhere. Rows need one floating format on both tiers, and a part of the DRAM budget.

    Args:
        kv: the KV cache as each tier keeps it.
        is_native: the policy has a native form, which has copies of its own.
        is_fixed: decode steps of policies that can have a fixed form have it.
    """
    is_scored = _may_score(settings)
    is_early = settings.name.looks_ahead or (settings.name.has_lone_steps and is_fixed)
    formats = {tier.dtypes for tier in kv.values()}
    if settings.is_exact or is_native or not (is_early or is_cuda):
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
        num_q_heads=spec.num_q_heads if is_early else 0,
        num_near=min(settings.near_tokens or 0, config.max_context_len or spec.max_context_len),
        is_scored=is_scored,
        is_fixed=is_early and is_fixed,
        leaves_scores=settings.name.adds_up and is_fixed,
        page_tokens=(settings.page_tokens or 0) if is_fixed else 0,
    )
    return rows, "the CPU scores them, and chosen ones are read there" if is_scored else "chosen ones are read there"


def _may_score(settings: PolicySettings) -> bool:
    """Whether the CPU makes early scores of far keys: HybridGen has it do so in mode post, and feedback may take that
    mode at any step."""
    is_post = settings.hybridgen_mode is not HybridGenMode.PRE
    return settings.name is PolicyName.HYBRIDGEN and (is_post or _is_steered(settings))


def _is_steered(settings: PolicySettings) -> bool:
    return settings.hybridgen_feedback not in (None, HybridGenFeedback.OFF)


def choose_policy_state(spec: ModelSpec, settings: PolicySettings, *, is_fixed: bool) -> PolicyState | None:
    """What a policy keeps on the accelerator of each token; None: nothing.

    HybridGen has a predictor in mode pre, and with feedback, which may take that mode at any step.

    Args:
        is_fixed: decode steps have a fixed form; see `SumState` and `BoxState`.
    """
    if settings.name.adds_up and is_fixed:
        return SumState(num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads)
    if settings.name is PolicyName.QUEST and is_fixed:
        assert settings.page_tokens is not None, "it has pages"
        return BoxState(
            num_layers=max(0, spec.num_layers - (settings.exact_layers or 0)),
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_tokens=settings.page_tokens,
        )
    match settings.name:
        case PolicyName.INFINIGEN:
            has_predictor = True
        case PolicyName.HYBRIDGEN:
            has_predictor = _is_steered(settings) or settings.hybridgen_mode is HybridGenMode.PRE
        case _:
            has_predictor = False
    if not has_predictor:
        return None
    assert settings.partial_percent is not None, "it has partial keys"
    return PredictorState(
        num_layers=max(0, spec.num_layers - max(1, settings.exact_layers or 0)),
        num_kv_heads=spec.num_kv_heads,
        num_q_heads=spec.num_q_heads,
        head_dim=spec.head_dim,
        num_columns=num_partial_columns(spec.head_dim, settings.partial_percent),
    )


def why_no_policy_steps(config: EngineConfig, kv: Mapping[Tier, KVSpec]) -> str | None:
    """Why decode steps of policies that can have a fixed form do not; None if they may have it.

    Args:
        kv: the KV cache as each tier keeps it.
    """
    if config.dram_memory == 0:
        return "no rows are kept in host memory: `dram_memory` is 0"
    if len({tier.dtypes for tier in kv.values()}) != 1 or kv[Tier.DRAM].dtype.has_scales:
        return "K and V in host memory have another number format"
    if kv[Tier.DRAM].order is not KVOrder.TILES:
        return "keys in DRAM are not in tile order"
    return None

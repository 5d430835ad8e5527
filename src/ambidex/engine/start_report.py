"""The report of a built engine: what each setting became, with the reasons. From plain values alone."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ambidex.core.config import EngineConfig
from ambidex.core.ids import Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.units import format_size
from ambidex.engine.kv_format import KVFormat
from ambidex.engine.kv_report import region_rows
from ambidex.engine.memory import MemoryPlan
from ambidex.engine.report import EngineReport, ReportRow
from ambidex.engine.run_plan import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """What a tier's pool is. `is_pinned` None: nobody asked for pinned memory, since there is no GPU."""

    num_blocks: int
    num_bytes: int
    device: str
    is_pinned: bool | None


def make_report(
    config: EngineConfig,
    *,
    model_name: str,
    spec: ModelSpec,
    compute: Sequence[ReportRow],
    kv: KVFormat,
    memory: MemoryPlan,
    pools: Mapping[Tier, PoolFacts],
    fallbacks: Sequence[ReportRow],
    more_kv: Sequence[ReportRow] = (),
    cxl: Sequence[ReportRow] = (),
    plan: RunPlan | None = None,
) -> EngineReport:
    """All facts, in the order in which they are shown.

    Args:
        compute: what computes, and how.
        fallbacks: what the engine does without.
        more_kv: of the KV cache.
        cxl: where K and V in host memory lie, if not all in DRAM.
        plan: what lies where, if not all lies on the accelerator.
    """
    rows = [*_model_rows(model_name, spec), *compute, *_kv_rows(config, kv, memory, pools), *more_kv]
    for tier, pool in pools.items():
        rows += _tier_rows(config, tier, pool, memory)
    rows += cxl
    rows += fallbacks
    rows += [
        ReportRow(section="settings", name=field.name, value=str(getattr(config, field.name)))
        for field in dataclasses.fields(config)
    ]
    return EngineReport(facts=tuple(rows), plan=plan)


def _model_rows(name: str, spec: ModelSpec) -> list[ReportRow]:
    return [
        ReportRow(section="model", name="name", value=name),
        ReportRow(section="model", name="architecture", value=spec.architecture),
        ReportRow(
            section="model",
            name="shape",
            value=f"{spec.num_layers} layers, hidden {spec.hidden_size}, {spec.num_q_heads} query and "
            f"{spec.num_kv_heads} KV heads of {spec.head_dim}, vocabulary {spec.vocab_size}",
        ),
    ]


def _kv_rows(
    config: EngineConfig, kv: KVFormat, memory: MemoryPlan, pools: Mapping[Tier, PoolFacts]
) -> list[ReportRow]:
    rows = [
        ReportRow(
            section="kv",
            name="max_context_len",
            value=f"{memory.max_context_len} tokens",
            why=memory.max_context_reason,
        )
    ]
    for tier, pool in pools.items():
        spec = kv.specs[tier]
        rows.append(
            ReportRow(
                section="kv",
                name=f"{tier}_format",
                value=f"{spec.dtypes} in {spec.order}, {spec.bytes_per_token} B a token",
                why=kv.why if pool.device == "cpu" else "the accelerator's own ops read it",
            )
        )
    num_cached = sum(memory.num_blocks.values()) * (config.prefix_cache_percent or 0) // 100
    rows.append(
        ReportRow(
            section="kv",
            name="prefix_cache",
            value=f"up to {num_cached} idle blocks" if num_cached else "off",
            why=f"{config.prefix_cache_percent} % of all blocks" if num_cached else "prompts are computed as they come",
        )
    )
    if config.session_dir is not None:
        rows.append(
            ReportRow(
                section="kv",
                name="sessions",
                value=f"up to {format_size(config.session_quota)} in {config.session_dir}",
                why="asked for",
            )
        )
    rows += region_rows(config, num_gpu_blocks=memory.num_blocks[Tier.GPU], max_context_len=memory.max_context_len)
    return rows


def _tier_rows(config: EngineConfig, tier: Tier, pool: PoolFacts, memory: MemoryPlan) -> list[ReportRow]:
    pinned = "" if pool.is_pinned is None else f", {'pinned' if pool.is_pinned else 'not pinned'}"
    return [
        ReportRow(
            section="kv",
            name=f"{tier}_blocks",
            value=f"{pool.num_blocks} blocks of {config.block_size} tokens",
            why=f"{format_size(pool.num_bytes)} on {pool.device}{pinned}",
        ),
        *(
            ReportRow(section=f"memory {tier}", name=entry.owner, value=format_size(entry.num_bytes))
            for entry in memory.ledger.entries(tier)
        ),
        ReportRow(section=f"memory {tier}", name="budget", value=format_size(memory.ledger.budget(tier))),
    ]

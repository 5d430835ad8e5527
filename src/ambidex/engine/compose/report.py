"""What the choices became, for people."""

from collections.abc import Mapping, Sequence

from ambidex.attention.selective import SelectiveAttention
from ambidex.attention.tiered import TieredAttention
from ambidex.core.config import EngineConfig
from ambidex.core.errors import NativeModuleError
from ambidex.core.ids import Tier
from ambidex.core.policy import PolicyName
from ambidex.engine.compose.choices import Choices
from ambidex.engine.compose.host import cxl_rows
from ambidex.engine.compose.sparsity import cache_rows, sparsity_rows
from ambidex.engine.compose.weights import Divided
from ambidex.engine.fallbacks import (
    Fallbacks,
    note_cxl,
    note_kernels,
    note_memory,
    note_native,
    note_no_link,
    note_threads,
)
from ambidex.engine.policy_report import policy_rows
from ambidex.engine.report import EngineReport, ReportRow
from ambidex.engine.run_plan import RunPlan
from ambidex.engine.start_report import PoolFacts, make_report
from ambidex.engine.weights_plan import (
    describe_split,
)
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.linear import TILED_KINDS
from ambidex.kernels.dispatch import find_fallbacks
from ambidex.models.divided import DividedWeights
from ambidex.models.quantized import describe_kept
from ambidex.runner.decode import DecodeForm
from ambidex.storage.kv_pool import KVPool


def collect_fallbacks(
    config: EngineConfig,
    choices: Choices,
    pools: Mapping[Tier, KVPool],
    divided: DividedWeights | None,
    pin_refusals: Sequence[str] = (),
) -> Fallbacks:
    """What this engine does without.

    Args:
        pin_refusals: of what a policy keeps.
    """
    found = Fallbacks()
    try:
        note_native(found, native.isa(), "")
    except NativeModuleError as error:
        note_native(found, None, str(error))
    if choices.threads is not None:
        note_threads(found, choices.num_threads, choices.threads.num_pin_failures)
    if choices.device.type == "cuda":
        note_kernels(found, find_fallbacks(choices.device.type))
    pin_refusals = [*pin_refusals, *(reason for pool in pools.values() for reason in pool.pin_refusals)]
    if divided is not None and divided.pin_refusal is not None:
        pin_refusals.append(f"weights: {divided.pin_refusal}")
    page_refusals = {tier: pool.page_refusal for tier, pool in pools.items() if pool.page_refusal is not None}
    if divided is not None and divided.page_refusal is not None:
        page_refusals[Tier.DRAM] = divided.page_refusal
    note_memory(found, pin_refusals, page_refusals)
    note_cxl(found, choices.cxl.refusals)
    if choices.device.type != "cuda":
        note_no_link(found, config.policy)
    return found


def find_pin_refusals(attention: TieredAttention | SelectiveAttention) -> list[str]:
    """Why what a policy keeps in host memory is not pinned."""
    early = attention.early if isinstance(attention, SelectiveAttention) else None
    return [f"early scores: {early.pin_refusal}"] if early is not None and early.pin_refusal is not None else []


def _weights_row(choices: Choices) -> ReportRow:
    """In which formats matrices lie in memory."""
    if not choices.keeps_quantized:
        return ReportRow(section="compute", name="weights", value=choices.dtype.value, why=choices.dtype_why)
    kept, others = describe_kept(choices.spec)
    value = f"as stored, {kept}" if kept else ""
    if others:
        value += f"{'; ' if kept else ''}{others} as {choices.dtype}"
    why = f"no native product of {others}" if others else "a CPU multiplies them where they lie"
    return ReportRow(section="compute", name="weights", value=value, why=why)


def _placement_rows(choices: Choices, divided: Divided | None) -> list[ReportRow]:
    """Where weights lie, if not all on the accelerator."""
    parts = choices.weights.parts
    if parts is None:
        return []
    whole = choices.weights.bytes.on_gpu - parts.on_gpu
    value = describe_split(parts.on_gpu + whole, parts.on_cpu, parts.streamed)
    rows = [ReportRow(section="compute", name="weights_placed", value=value, why=choices.weights.why)]
    if divided is not None and divided.rates is not None:
        rates = divided.rates
        levels = [f"{100 * level.cpu_share:.0f} % at {level.most_tokens}" for level in divided.lanes.levels[:-1]]
        cpu = ", ".join(f"{rate / 1e9:.0f} at {num}" for num, rate in rates.cpu.items())
        rows.append(
            ReportRow(
                section="compute",
                name="weights_cpu_share",
                value=f"of the CPU's part it multiplies {', '.join(levels)} tokens a step; the rest goes over the link",
                why=f"the link brings {rates.link / 1e9:.1f} GB/s, the CPU multiplies {cpu} tokens (GB/s), "
                f"both together {rates.beside / 1e9:.0f}",
            )
        )
    return rows


def _tile_rows(choices: Choices) -> list[ReportRow]:
    """From where on 4-bit weights are multiplied in matrix tiles, if there are both."""
    has_tiles = choices.threads is not None and native.isa() == "amx"
    kept = {kind for _, kind in choices.spec.quantized} if choices.keeps_quantized else choices.weights.kinds.values()
    return [choices.crossovers.tile_row()] if has_tiles and set(TILED_KINDS) & set(kept) else []


def _crossovers_how(choices: Choices) -> str:
    """Where the costs of neurons come from."""
    crossovers = choices.crossovers
    if crossovers.neurons(choices.dtype) is not None:
        return crossovers.why
    return f"measured at start ({crossovers.why})"


def describe(
    config: EngineConfig,
    choices: Choices,
    pools: Mapping[Tier, KVPool],
    divided: Divided | None,
    *,
    stream: tuple[float, str],
    fallbacks: Fallbacks,
    hot: ReportRow,
    plan: RunPlan | None = None,
) -> EngineReport:
    is_cuda = choices.device.type == "cuda"
    sparse = None if divided is None else divided.sparse
    host = choices.memory.host
    num_blocks = {**choices.memory.num_blocks, Tier.DRAM: host.layout.num_near}
    num_bytes = {Tier.GPU: pools[Tier.GPU].num_bytes, **host.bytes_of(host.num_blocks)}
    return make_report(
        config,
        model_name=choices.source.name,
        spec=choices.spec,
        compute=[
            ReportRow(section="compute", name="device", value=str(choices.device)),
            ReportRow(section="compute", name="dtype", value=choices.dtype.value, why=choices.dtype_why),
            _weights_row(choices),
            *_placement_rows(choices, divided),
            *_tile_rows(choices),
            *sparsity_rows(
                choices.sparsity,
                None if sparse is None else sparse.costs,
                None if sparse is None else sparse.screen_costs,
                how=_crossovers_how(choices),
            ),
            *cache_rows(
                config,
                None if divided is None else divided.cache,
                has_profile=choices.sparsity is not None and choices.sparsity.profile is not None,
            ),
            *(choices.weights.auto.rows() if choices.weights.auto is not None else ()),
            ReportRow(section="compute", name="threads", value=str(choices.num_threads)),
            ReportRow(section="compute", name="decode", value=choices.decode_form.value, why=choices.decode_form_why),
            *policy_rows(
                choices.policy,
                choices.bounded,
                max_kept_rows=None if choices.rows is None else choices.memory.max_kept_rows,
                rows_why=choices.rows_why,
                state=choices.memory.state,
                max_state_tokens=choices.memory.max_state_tokens,
                is_fixed=choices.decode_form in (DecodeForm.FIXED, DecodeForm.CAPTURED),
                is_early=choices.has_early_steps,
            ),
            ReportRow(section="compute", name="stream_share", value=f"{stream[0]:.2f} of keys in DRAM", why=stream[1]),
        ],
        kv=choices.kv,
        memory=choices.memory,
        pools={
            tier: PoolFacts(
                num_blocks=num_blocks[tier],
                num_bytes=num_bytes[tier],
                device=str(pool.device),
                is_pinned=pool.is_pinned if is_cuda and tier is Tier.DRAM else None,
            )
            for tier, pool in pools.items()
        },
        more_kv=[hot] if config.policy is PolicyName.BOUNDED else [],
        cxl=cxl_rows(choices),
        fallbacks=fallbacks.rows,
        plan=plan,
    )

"""Parts of the data plane, each made from the choices."""

import logging
from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from ambidex.attention.bounded_scan import MIN_SCANNED_BLOCKS, BoundedScan, WaitWritten
from ambidex.attention.chunk_stream import MIN_STREAMED_QUERIES, ChunkStream
from ambidex.attention.early_decode import EarlyDecode
from ambidex.attention.paced import PacedReader
from ambidex.attention.readers import Reader
from ambidex.attention.row_store import RowStore
from ambidex.attention.scan_check import ScanCheck
from ambidex.attention.select.policy import Need
from ambidex.attention.select.registry import make_policy
from ambidex.attention.selective import SelectiveAttention
from ambidex.attention.tiered import TieredAttention
from ambidex.attention.ways.find import find_way
from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.ids import KVPart, Tier
from ambidex.core.kv_spec import KVOrder
from ambidex.core.policy import HybridGenFeedback, PolicyName
from ambidex.core.selection import SelectionLimits, SelectionSetting
from ambidex.engine.compose.choices import Choices, decode_buckets
from ambidex.engine.compose.lanes import ScanChoice, StreamChoice
from ambidex.engine.compose.weights import Divided
from ambidex.engine.memory import most_requests
from ambidex.engine.tuned_world import EngineWorld, FixedMemory
from ambidex.engine.weight_tuner import WeightTuner
from ambidex.formats.control_trace import Decision
from ambidex.kernels.cpu.bounded import BoundedPool
from ambidex.kernels.cpu.native import AttentionPool
from ambidex.models.base import CausalLM
from ambidex.models.look_ahead import LookAhead
from ambidex.models.weight_moves import CopyChunk, WeightMoves
from ambidex.runner.capture import Capture
from ambidex.runner.decode import DecodeForm, FixedSteps
from ambidex.runner.device import TORCH_DTYPES, activation_dtype
from ambidex.runner.graphs import DecodeSteps
from ambidex.runner.policy_steps import PolicySteps
from ambidex.runner.programs import ProgramSteps
from ambidex.runner.runner import Forward
from ambidex.runner.step_lanes import LaneSettings
from ambidex.runner.tracing import LaneTracing
from ambidex.sched.feedback import SelectionFeedback
from ambidex.storage.host_memory import HostMemory
from ambidex.storage.kv_pool import KVPool, RowKVPool
from ambidex.storage.lane_clock import LaneClock
from ambidex.storage.row_home import RowHome
from ambidex.storage.scan_copy import ScanCopy
from ambidex.storage.slow_tier import SlowTier
from ambidex.storage.tile_writer import TileWriter
from ambidex.storage.tiled_pool import TiledKVPool

logger = logging.getLogger(__name__)

CHOICES_PER_VERIFIED: Final = 61
"""With --verify, one of so many choices of the bounded policy is computed again over all keys: a prime, so that each
layer of a model comes up in turn. In the native form a choice is that of one query head."""


def make_decode_steps(
    config: EngineConfig,
    choices: Choices,
    model: CausalLM,
    pools: dict[Tier, KVPool],
    forward: Forward,
    stream: StreamChoice,
    capture: Callable[[], Capture],
    divided: Divided | None,
    bounded: BoundedScan | None,
    scan: ScanChoice,
    clock: LaneClock | None,
    tell: Callable[[Decision], None] | None,
) -> FixedSteps | None:
    if choices.decode_form is DecodeForm.PROGRAM:
        return ProgramSteps(
            model=model,
            spec=choices.spec,
            forward=forward,
            pools={tier: pool for tier, pool in pools.items() if isinstance(pool, TiledKVPool)},
            max_rows=most_requests(config),
            bounded=bounded,
        )
    if choices.decode_form is DecodeForm.ORDINARY or pools[Tier.GPU].num_blocks == 0:
        return None
    if choices.policy.settings.name.has_fixed_steps:  # its steps are made with its attention
        return None
    return DecodeSteps(
        model=model,
        spec=choices.spec,
        forward=forward,
        pools=pools,
        buckets=decode_buckets(config),
        max_context_len=choices.memory.max_context_len,
        capture=capture() if choices.decode_form is DecodeForm.CAPTURED else None,
        lanes=LaneSettings(
            stream_share=stream.share,
            stream_blocks=choices.stream.step_blocks if choices.stream is not None else 0,
            follows_lanes=config.stream_percent is None,
            rates=stream.rates,
            weights=None if divided is None else divided.lanes,
            bounded=bounded,
            scan_rule=scan.rule,
            scan_lane=scan.lane,
            clock=clock,
            tell=tell,
        ),
    )


def make_policy_steps(
    config: EngineConfig,
    choices: Choices,
    model: CausalLM,
    attention: TieredAttention | SelectiveAttention,
    forward: Forward,
    capture: Callable[[], Capture],
) -> PolicySteps | None:
    """Decode steps of fixed form of policies that have them; None: another policy, or they are launched op by op; see
    `why_no_policy_pools`."""
    rows, max_rows = choices.rows, most_requests(config)
    is_fixed = choices.decode_form in (DecodeForm.FIXED, DecodeForm.CAPTURED)
    if not is_fixed or not isinstance(attention, SelectiveAttention) or attention.early is None:
        return None
    if why_no_policy_pools(attention) is not None:
        return None
    assert rows is not None, "the fast form keeps rows"
    assert choices.memory.max_kept_rows is not None, "likewise"
    return PolicySteps(
        model=model,
        spec=choices.spec,
        forward=forward,
        pools=attention.pools,
        selective=attention,
        buckets=decode_buckets(config),
        max_context_len=choices.memory.max_context_len,
        max_far=min(
            rows.max_fixed_keys(max_rows, config.max_context_len or choices.spec.max_context_len),
            choices.memory.max_kept_rows,
        ),
        capture=capture() if choices.decode_form is DecodeForm.CAPTURED else None,
    )


def why_no_policy_pools(attention: TieredAttention | SelectiveAttention) -> str | None:
    """Why decode steps of a policy have no fixed form, although they might have; None: nothing is against it."""
    early = attention.early if isinstance(attention, SelectiveAttention) else None
    if early is None:
        return None
    if early.requests.row_store.refusal is not None:
        return f"no rows are kept in host memory: {early.requests.row_store.refusal}"
    if early.pin_refusal is not None:
        return f"the accelerator cannot read scores in host memory, which are not pinned: {early.pin_refusal}"
    return "no K and V lie on the accelerator" if attention.pools[Tier.GPU].num_blocks == 0 else None


def find_row_refusal(attention: TieredAttention | SelectiveAttention) -> str | None:
    """Why a policy keeps no rows that it was to keep; None: it does, or was to keep none."""
    store = attention.row_store if isinstance(attention, SelectiveAttention) else None
    return store.refusal if store is not None else None


def make_tuner(
    config: EngineConfig,
    choices: Choices,
    divided: Divided | None,
    steps: FixedSteps | None,
    *,
    stream_share: float,
    copy: CopyChunk,
) -> WeightTuner | None:
    """What moves weights while the engine runs; None: nothing does.

    Raises:
        ConfigError: it is asked for and cannot be had.
    """
    auto, parts = choices.weights.auto, choices.weights.parts
    if not config.tune_weights:
        return None
    if divided is None or auto is None or parts is None:
        logger.info("nothing tunes weights: %s", choices.weights.why)
        return None
    if not isinstance(steps, DecodeSteps):
        raise ConfigError(
            f"`tune_weights` needs decode steps whose lanes can be timed, and these are {choices.decode_form} "
            f"({choices.decode_form_why}): leave it out, or use a GPU with `graphs` auto"
        )
    moves = WeightMoves(
        divided.weights,
        divided.lanes,
        choices.memory.ledger,
        device=choices.device,
        number_bytes=choices.dtype.num_bytes,
        num_layers=choices.spec.num_layers,
        rebound=steps.forget,
        copy=copy,
    )
    fixed = FixedMemory(
        weight_bytes=parts.on_gpu,
        kv_gpu_tokens=choices.memory.num_blocks[Tier.GPU] * config.block_size,
        stream_share=stream_share,
    )
    link = auto.profile.link
    return WeightTuner(
        EngineWorld(auto, fixed, moves.reach), moves, link_bytes_per_s=link.to_gpu_bytes_per_s if link else 1e9
    )


def make_feedback(choices: Choices, tell: Callable[[Decision], None] | None) -> SelectionFeedback | None:
    """What steers the policy by measured times; None: nothing does.

    Raises:
        ConfigError: the least number of keys is above the context limit.
    """
    settings, max_context_len = choices.policy.settings, choices.memory.max_context_len
    choices.policy.check_floor(max_context_len)
    feedback = settings.hybridgen_feedback
    if feedback in (None, HybridGenFeedback.OFF):
        return None
    assert settings.min_selected_tokens is not None, "settings of hybridgen"
    assert settings.hybridgen_mode is not None, "settings of hybridgen"
    floor = settings.min_selected_tokens
    given = settings.budget.tokens if settings.budget is not None else None
    return SelectionFeedback(
        SelectionSetting(num_selected=max(given or floor, floor), mode=settings.hybridgen_mode),
        SelectionLimits(floor=floor, ceiling=max_context_len, may_resize=feedback is HybridGenFeedback.FULL),
        tell=tell,
    )


def make_bounded(
    config: EngineConfig,
    choices: Choices,
    pools: Mapping[Tier, KVPool],
    min_scanned: int | None,
    *,
    counts_kept: bool = False,
    verify_every: int = CHOICES_PER_VERIFIED,
) -> BoundedScan | None:
    """The bounded policy in its native form; None: another policy, the reference form, or no pool that it reads.

    Args:
        counts_kept: it counts of which blocks keys are kept.
    """
    settings = choices.policy.settings
    tiled = {tier: pool for tier, pool in pools.items() if isinstance(pool, TiledKVPool) and pool.num_blocks}
    if not choices.bounded.is_native or not tiled or choices.threads is None:
        return None
    assert settings.max_dropped_mass is not None, "settings of bounded"
    native_pool = BoundedPool(choices.threads)
    near_tier = None if choices.decode_form is DecodeForm.PROGRAM else Tier.GPU
    check = ScanCheck(choices.spec, pools, every=verify_every, near_tier=near_tier)
    return BoundedScan(
        choices.spec,
        {tier: ScanCopy(pool, native_pool, counts_kept=counts_kept) for tier, pool in tiled.items()},
        native_pool,
        max_mass=settings.max_dropped_mass,
        min_blocks=min_scanned or MIN_SCANNED_BLOCKS,
        wait=WaitWritten(choices.device) if choices.device.type == "cuda" else None,
        check=check if config.verify else None,
    )


def make_pools(
    choices: Choices, memory: HostMemory, host_parts: Mapping[KVPart, Tensor] | None = None
) -> dict[Tier, KVPool]:
    """The accelerator's pool and the host's, in the order of their format; those in tile order share native threads.

    That of `Tier.DRAM` is the host's, also where some of it lies in the CXL tier.

    Args:
        host_parts: K and V of the host's pool, if they were allocated before.
    """
    specs, layout = choices.kv.specs, choices.memory.host.layout
    blocks = {Tier.GPU: choices.memory.num_blocks[Tier.GPU], Tier.DRAM: layout.num_blocks}
    slow = None
    if choices.cxl.slow is not None:
        slow = SlowTier(choices.cxl.slow, specs[Tier.DRAM], layout, choices.device)
    is_tiled = KVOrder.TILES in {spec.order for spec in specs.values()}
    threads = AttentionPool(choices.threads) if is_tiled and choices.threads is not None else None
    is_pinned = choices.device.type == "cuda" and blocks[Tier.DRAM] > 0

    def make(
        tier: Tier,
        device: torch.device,
        *,
        pinned: bool,
        parts: Mapping[KVPart, Tensor] | None = None,
        slow: SlowTier | None = None,
    ) -> KVPool:
        if threads is not None and specs[tier].order is KVOrder.TILES:
            return TiledKVPool(
                specs[tier], tier, blocks[tier], native=threads, pinned=pinned, memory=memory, parts=parts, slow=slow
            )
        return RowKVPool(
            specs[tier], tier, blocks[tier], device=device, pinned=pinned, memory=memory, parts=parts, slow=slow
        )

    return {
        Tier.GPU: make(Tier.GPU, choices.device, pinned=False),
        Tier.DRAM: make(Tier.DRAM, torch.device("cpu"), pinned=is_pinned, parts=host_parts, slow=slow),
    }


def make_attention(
    choices: Choices, pools: dict[Tier, KVPool], min_streamed: int | None, trace: LaneTracing
) -> TieredAttention:
    """Attention over both pools, on a GPU with what carries keys and rows between DRAM and it."""
    spec, pool, device = choices.spec, pools[Tier.DRAM], choices.device
    wrap = _pacing(pool, trace.wrap)
    if choices.stream is None or not isinstance(pool, TiledKVPool) or pool.num_blocks == 0:
        return TieredAttention(spec, pools, wrap=wrap, cpu_lane=trace.cpu_lane)
    stream = ChunkStream(
        pool,
        device=device,
        dtype=TORCH_DTYPES[activation_dtype(choices.dtype, device)],
        scale=spec.head_dim**-0.5,
        windows=spec.windows,
        sizes=choices.stream,
        min_queries=min_streamed or MIN_STREAMED_QUERIES,
    )
    writer = TileWriter(pool, device) if pool.is_within_reach(device) else None
    return TieredAttention(spec, pools, wrap=wrap, cpu_lane=trace.cpu_lane, stream=stream, writer=writer)


def _pacing(pool: KVPool, wrap: Callable[[Tier, Reader], Reader] | None) -> Callable[[Tier, Reader], Reader] | None:
    """What stands in for the readers: the host's is paced where a part of its pool plays slower memory."""
    slow = pool.slow
    if slow is None:
        return wrap

    def paced(tier: Tier, reader: Reader) -> Reader:
        reader = PacedReader(reader, pool, slow) if tier is Tier.DRAM else reader
        return reader if wrap is None else wrap(tier, reader)

    return paced


def with_policy(
    config: EngineConfig,
    choices: Choices,
    model: CausalLM,
    exact: TieredAttention,
    host_memory: HostMemory,
    *,
    verify_every: int = CHOICES_PER_VERIFIED,
) -> TieredAttention | SelectiveAttention:
    """Attention whose keys a policy chooses; with `exact` the very object that attends all.

    Args:
        host_memory: who is asked for what the policy keeps in host memory.
    """
    settings = choices.policy.settings
    if settings.is_exact or choices.bounded.is_native:
        return exact
    formats = {pool.spec.dtypes for pool in exact.pools.values() if pool.num_blocks}
    if settings.name is PolicyName.BOUNDED and len(formats) > 1:
        raise ConfigError(
            f"`policy` bounded needs K and V in one number format, the tiers keep them in "
            f"{' and '.join(sorted(map(str, formats)))}: leave out `kv_dtype`"
        )
    policy = make_policy(settings, choices.spec)
    look_ahead = LookAhead(model, choices.spec.num_layers) if Need.LOOK_AHEAD in policy.needs else None
    early = row_store = None
    if choices.memory.max_kept_rows is not None:
        home = RowHome(
            choices.memory.host.layout, nodes=choices.cxl.nodes, slow=exact.pools[Tier.DRAM].slow, memory=host_memory
        )
        row_store = RowStore(choices.spec, exact.pools, max_rows=choices.memory.max_kept_rows, home=home)
    threads, rows = choices.threads, choices.rows
    is_fixed = settings.name.has_lone_steps and choices.decode_form in (DecodeForm.FIXED, DecodeForm.CAPTURED)
    has_early = look_ahead is not None or is_fixed
    if has_early and row_store is not None and rows is not None and threads is not None:
        early = EarlyDecode(
            choices.spec,
            TieredAttention(choices.spec, exact.pools, wrap=_pacing(exact.pools[Tier.DRAM], None)),
            find_way(policy, look_ahead, exact.pools[Tier.GPU].device),
            row_store,
            threads,
            num_near=rows.num_near,
            max_requests=most_requests(config),
            max_scored=row_store.max_rows if rows.is_scored else 0,
            is_timed=Need.TIMES in policy.needs,
        )
    return SelectiveAttention(
        policy,
        choices.spec,
        exact,
        look_ahead=look_ahead,
        early=early,
        row_store=row_store if choices.device.type == "cuda" else None,
        verify_every=verify_every if config.verify else 0,
    )

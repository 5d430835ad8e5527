"""The composition root: settings → every object, by hand and in order. Only this module sees both planes."""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from ambidex.attention.bounded_scan import MIN_SCANNED_BLOCKS, BoundedScan, WaitWritten
from ambidex.attention.chunk_stream import MIN_STREAMED_QUERIES, ChunkStream
from ambidex.attention.select.policy import Need
from ambidex.attention.select.registry import make_policy
from ambidex.attention.selective import SelectiveAttention
from ambidex.attention.streamed import measure_stream_share, why_no_stream
from ambidex.attention.tiered import TieredAttention
from ambidex.core.config import DTypeChoice, EngineConfig, Graphs, LoadFormat
from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError, NativeModuleError
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import KVOrder, StreamBuffers
from ambidex.core.model_spec import ModelSpec
from ambidex.core.placement import Placement
from ambidex.core.policy import HybridGenFeedback, PolicyName, resolve_policy
from ambidex.core.regions import Regions
from ambidex.core.selection import SelectionLimits, SelectionSetting
from ambidex.core.step import make_buckets
from ambidex.core.units import format_size
from ambidex.engine.auto_placement import AUTO, AutoPlacement, Budgets, solve_weights
from ambidex.engine.bounded_form import BoundedForm, choose_bounded_form
from ambidex.engine.core import EngineCore
from ambidex.engine.engine import Engine
from ambidex.engine.executor import Executor
from ambidex.engine.fallbacks import Fallbacks, note_kernels, note_memory, note_native, note_threads
from ambidex.engine.kv_format import KVFormat, choose_host_order, choose_kv_format
from ambidex.engine.memory import (
    FixedBytes,
    FreeMemory,
    MemoryPlan,
    WeightBytes,
    find_gpu_budget,
    fixed_bytes,
    plan_memory,
    step_stream_bytes,
)
from ambidex.engine.policy_report import policy_rows
from ambidex.engine.report import EngineFigures, EngineReport, ReportRow
from ambidex.engine.start_report import PoolFacts, make_report
from ambidex.engine.text_side import TextFacts, TextSide, make_chat_template, model_path
from ambidex.engine.trace_file import open_tracer
from ambidex.engine.traced import TracedCore
from ambidex.engine.weights_plan import (
    KV_SHARE,
    NUM_SLOTS,
    STREAMED_SHARE,
    check_placement,
    chunk_bytes_for,
    describe_split,
    fill_placement,
    read_placement,
)
from ambidex.formats.locate import ModelSource, find_model
from ambidex.formats.spec import read_spec
from ambidex.hw.memory import read_memory
from ambidex.hw.profile import HardwareProfile, Machine
from ambidex.hw.profile_file import default_path, read_profile
from ambidex.hw.topology import read_topology
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.bounded import BoundedPool
from ambidex.kernels.cpu.native import AttentionPool, ThreadPool
from ambidex.kernels.dispatch import choose, find_fallbacks
from ambidex.kernels.linear import LinearContext
from ambidex.kernels.reference.quantized import RECORD_BYTES as GPU_KINDS
from ambidex.kv.manager import KVManager
from ambidex.kv.prefix_cache import PrefixCacheLimits
from ambidex.layers.linear import Linear
from ambidex.mlp.host_lane import HostLane
from ambidex.mlp.rates import LaneRates, keep_whole, measure_rates
from ambidex.mlp.split_site import Level, WeightLanes
from ambidex.models.base import CausalLM
from ambidex.models.divided import (
    ALIGNMENT_BYTES,
    DividedBytes,
    DividedWeights,
    RingSizes,
    count_bytes,
    measure_weights,
    plan_sites,
)
from ambidex.models.look_ahead import LookAhead
from ambidex.models.quantized import count_weights_bytes, describe_kept, find_kept
from ambidex.models.registry import build_model
from ambidex.models.weights import load_weights, make_dummy_weights
from ambidex.runner.decode import DecodeForm, FixedSteps
from ambidex.runner.device import TORCH_DTYPES, activation_dtype, choose_device, choose_dtype, keeps_quantized
from ambidex.runner.graphs import Capture, CudaCapture, DecodeSteps
from ambidex.runner.programs import ProgramSteps
from ambidex.runner.runner import Forward, ModelRunner, call_model
from ambidex.runner.sampler import Sampler
from ambidex.runner.torch_threads import TorchThreads
from ambidex.runner.tracing import LaneTracing, trace_lanes
from ambidex.runner.verified import VerifiedExecutor
from ambidex.sched.feedback import SelectionFeedback
from ambidex.sched.scheduler import Scheduler
from ambidex.storage.checksums import BlockChecksums, VerifiedCopy
from ambidex.storage.copy import CopyBlock, CopyEngine, copy_block
from ambidex.storage.host_memory import HOST_MEMORY, HostMemory
from ambidex.storage.kv_pool import KVPool, RowKVPool
from ambidex.storage.scan_copy import ScanCopy
from ambidex.storage.tile_writer import TileWriter
from ambidex.storage.tiled_pool import TiledKVPool
from ambidex.text.guided import GuideCompiler
from ambidex.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

CHOICES_PER_VERIFIED: Final = 61
"""With --verify, one of so many choices of the bounded policy is computed again over all keys: a prime, so that each
layer of a model comes up in turn."""
CPU_SPIN_US: Final = 300
"""How long native threads look for work before they sleep when the accelerator is the CPU: longer than what Python and
torch do between two native calls of a decode step."""
LANE_SPIN_US: Final = 2000
"""The same beside a GPU: longer than its part of a layer, so that no layer begins with waking threads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """What was found and decided before anything large is allocated."""

    source: ModelSource
    spec: ModelSpec
    device: torch.device
    dtype: DType
    dtype_why: str
    keeps_quantized: bool
    num_threads: int
    threads: ThreadPool | None
    kv: KVFormat
    decode_form: DecodeForm
    decode_form_why: str
    bounded: BoundedForm
    stream: StreamBuffers | None
    weights: "_Weights"
    memory: MemoryPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weights:
    """Where weights lie. `placement` None: all on the accelerator. `kinds`: GGUF types of what is divided as stored."""

    placement: Placement | None
    why: str
    ring: RingSizes
    bytes: WeightBytes
    parts: DividedBytes | None = None
    kinds: Mapping[str, str] = field(default_factory=dict)
    auto: AutoPlacement | None = None
    """What was solved, if it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Divided:
    """Divided weights and who computes with them; `rates` None: nobody measured them."""

    weights: DividedWeights
    lanes: WeightLanes
    rates: LaneRates | None


def build_engine(
    config: EngineConfig,
    *,
    progress: Progress | None = None,
    forward: Forward = call_model,
    copy: CopyBlock = copy_block,
    decode_form: DecodeForm | None = None,
    capture: Callable[[], Capture] = CudaCapture,
    min_streamed: int | None = None,
    weight_ring: RingSizes | None = None,
    cpu_levels: Sequence[Level] | None = None,
    min_scanned: int = MIN_SCANNED_BLOCKS,
    host_memory: HostMemory = HOST_MEMORY,
    profile: HardwareProfile | None = None,
    dummy_kind: str | None = None,
) -> Engine:
    """Load a model and make it ready to answer.

    Args:
        progress: called with (bytes read, bytes in all) while weights load.
        forward, copy: how the model is called and how a block is copied; a test hands in ones that fail.
        decode_form: how decode steps run; None: as the configuration and the device have it.
        capture: makes what captures them, if they are captured; a test hands in one that needs no GPU.
        min_streamed: queries from which the stream lane reads keys in DRAM; None: as `ChunkStream` has it on a GPU, and
            none on a CPU, which is where a test hands in a number.
        weight_ring: buffers through which weights travel; None: sized by the accelerator's budget.
        cpu_levels: what the CPU multiplies of its part of the weights in steps of each size; None: on a GPU as
            measured, on a CPU all of it.
        min_scanned: whole blocks of a request from which the bounded policy scans its keys.
        host_memory: who is asked for pinned memory and huge pages; a test hands in one that refuses.
        dummy_kind: GGUF type, one that a GPU multiplies, of the divided matrices of dummy weights; None: plain numbers.
        profile: of the machine, for `placement` auto; None: the one that `ambidex calibrate` wrote.
    Raises:
        ConfigError, ModelError: the settings or the model cannot be used.
        MachineError: the machine has not what they need.
    """
    tracer = open_tracer(config.trace)
    choices = _choose(
        config,
        decode_form,
        streams_chunks=min_streamed is not None,
        weight_ring=weight_ring,
        profile=profile,
        dummy_kind=dummy_kind,
    )
    tokenizer = load_tokenizer(choices.source)
    eos_ids = _eos_ids(choices.spec, tokenizer)
    torch.set_num_threads(choices.num_threads)
    model, divided = _load_model(config, choices, progress, host_memory, cpu_levels)
    pools = _make_pools(choices, host_memory)
    fallbacks = _find_fallbacks(choices, pools, None if divided is None else divided.weights)
    kv_manager = KVManager(
        choices.memory.num_blocks,
        Regions(
            block_size=config.block_size, num_sink_tokens=config.num_sink_tokens, recent_window=config.recent_window
        ),
        PrefixCacheLimits(max_idle_percent=config.prefix_cache_percent or 0, identity=_cache_identity(choices)),
    )
    scheduler = Scheduler(
        kv_manager,
        max_tokens_per_step=config.max_tokens_per_step,
        max_running_requests=config.max_running_requests,
        max_context_len=choices.memory.max_context_len,
        seed=config.seed,
        feedback=_make_feedback(config, choices.memory.max_context_len),
    )
    stream_share, stream_why = _choose_stream_share(config, choices, pools)
    bounded = _make_bounded(config, choices, pools, min_scanned)
    checksums = BlockChecksums(pools[Tier.DRAM]) if config.verify else None
    trace = trace_lanes(tracer, choices.device, copy if checksums is None else VerifiedCopy(copy, checksums))
    runner = ModelRunner(
        model=model,
        attention=_with_policy(config, choices, model, _make_attention(choices, pools, min_streamed, trace)),
        sampler=Sampler(vocab_size=choices.spec.vocab_size, device=choices.device),
        copies=CopyEngine(pools, copy=trace.copy),
        device=choices.device,
        forward=forward,
        decode_steps=_make_decode_steps(
            config, choices, model, pools, forward, stream_share, capture, divided, bounded
        ),
        torch_threads=TorchThreads(choices.num_threads)
        if choices.device.type == "cpu" and choices.threads is not None
        else None,
        tracer=tracer,
        device_clock=trace.device_clock,
        bounded=bounded,
    )

    def kv_bytes() -> dict[Tier, int]:
        return {
            tier: (usage.used + usage.in_flight) * choices.kv.specs[tier].bytes_per_block
            for tier, usage in kv_manager.usage().items()
        }

    def cached_bytes() -> dict[Tier, int]:
        return {
            tier: usage.cached * choices.kv.specs[tier].bytes_per_block for tier, usage in kv_manager.usage().items()
        }

    executor: Executor = (
        runner if checksums is None else VerifiedExecutor(runner.execute, checksums, device=choices.device)
    )
    core = (
        EngineCore(scheduler=scheduler, executor=executor, launch=runner.launch if checksums is None else None)
        if not tracer.is_on
        else TracedCore(scheduler=scheduler, executor=executor, tracer=tracer, kv_bytes=kv_bytes)
    )
    core.stats.fallbacks.update(fallbacks.counts)
    return Engine(
        core=core,
        text=TextSide(
            TextFacts(
                model_path=model_path(choices.source),
                max_context_len=choices.memory.max_context_len,
                vocab_size=choices.spec.vocab_size,
                eos_ids=eos_ids,
            ),
            tokenizer,
            make_chat_template(config.chat_template, tokenizer),
        ),
        guides=GuideCompiler(tokenizer, vocab_size=choices.spec.vocab_size, eos_ids=eos_ids),
        report=_report(config, choices, pools, divided, stream=(stream_share, stream_why), fallbacks=fallbacks),
        figures=EngineFigures(
            spec=choices.spec,
            device=str(choices.device),
            dtype=choices.dtype,
            keeps_quantized=choices.keeps_quantized,
            num_threads=choices.num_threads,
            kv=choices.kv.specs,
            num_blocks=choices.memory.num_blocks,
            ledger=choices.memory.ledger,
        ),
        kv_bytes=kv_bytes,
        cached_bytes=cached_bytes,
        kv_capacity={tier: pool.num_bytes for tier, pool in pools.items()},
        weights_bytes={
            tier: sum(entry.num_bytes for entry in choices.memory.ledger.entries(tier) if entry.owner == "weights")
            for tier in pools
        },
        predict_step=choices.weights.auto.predict_step_s if choices.weights.auto is not None else None,
    )


def default_num_threads(device: torch.device) -> int:
    """CPU threads where none are asked for: the usable cores, of which a GPU's driver takes one."""
    return max(1, read_topology().num_usable_cores - (device.type == "cuda"))


def _cache_identity(choices: _Choices) -> str:
    """All that K and V depend on beside the tokens, as text."""
    return repr((choices.source.name, choices.spec, choices.dtype, sorted(choices.kv.specs.items())))


def _choose(
    config: EngineConfig,
    decode_form: DecodeForm | None,
    *,
    streams_chunks: bool,
    weight_ring: RingSizes | None,
    profile: HardwareProfile | None,
    dummy_kind: str | None,
) -> _Choices:
    source = find_model(config.model)
    spec = read_spec(source)
    policy = make_policy(resolve_policy(config), spec)  # refuses a model that it cannot serve before anything is loaded
    device = choose_device(config.device)
    is_cuda = device.type == "cuda"
    num_threads = config.num_threads or default_num_threads(device)
    threads = _make_threads(num_threads, spin_us=LANE_SPIN_US if is_cuda else CPU_SPIN_US)
    dtype, dtype_why = choose_dtype(
        config.dtype,
        checkpoint=spec.dtype,
        is_quantized=spec.is_quantized,
        device=device,
        has_native=threads is not None,
    )
    keeps = config.load_format is not LoadFormat.DUMMY and keeps_quantized(
        config.dtype, is_quantized=spec.is_quantized, device=device, has_native=threads is not None
    )
    form, form_why = (decode_form, "asked for") if decode_form else _choose_decode_form(config, spec, device, threads)
    has_row_ops = is_cuda or form in (DecodeForm.FIXED, DecodeForm.CAPTURED)
    kv = choose_kv_format(config, spec, dtype=dtype, has_row_ops=has_row_ops, has_native=threads is not None)
    bounded = choose_bounded_form(config, kv.specs, why_ordinary=form_why if form is DecodeForm.ORDINARY else None)
    if config.policy is not PolicyName.EXACT and not bounded.is_native:
        form, form_why = decode_form or DecodeForm.ORDINARY, f"policy {config.policy} chooses keys step by step"
    activations = activation_dtype(dtype, device)
    free = _free_memory(device)
    can_step_stream = config.stream_percent != 0 and not bounded.is_native and why_no_stream(spec, kv.specs) is None
    stream = None
    if (
        (streams_chunks or is_cuda)
        and spec.alibi_slopes is None
        and config.dram_memory != 0
        and kv.specs[Tier.DRAM].order is KVOrder.TILES
    ):
        stream = StreamBuffers.of(
            kv.specs[Tier.DRAM],
            max_context_len=config.max_context_len or spec.max_context_len,
            number_bytes=activations.num_bytes,
            max_requests=min(config.max_running_requests, config.max_tokens_per_step),
            step_bytes=step_stream_bytes(config, free) if form is DecodeForm.CAPTURED and can_step_stream else 0,
        )
    buckets = _decode_buckets(config) if form is DecodeForm.CAPTURED else ()
    fixed = fixed_bytes(config, spec, activations=activations, graph_buckets=buckets, stream=stream)
    weights = _choose_weights(
        config, spec, dtype, device, kv, keeps_quantized=keeps, free=free, fixed=fixed, ring=weight_ring,
        profile=profile,
        dummy_kind=dummy_kind,
    )  # fmt: skip
    if weights.placement is not None:
        check_placement(config, looks_ahead=Need.LOOK_AHEAD in policy.needs, placement=weights.placement)
    return _Choices(
        source=source,
        spec=spec,
        device=device,
        dtype=dtype,
        dtype_why=dtype_why,
        keeps_quantized=keeps,
        num_threads=num_threads,
        threads=threads,
        kv=kv,
        decode_form=form,
        decode_form_why=form_why,
        bounded=bounded,
        stream=stream,
        weights=weights,
        memory=plan_memory(
            config,
            spec,
            kv.specs,
            free=free,
            weights=weights.bytes,
            fixed=fixed,
            scan_bytes=bounded.scan_bytes(kv.specs),
        ),
    )


def _choose_weights(
    config: EngineConfig,
    spec: ModelSpec,
    dtype: DType,
    device: torch.device,
    kv: KVFormat,
    *,
    keeps_quantized: bool,
    free: FreeMemory,
    fixed: FixedBytes,
    ring: RingSizes | None,
    profile: HardwareProfile | None,
    dummy_kind: str | None,
) -> _Weights:
    """Where weights lie: as a file or the solver says, or what fits on the accelerator there and the rest in DRAM.

    Raises:
        ConfigError: the file cannot be used, or what cannot be divided does not fit.
    """
    skeleton = build_model(
        spec,
        device=torch.device("meta"),
        dtype=TORCH_DTYPES[dtype],
        activation_dtype=TORCH_DTYPES[activation_dtype(dtype, device)],
    )
    as_stored = find_kept(spec) if keeps_quantized else {}
    kinds = as_stored if device.type == "cpu" else _find_kinds_for_gpu(config, spec)
    if dummy_kind is not None:
        linears = [f"{name}.weight" for name, module in skeleton.named_modules() if isinstance(module, Linear)]
        kinds = dict.fromkeys(linears, dummy_kind)
    total = sum(count_weights_bytes(skeleton, as_stored).values())
    budget = find_gpu_budget(config, free)
    ring = ring or RingSizes(chunk_bytes=chunk_bytes_for(budget), num_slots=NUM_SLOTS)
    chunk_size = ring.chunk_bytes // dtype.num_bytes
    auto: AutoPlacement | None = None
    if config.placement == AUTO:
        num_parts = len(plan_sites(skeleton, Placement.all_on_gpu(spec.num_layers), chunk_size=chunk_size))
        auto = solve_weights(
            config,
            spec,
            dtype=dtype,
            profile=profile or _read_profile(device),
            budgets=Budgets(
                gpu=budget,
                dram=config.dram_memory if config.dram_memory is not None else free.dram,
                gpu_fixed=fixed.total + num_parts * ALIGNMENT_BYTES,
                ring=ring.num_slots * ring.chunk_bytes,
            ),
        )
        placement, why = auto.placement, auto.why
        if placement.is_all_on_gpu:
            return _Weights(placement=None, why=why, ring=ring, bytes=WeightBytes(on_gpu=total), auto=auto)
    elif config.placement is not None:
        placement, why = read_placement(config.placement, spec.num_layers), f"as {config.placement} says"
    else:
        least_kv = kv.specs[Tier.GPU].num_blocks(config.kv_gpu_tokens or 0) * kv.specs[Tier.GPU].bytes_per_block
        wanted, why = config.weights_gpu_memory, "asked for"
        if wanted is None and not free.is_shared and budget < total + fixed.total + least_kv:
            kept = least_kv if config.kv_gpu_tokens is not None else int((budget - fixed.total) * KV_SHARE)
            wanted, why = max(0, budget - fixed.total - kept), "what the budget leaves beside workspace and some KV"
        if wanted is None or wanted >= total:
            return _Weights(placement=None, why="they fit", ring=ring, bytes=WeightBytes(on_gpu=total))
        sizes = measure_weights(skeleton, dtype.num_bytes, kinds=kinds, whole_kinds=as_stored)
        share = STREAMED_SHARE if device.type == "cuda" else 0.0
        in_dram = fill_placement(sizes, 0, streamed_share=share)
        nothing = plan_sites(skeleton, in_dram, chunk_size=chunk_size, kinds=kinds)
        least = sizes.whole + count_bytes(nothing, ring, dtype.num_bytes).ring + ALIGNMENT_BYTES * len(nothing)
        if wanted < least:
            raise ConfigError(
                f"`weights_gpu_memory` {format_size(wanted)} ({why}) is too small: embedding, norms and buffers for "
                f"weights on their way take {format_size(least)}: give at least that, or a larger `gpu_memory`"
            )
        placement = fill_placement(sizes, wanted - least, streamed_share=share)
    sizes = measure_weights(skeleton, dtype.num_bytes, kinds=kinds, whole_kinds=as_stored)
    plans = plan_sites(skeleton, placement, chunk_size=chunk_size, kinds=kinds)
    parts = count_bytes(plans, ring, dtype.num_bytes)
    return _Weights(
        placement=placement,
        why=why,
        ring=ring,
        bytes=WeightBytes(on_gpu=sizes.whole + parts.on_gpu, in_dram=parts.on_cpu + parts.streamed, ring=parts.ring),
        parts=parts,
        kinds=kinds,
        auto=auto,
    )


def _find_kinds_for_gpu(config: EngineConfig, spec: ModelSpec) -> dict[str, str]:
    """Matrices of a GGUF file that a GPU multiplies as they are stored, where they are divided, and their types."""
    if config.dtype is not DTypeChoice.AUTO or config.load_format is LoadFormat.DUMMY:
        return {}
    return {name: kind for name, kind in find_kept(spec).items() if kind in GPU_KINDS}


def _read_profile(device: torch.device) -> HardwareProfile:
    """The profile of this machine.

    Raises:
        ConfigError: there is none, or it is another machine's; says how to make one.
    """
    topology = read_topology()
    gpu = torch.cuda.get_device_properties(device).name if device.type == "cuda" else None
    profile = read_profile(default_path(os.environ))
    profile.check_machine(Machine(cpu=topology.cpu_model, cores=topology.num_usable_cores, gpu=gpu))
    return profile


def _choose_decode_form(
    config: EngineConfig, spec: ModelSpec, device: torch.device, threads: ThreadPool | None
) -> tuple[DecodeForm, str]:
    """How decode steps run, and the reason."""
    if config.policy not in (PolicyName.EXACT, PolicyName.BOUNDED):
        return DecodeForm.ORDINARY, f"policy {config.policy} chooses keys step by step"
    if spec.alibi_slopes is not None:
        return DecodeForm.ORDINARY, "attention with slopes (alibi) has no other form"
    if config.graphs is Graphs.OFF:
        return DecodeForm.ORDINARY, "graphs are off"
    if device.type != "cuda":
        order, why = choose_host_order(config.block_size, threads is not None)
        if order is not KVOrder.TILES:
            return DecodeForm.ORDINARY, why
        return DecodeForm.PROGRAM, "decode steps are replayed as native programs"
    for op in ("attend_paged", "rotate_and_store"):
        choice = choose(op, device.type)
        if choice.name != "triton":
            return DecodeForm.ORDINARY, f"CUDA graphs need the Triton kernel of {op}: {choice.reason}"
    return DecodeForm.CAPTURED, "decode steps whose keys all lie on the GPU are replayed as CUDA graphs"


def _decode_buckets(config: EngineConfig) -> tuple[int, ...]:
    return make_buckets(min(config.max_running_requests, config.max_tokens_per_step))


def _make_decode_steps(
    config: EngineConfig,
    choices: _Choices,
    model: CausalLM,
    pools: dict[Tier, KVPool],
    forward: Forward,
    stream_share: float,
    capture: Callable[[], Capture],
    divided: _Divided | None,
    bounded: BoundedScan | None,
) -> FixedSteps | None:
    if choices.decode_form is DecodeForm.PROGRAM:
        return ProgramSteps(
            model=model,
            spec=choices.spec,
            forward=forward,
            pools={tier: pool for tier, pool in pools.items() if isinstance(pool, TiledKVPool)},
            max_rows=min(config.max_running_requests, config.max_tokens_per_step),
            bounded=bounded,
        )
    if choices.decode_form is DecodeForm.ORDINARY or pools[Tier.GPU].num_blocks == 0:
        return None
    return DecodeSteps(
        model=model,
        spec=choices.spec,
        forward=forward,
        pools=pools,
        buckets=_decode_buckets(config),
        max_context_len=choices.memory.max_context_len,
        stream_share=stream_share,
        stream_blocks=choices.stream.step_blocks if choices.stream is not None else 0,
        follows_lanes=config.stream_percent is None,
        capture=capture() if choices.decode_form is DecodeForm.CAPTURED else None,
        weights=None if divided is None else divided.lanes,
        bounded=bounded,
    )


def _make_feedback(config: EngineConfig, max_context_len: int) -> SelectionFeedback | None:
    """What steers the policy by measured times; None: nothing does."""
    settings = resolve_policy(config)
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
    )


def _make_bounded(
    config: EngineConfig, choices: _Choices, pools: Mapping[Tier, KVPool], min_scanned: int
) -> BoundedScan | None:
    """The bounded policy in its native form; None: another policy, the reference form, or no pool that it reads."""
    settings = resolve_policy(config)
    tiled = {tier: pool for tier, pool in pools.items() if isinstance(pool, TiledKVPool) and pool.num_blocks}
    if not choices.bounded.is_native or not tiled or choices.threads is None:
        return None
    assert settings.max_dropped_mass is not None, "settings of bounded"
    native_pool = BoundedPool(choices.threads)
    return BoundedScan(
        choices.spec,
        {tier: ScanCopy(pool, native_pool) for tier, pool in tiled.items()},
        native_pool,
        max_mass=settings.max_dropped_mass,
        min_blocks=min_scanned,
        wait=WaitWritten(choices.device) if choices.device.type == "cuda" else None,
    )


def _choose_stream_share(config: EngineConfig, choices: _Choices, pools: Mapping[Tier, KVPool]) -> tuple[float, str]:
    """Which share of the keys in DRAM the GPU reads over the link in decode steps, and why.

    Raises:
        ConfigError: a share is asked for that cannot be had.
    """
    reason = _why_no_stream(choices, pools)
    if reason is None and config.stream_percent != 0 and (choices.stream is None or not choices.stream.step_blocks):
        reason = "the part of the GPU's budget that is for streamed keys holds no block of a layer"
    dram = pools[Tier.DRAM]
    if reason is not None or not isinstance(dram, TiledKVPool):
        if config.stream_percent:
            raise ConfigError(f"`stream_percent` {config.stream_percent} cannot be had, use 0: {reason}")
        return 0.0, str(reason)
    if config.stream_percent is not None:
        return config.stream_percent / 100, "asked for"
    return measure_stream_share(dram)


def _why_no_stream(choices: _Choices, pools: Mapping[Tier, KVPool]) -> str | None:
    """Why decode steps have no stream lane; None if they have one."""
    dram = pools[Tier.DRAM]
    if choices.device.type != "cuda":
        return "there is no GPU that could read DRAM over a link"
    if choices.bounded.is_native:
        return "the bounded policy leaves keys in DRAM to the CPU, which knows what it leaves out"
    if choices.decode_form is not DecodeForm.CAPTURED:
        return f"decode steps are not captured: {choices.decode_form_why}"
    if choose("attend_tiles", choices.device.type).name != "triton":
        return choose("attend_tiles", choices.device.type).reason
    if not isinstance(dram, TiledKVPool) or not dram.num_blocks:
        return "no K and V lie in DRAM in tile order"
    if not dram.is_pinned:
        return "the driver refused to pin the DRAM tier"
    return why_no_stream(choices.spec, choices.kv.specs)


def _make_threads(num_threads: int, *, spin_us: int) -> ThreadPool | None:
    """The threads of all native ops; None without the compiled module."""
    try:
        return ThreadPool(num_threads, spin_us=spin_us)
    except NativeModuleError:
        return None


def _find_fallbacks(choices: _Choices, pools: Mapping[Tier, KVPool], divided: DividedWeights | None) -> Fallbacks:
    """What this engine does without."""
    found = Fallbacks()
    try:
        note_native(found, native.isa(), "")
    except NativeModuleError as error:
        note_native(found, None, str(error))
    if choices.threads is not None:
        note_threads(found, choices.num_threads, choices.threads.num_pin_failures)
    if choices.device.type == "cuda":
        note_kernels(found, find_fallbacks(choices.device.type))
    pin_refusals = [reason for pool in pools.values() for reason in pool.pin_refusals]
    if divided is not None and divided.pin_refusal is not None:
        pin_refusals.append(f"weights: {divided.pin_refusal}")
    page_refusals = {tier: pool.page_refusal for tier, pool in pools.items() if pool.page_refusal is not None}
    if divided is not None and divided.page_refusal is not None:
        page_refusals[Tier.DRAM] = divided.page_refusal
    note_memory(found, pin_refusals, page_refusals)
    return found


def _eos_ids(spec: ModelSpec, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end an answer; those that the model cannot choose are left out, with a warning."""
    named = frozenset(spec.eos_ids) | frozenset(tokenizer.eos_ids)
    impossible = {token_id for token_id in named if token_id >= spec.vocab_size}
    if impossible:
        logger.warning("end-of-text ids %s lie outside the vocabulary of %d", sorted(impossible), spec.vocab_size)
    return named - impossible


def _free_memory(device: torch.device) -> FreeMemory:
    dram = read_memory().usable_bytes
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return FreeMemory(accelerator=free, dram=dram, is_shared=False)
    return FreeMemory(accelerator=dram, dram=dram, is_shared=True)


def _load_model(
    config: EngineConfig,
    choices: _Choices,
    progress: Progress | None,
    host_memory: HostMemory,
    cpu_levels: Sequence[Level] | None,
) -> tuple[CausalLM, _Divided | None]:
    device, dtype = choices.device, TORCH_DTYPES[choices.dtype]
    linear = LinearContext(choices.threads if device.type == "cpu" else None)
    is_divided = choices.weights.placement is not None
    model = build_model(
        choices.spec,
        device=device,
        dtype=dtype,
        activation_dtype=TORCH_DTYPES[activation_dtype(choices.dtype, device)],
        linear=linear,
        matrix_device=torch.device("meta") if choices.keeps_quantized or is_divided else None,
    )
    divided = None
    host_linear = linear if device.type == "cpu" else LinearContext(choices.threads)
    if choices.weights.placement is not None:
        sizes = choices.weights.ring
        divided = DividedWeights(
            model,
            plan_sites(
                model,
                choices.weights.placement,
                chunk_size=sizes.chunk_bytes // choices.dtype.num_bytes,
                kinds=choices.weights.kinds,
            ),
            sizes=sizes,
            device=device,
            dtype=dtype,
            linear=linear,
            host_linear=host_linear,
            memory=host_memory,
        )
    matrices = divided.matrices if divided is not None else {}
    if config.load_format is LoadFormat.DUMMY:
        make_dummy_weights(model, seed=config.seed, device=device, dtype=dtype, divided=matrices)
    else:
        load_weights(
            model,
            choices.spec,
            choices.source,
            device=device,
            dtype=dtype,
            keeps_quantized=choices.keeps_quantized,
            divided=matrices,
            progress=progress,
        )
    if divided is None:
        return model.eval(), None
    levels, rates = [Level(most_tokens=sys.maxsize, cpu_share=1.0)], None
    if cpu_levels is not None:
        levels = list(cpu_levels)
    elif device.type == "cuda" and (parts := divided.host_parts()):
        rates = measure_rates(parts, host_linear, divided.host_chunks(), divided.ring.slots)
        sizes_in_dram = choices.weights.parts
        assert sizes_in_dram is not None, "divided weights were counted"
        levels = rates.levels(on_cpu=sizes_in_dram.on_cpu, streamed=sizes_in_dram.streamed)
        if choices.weights.auto is not None:
            levels = keep_whole(levels, choices.weights.auto.workload.batch)
    lanes = WeightLanes(
        divided.ring,
        dtype=TORCH_DTYPES[activation_dtype(choices.dtype, device)],
        most_native_tokens=host_linear.most_native_tokens,
        levels=levels,
        begin_host=HostLane(device).begin,
        owner=divided,
    )
    divided.bind(lanes)
    return model.eval(), _Divided(weights=divided, lanes=lanes, rates=rates)


def _make_pools(choices: _Choices, memory: HostMemory) -> dict[Tier, KVPool]:
    """The pool of each tier, in the order of its format; those in tile order share their native threads."""
    specs, blocks = choices.kv.specs, choices.memory.num_blocks
    is_tiled = KVOrder.TILES in {spec.order for spec in specs.values()}
    threads = AttentionPool(choices.threads) if is_tiled and choices.threads is not None else None
    is_pinned = choices.device.type == "cuda" and blocks[Tier.DRAM] > 0

    def make(tier: Tier, device: torch.device, *, pinned: bool) -> KVPool:
        if threads is not None and specs[tier].order is KVOrder.TILES:
            return TiledKVPool(specs[tier], tier, blocks[tier], native=threads, pinned=pinned, memory=memory)
        return RowKVPool(specs[tier], tier, blocks[tier], device=device, pinned=pinned, memory=memory)

    return {
        Tier.GPU: make(Tier.GPU, choices.device, pinned=False),
        Tier.DRAM: make(Tier.DRAM, torch.device("cpu"), pinned=is_pinned),
    }


def _make_attention(
    choices: _Choices, pools: dict[Tier, KVPool], min_streamed: int | None, trace: LaneTracing
) -> TieredAttention:
    """Attention over both pools, on a GPU with what carries keys and rows between DRAM and it."""
    spec, pool, device = choices.spec, pools[Tier.DRAM], choices.device
    if choices.stream is None or not isinstance(pool, TiledKVPool) or pool.num_blocks == 0:
        return TieredAttention(spec, pools, wrap=trace.wrap, cpu_lane=trace.cpu_lane)
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
    return TieredAttention(spec, pools, wrap=trace.wrap, cpu_lane=trace.cpu_lane, stream=stream, writer=writer)


def _weights_row(choices: _Choices) -> ReportRow:
    """In which formats matrices lie in memory."""
    if not choices.keeps_quantized:
        return ReportRow(section="compute", name="weights", value=choices.dtype.value, why=choices.dtype_why)
    kept, others = describe_kept(choices.spec)
    value = f"as stored, {kept}" if kept else ""
    if others:
        value += f"{'; ' if kept else ''}{others} as {choices.dtype}"
    why = f"no native product of {others}" if others else "a CPU multiplies them where they lie"
    return ReportRow(section="compute", name="weights", value=value, why=why)


def _placement_rows(choices: _Choices, divided: _Divided | None) -> list[ReportRow]:
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
                why=f"the link brings {rates.link / 1e9:.1f} GB/s, the CPU multiplies {cpu} tokens (GB/s)",
            )
        )
    return rows


def _with_policy(
    config: EngineConfig, choices: _Choices, model: CausalLM, exact: TieredAttention
) -> TieredAttention | SelectiveAttention:
    """Attention whose keys a policy chooses; with `exact` the very object that attends all."""
    settings = resolve_policy(config)
    if settings.is_exact or choices.bounded.is_native:
        return exact
    formats = {choices.kv.specs[tier].dtype for tier, count in choices.memory.num_blocks.items() if count}
    if settings.name is PolicyName.BOUNDED and len(formats) > 1:
        raise ConfigError(
            f"`policy` bounded needs K and V in one number format, the tiers keep them in "
            f"{' and '.join(sorted(formats))}: leave out `kv_dtype`"
        )
    policy = make_policy(settings, choices.spec)
    look_ahead = LookAhead(model, choices.spec.num_layers) if Need.LOOK_AHEAD in policy.needs else None
    return SelectiveAttention(
        policy,
        choices.spec,
        exact,
        look_ahead=look_ahead,
        verify_every=CHOICES_PER_VERIFIED if config.verify else 0,
    )


def _report(
    config: EngineConfig,
    choices: _Choices,
    pools: Mapping[Tier, KVPool],
    divided: _Divided | None,
    *,
    stream: tuple[float, str],
    fallbacks: Fallbacks,
) -> EngineReport:
    is_cuda = choices.device.type == "cuda"
    return make_report(
        config,
        model_name=choices.source.name,
        spec=choices.spec,
        compute=[
            ReportRow(section="compute", name="device", value=str(choices.device)),
            ReportRow(section="compute", name="dtype", value=choices.dtype.value, why=choices.dtype_why),
            _weights_row(choices),
            *_placement_rows(choices, divided),
            *(choices.weights.auto.rows() if choices.weights.auto is not None else ()),
            ReportRow(section="compute", name="threads", value=str(choices.num_threads)),
            ReportRow(section="compute", name="decode", value=choices.decode_form.value, why=choices.decode_form_why),
            *policy_rows(config, choices.bounded),
            ReportRow(section="compute", name="stream_share", value=f"{stream[0]:.2f} of keys in DRAM", why=stream[1]),
        ],
        kv=choices.kv,
        memory=choices.memory,
        pools={
            tier: PoolFacts(
                num_blocks=pool.num_blocks,
                num_bytes=pool.num_bytes,
                device=str(pool.device),
                is_pinned=pool.is_pinned if is_cuda and tier is Tier.DRAM else None,
            )
            for tier, pool in pools.items()
        },
        fallbacks=fallbacks.rows,
    )

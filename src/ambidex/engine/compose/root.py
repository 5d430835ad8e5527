"""The composition root: settings → every object, by hand and in order. Only this package sees both planes."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from ambidex.core.config import EngineConfig
from ambidex.core.ids import Tier
from ambidex.core.model_spec import ModelSpec
from ambidex.core.regions import Regions
from ambidex.engine.compose.choices import Choices, make_choices
from ambidex.engine.compose.control import open_control_trace
from ambidex.engine.compose.host import make_placed_pools, paced_copy, place_host
from ambidex.engine.compose.hot import choose_hot, hot_row, make_hot, make_promotions
from ambidex.engine.compose.lanes import choose_scan, choose_stream, explain_stream
from ambidex.engine.compose.parts import (
    CHOICES_PER_VERIFIED,
    find_row_refusal,
    make_attention,
    make_bounded,
    make_decode_steps,
    make_feedback,
    make_policy_steps,
    make_tuner,
    why_no_policy_pools,
    with_policy,
)
from ambidex.engine.compose.report import collect_fallbacks, describe, find_pin_refusals
from ambidex.engine.compose.run_plan import expect_steps
from ambidex.engine.compose.sessions import find_identity, make_sessions
from ambidex.engine.compose.weights import Progress, load_model
from ambidex.engine.core import EngineCore
from ambidex.engine.engine import Engine
from ambidex.engine.executor import Executor, Launch
from ambidex.engine.lane_preset import follow_preset
from ambidex.engine.report import EngineFigures
from ambidex.engine.sessions import check_session_folder
from ambidex.engine.text_side import TextFacts, TextSide, make_chat_template, model_path
from ambidex.engine.trace_file import open_tracer
from ambidex.engine.traced import TracedCore
from ambidex.hw.profile import HardwareProfile
from ambidex.kv.manager import KVManager
from ambidex.kv.prefix_cache import PrefixCacheLimits
from ambidex.mlp.split_site import Level
from ambidex.models.base import CausalLM
from ambidex.models.site_plans import RingSizes
from ambidex.models.weight_moves import CopyChunk, copy_chunk
from ambidex.runner.capture import Capture, CudaCapture
from ambidex.runner.decode import DecodeForm, DecodeOutput
from ambidex.runner.device import choose_device
from ambidex.runner.host_blocks import HostIds, MergedExecutor
from ambidex.runner.runner import Forward, ModelRunner, call_model
from ambidex.runner.sampler import Sampler
from ambidex.runner.torch_threads import TorchThreads
from ambidex.runner.tracing import trace_lanes
from ambidex.runner.verified import VerifiedExecutor
from ambidex.runner.watched_steps import WatchedSteps
from ambidex.sched.scheduler import Scheduler
from ambidex.storage.checksums import BlockChecksums, VerifiedCopy
from ambidex.storage.copy import CopyBlock, CopyEngine, copy_block
from ambidex.storage.host_memory import HOST_MEMORY, HostMemory
from ambidex.storage.lane_clock import LaneClock
from ambidex.text.guided import GuideCompiler
from ambidex.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


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
    min_scanned: int | None = None,
    host_memory: HostMemory = HOST_MEMORY,
    copy_weights: CopyChunk = copy_chunk,
    profile: HardwareProfile | None = None,
    dummy_kind: str | None = None,
    shape_dummy: Callable[[CausalLM], None] | None = None,
    watch_decode: Callable[[DecodeOutput], None] | None = None,
    verify_every: int | None = None,
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
        min_scanned: whole blocks of a request (beside a GPU: those in DRAM of a step) from which the bounded policy
            scans keys; None: 16, beside a GPU as follows from measured rates.
        host_memory: who is asked for pinned memory and huge pages; a test hands in one that refuses.
        copy_weights: how a chunk of weights comes to the accelerator while the engine runs; a test hands in one that
            fails.
        dummy_kind: GGUF type, one that a GPU multiplies, of the divided matrices of dummy weights; None: plain numbers.
        shape_dummy: called with a model of dummy weights, whose biases and norms it may change.
        watch_decode: is told what each decode step of a form of its own gave (`runner/watched_steps.py`).
        verify_every: with `verify`, one of so many choices of the bounded policy is computed again; None: 61.
        profile: of the machine, for `placement` auto; None: the one that `ambidex calibrate` wrote.
    Raises:
        ConfigError, ModelError: the settings or the model cannot be used.
        MachineError: the machine has not what they need.
    """
    check_session_folder(config)
    config = follow_preset(config, has_link=choose_device(config.device).type == "cuda")
    tracer = open_tracer(config.trace)
    tell = open_control_trace(config.control_trace)
    choices = make_choices(
        config,
        decode_form,
        streams_chunks=min_streamed is not None,
        weight_ring=weight_ring,
        profile=profile,
        dummy_kind=dummy_kind,
        host_memory=host_memory,
    )
    choices, host_parts = place_host(choices, host_memory)
    tokenizer = load_tokenizer(choices.source)
    eos_ids = _eos_ids(choices.spec, tokenizer)
    torch.set_num_threads(choices.num_threads)
    clock = LaneClock() if config.tune_weights else None
    model, divided = load_model(config, choices, progress, host_memory, cpu_levels, clock, shape_dummy)
    choices, pools = make_placed_pools(choices, host_memory, host_parts)
    del host_parts
    identity = find_identity(config, choices)
    hot = choose_hot(config, choices.memory.num_blocks, choices.why_no_hot)
    kv_manager = KVManager(
        choices.memory.num_blocks,
        Regions(
            block_size=config.block_size, num_sink_tokens=config.num_sink_tokens, recent_window=config.recent_window
        ),
        PrefixCacheLimits(
            max_idle_percent=config.prefix_cache_percent or 0,
            identity=identity.text,
            is_saved=config.session_dir is not None,
        ),
        # What one step may add of its own and what it may demote.
        num_kept_free=2 * -(-config.max_tokens_per_step // config.block_size),
        num_for_copies=hot.num_reserved,
    )
    copy = copy if choices.cxl.slow is None else paced_copy(copy)
    checksums = BlockChecksums(pools[Tier.DRAM]) if config.verify else None
    copy = copy if checksums is None else VerifiedCopy(copy, checksums)
    ids = HostIds(choices.memory.host.layout.num_near)
    sessions = make_sessions(config, identity, pools, copy, kv_manager, lambda: core.stats, ids.place)
    scheduler = Scheduler(
        kv_manager,
        max_tokens_per_step=config.max_tokens_per_step,
        max_running_requests=choices.most_running(config),
        max_context_len=choices.memory.max_context_len,
        max_kept_rows=choices.memory.max_kept_tokens,
        seed=config.seed,
        feedback=make_feedback(choices, tell),
        hot=make_hot(hot, kv_manager, pools, copy, tell),
        restore=sessions.restore if sessions is not None else None,
    )
    stream = choose_stream(config, choices, pools)
    verify_every = verify_every or CHOICES_PER_VERIFIED
    bounded = make_bounded(config, choices, pools, min_scanned, counts_kept=hot.most > 0, verify_every=verify_every)
    scan = choose_scan(choices, bounded, stream, min_scanned, host_memory)
    decode_steps = make_decode_steps(
        config, choices, model, pools, forward, stream, capture, divided, bounded, scan, clock, tell
    )
    tuner = make_tuner(config, choices, divided, decode_steps, stream_share=stream.share, copy=copy_weights)
    after_step = tuner.after_step if tuner is not None else None
    trace = trace_lanes(tracer, choices.device, copy)
    exact = make_attention(choices, pools, min_streamed, trace)
    attention = with_policy(config, choices, model, exact, host_memory, verify_every=verify_every)
    policy_steps = make_policy_steps(config, choices, model, attention, forward, capture)
    why_not = why_no_policy_pools(attention)
    if why_not is not None and choices.decode_form is not DecodeForm.ORDINARY:
        why = f"steps of policy {config.policy} are launched op by op: {why_not}"
        choices = replace(choices, decode_form=DecodeForm.ORDINARY, decode_form_why=why)
    row_refusal = find_row_refusal(attention)
    if row_refusal is not None:
        choices = replace(choices, rows=None, rows_why=f"K and V are read from the blocks: {row_refusal}")
    steps = policy_steps or decode_steps
    fallbacks = collect_fallbacks(
        config, choices, pools, None if divided is None else divided.weights, find_pin_refusals(attention)
    )
    runner = ModelRunner(
        model=model,
        attention=attention,
        sampler=Sampler(vocab_size=choices.spec.vocab_size, device=choices.device),
        copies=CopyEngine(pools, copy=trace.copy),
        device=choices.device,
        forward=forward,
        decode_steps=steps if steps is None or watch_decode is None else WatchedSteps(steps, watch_decode),
        torch_threads=TorchThreads(choices.num_threads)
        if choices.device.type == "cpu" and choices.threads is not None
        else None,
        tracer=tracer,
        device_clock=trace.device_clock,
        bounded=bounded,
        promotions=make_promotions(hot, pools, copy),
        before_step=None if divided is None or divided.cache is None else divided.cache.before_step,
    )

    def kv_bytes() -> dict[Tier, int]:
        return _bytes_of(choices, {tier: usage.used + usage.in_flight for tier, usage in kv_manager.usage().items()})

    def cached_bytes() -> dict[Tier, int]:
        return _bytes_of(choices, {tier: usage.cached for tier, usage in kv_manager.usage().items()})

    executor: Executor = (
        runner if checksums is None else VerifiedExecutor(runner.execute, checksums, device=choices.device)
    )
    launch: Launch | None = runner.launch if checksums is None and tuner is None else None
    if Tier.CXL in choices.memory.num_blocks:
        merged = MergedExecutor(executor, ids)
        executor, launch = merged, None if launch is None else merged.before(launch)
    core = (
        EngineCore(
            scheduler=scheduler,
            executor=executor,
            launch=launch,
            after_step=after_step,
        )
        if not tracer.is_on
        else TracedCore(scheduler=scheduler, executor=executor, tracer=tracer, kv_bytes=kv_bytes, after_step=after_step)
    )
    core.stats.fallbacks.update(fallbacks.counts)
    expected = expect_steps(
        config,
        choices,
        divided,
        stream_share=stream.share,
        kv_bytes=_bytes_of(choices, choices.memory.num_blocks),
        profile=profile,
        dummy_kind=dummy_kind,
    )
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
        report=describe(
            config,
            choices,
            pools,
            divided,
            stream=(stream.share, explain_stream(stream, scan)),
            fallbacks=fallbacks,
            hot=hot_row(hot),
            plan=expected.plan,
        ),
        figures=EngineFigures(
            spec=choices.spec,
            device=str(choices.device),
            dtype=choices.dtype,
            keeps_quantized=choices.keeps_quantized,
            num_threads=choices.num_threads,
            kv=choices.kv.specs,
            num_blocks=choices.memory.num_blocks,
            ledger=choices.memory.ledger,
            scans_keys=bounded is not None,
        ),
        kv_bytes=kv_bytes,
        cached_bytes=cached_bytes,
        kv_capacity=_bytes_of(choices, choices.memory.num_blocks),
        weights_bytes={
            tier: sum(entry.num_bytes for entry in choices.memory.ledger.entries(tier) if entry.owner == "weights")
            for tier in pools
        },
        sessions=sessions,
        neuron_figures=None if divided is None else divided.neuron_figures,
        end_runner=runner.close,
        predict_step=expected.predict_step,
        tuner=tuner,
    )


def _bytes_of(choices: Choices, num_blocks: Mapping[Tier, int]) -> dict[Tier, int]:
    """K, V and scales of so many blocks of each tier that has any, by the tier of memory where they lie."""
    sizes = {
        tier: count * choices.kv.specs[tier].bytes_per_block for tier, count in num_blocks.items() if tier is Tier.GPU
    }
    return sizes | (choices.memory.host.bytes_of(num_blocks) if num_blocks.keys() - {Tier.GPU} else {})


def _eos_ids(spec: ModelSpec, tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that end an answer; those that the model cannot choose are left out, with a warning."""
    named = frozenset(spec.eos_ids) | frozenset(tokenizer.eos_ids)
    impossible = {token_id for token_id in named if token_id >= spec.vocab_size}
    if impossible:
        logger.warning("end-of-text ids %s lie outside the vocabulary of %d", sorted(impossible), spec.vocab_size)
    return named - impossible

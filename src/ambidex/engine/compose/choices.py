"""What a model, its settings and this machine make of each other, before anything large is allocated.

Where weights lie is chosen in `weight_choices.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from ambidex.attention.scanned import why_no_scan_lane
from ambidex.attention.select.policy import Need
from ambidex.attention.select.registry import make_policy
from ambidex.attention.streamed import why_no_stream
from ambidex.core.config import EngineConfig, Graphs, LoadFormat
from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError, NativeModuleError
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import KeptRows, KVOrder, StreamBuffers
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import PolicyName
from ambidex.core.sparsity import OFF
from ambidex.core.step import make_buckets
from ambidex.core.units import format_size
from ambidex.engine.bounded_form import BoundedForm, choose_bounded_form
from ambidex.engine.chosen_policy import ChosenPolicy, choose_policy
from ambidex.engine.compose.crossovers import Crossovers, find_crossovers
from ambidex.engine.compose.cxl import CxlTier, choose_cxl
from ambidex.engine.compose.hot import find_no_hot, staging_bytes
from ambidex.engine.compose.sparsity import SparsityChoice, choose_sparsity
from ambidex.engine.compose.weight_choices import WeightChoices, choose_weights
from ambidex.engine.kept_rows import choose_kept_rows, choose_policy_state, why_no_policy_steps
from ambidex.engine.kv_format import KVFormat, choose_host_order, choose_kv_format
from ambidex.engine.lane_preset import most_streamed_share
from ambidex.engine.memory import FreeMemory, MemoryPlan, fixed_bytes, most_requests, plan_memory, step_stream_bytes
from ambidex.engine.weights_plan import check_placement
from ambidex.formats.locate import ModelSource, find_model
from ambidex.formats.spec import read_spec
from ambidex.hw.memory import read_memory
from ambidex.hw.profile import HardwareProfile
from ambidex.hw.topology import check_num_threads, read_topology
from ambidex.kernels.cpu.native import ThreadPool, isa
from ambidex.kernels.dispatch import choose
from ambidex.models.registry import build_model
from ambidex.models.site_plans import RingSizes
from ambidex.runner.decode import DecodeForm
from ambidex.runner.device import TORCH_DTYPES, activation_dtype, choose_device, choose_dtype, keeps_quantized
from ambidex.storage.host_memory import HostMemory

CPU_SPIN_US: Final = 300
"""How long native threads look for work before they sleep when the accelerator is the CPU: longer than what Python and
torch do between two native calls of a decode step."""


LANE_SPIN_US: Final = 2000
"""The same beside a GPU: longer than its part of a layer, so that no layer begins with waking threads."""


SPARSE_SPIN_US: Final = 50
"""The same where neurons are left out: torch's threads gather rows between native calls, on the same cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
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
    policy: ChosenPolicy
    bounded: BoundedForm
    why_no_hot: str | None
    stream: StreamBuffers | None
    rows: KeptRows | None
    rows_why: str
    weights: WeightChoices
    sparsity: SparsityChoice | None
    crossovers: Crossovers
    cxl: CxlTier
    memory: MemoryPlan
    plan: Callable[[CxlTier], MemoryPlan]
    """Divides the budgets anew, for another CXL tier."""

    @property
    def has_early_steps(self) -> bool:
        """Steps of one token a request have the form of policies that look ahead (`attention/early_decode.py`)."""
        looks_ahead = self.policy.settings.name.looks_ahead
        return looks_ahead and self.threads is not None and self.rows is not None

    def most_running(self, config: EngineConfig) -> int:
        """Requests of a step: as many as are allowed, or as the rule of a policy has chosen."""
        auto = self.weights.auto
        if auto is None or not auto.is_by_rule:
            return config.max_running_requests
        return min(config.max_running_requests, auto.workload.batch)


def default_num_threads(device: torch.device) -> int:
    """CPU threads where none are asked for: the usable cores, of which a GPU's driver takes one."""
    return max(1, read_topology().num_usable_cores - (device.type == "cuda"))


def choose_num_threads(config: EngineConfig, device: torch.device) -> int:
    """CPU threads of an engine.

    Raises:
        ConfigError: more are asked for than can run at once.
    """
    if config.num_threads is None:
        return default_num_threads(device)
    check_num_threads(config.num_threads)
    return config.num_threads


def make_choices(
    config: EngineConfig,
    decode_form: DecodeForm | None,
    *,
    streams_chunks: bool,
    weight_ring: RingSizes | None,
    profile: HardwareProfile | None,
    dummy_kind: str | None,
    host_memory: HostMemory,
) -> Choices:
    source = find_model(config.model)
    spec = read_spec(source)
    chosen = choose_policy(config, source, spec)
    policy = make_policy(chosen.settings, spec)  # refuses a model that it cannot serve before anything is loaded
    device = choose_device(config.device)
    is_cuda = device.type == "cuda"
    cxl = choose_cxl(config, host_memory)
    num_threads = choose_num_threads(config, device)
    lane_spin_us = LANE_SPIN_US if config.mlp_sparsity == OFF else SPARSE_SPIN_US
    threads = make_threads(num_threads, spin_us=lane_spin_us if is_cuda else CPU_SPIN_US)
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
    skeleton = build_model(
        spec,
        device=torch.device("meta"),
        dtype=TORCH_DTYPES[dtype],
        activation_dtype=TORCH_DTYPES[activation_dtype(dtype, device)],
    )
    sparsity = choose_sparsity(config, spec, source, skeleton)
    form, form_why = (decode_form, "asked for") if decode_form else _choose_decode_form(config, spec, device, threads)
    if cxl.slow is not None and decode_form is None:
        form, form_why = DecodeForm.ORDINARY, "reads of the emulated CXL tier are paced layer by layer"
    if sparsity is not None and form is DecodeForm.PROGRAM:
        form, form_why = DecodeForm.ORDINARY, "which neurons are skipped is known only in the step"
    has_row_ops = is_cuda or form in (DecodeForm.FIXED, DecodeForm.CAPTURED)
    kv = choose_kv_format(config, spec, dtype=dtype, has_row_ops=has_row_ops, has_native=threads is not None)
    bounded = choose_bounded_form(config, kv.specs, why_ordinary=form_why if form is DecodeForm.ORDINARY else None)
    has_fixed = config.policy.has_fixed_steps
    if has_fixed and form in (DecodeForm.FIXED, DecodeForm.CAPTURED):
        why_not = why_no_policy_steps(config, kv.specs)
        if why_not is not None:
            form, form_why = DecodeForm.ORDINARY, f"steps of policy {config.policy} are launched op by op: {why_not}"
    elif not (has_fixed or config.policy.attends_all or bounded.is_native):
        form, form_why = decode_form or DecodeForm.ORDINARY, f"policy {config.policy} chooses keys step by step"
    activations = activation_dtype(dtype, device)
    free = _free_memory(device, cxl)
    can_step_stream = (
        form in (DecodeForm.FIXED, DecodeForm.CAPTURED)
        and not has_fixed
        and _may_stream(config, kv, is_bounded=bounded.is_native)
        and why_no_stream(spec, kv.specs) is None
    )
    can_step_scan = can_step_stream and bounded.is_native and why_no_scan_lane(kv.specs[Tier.DRAM]) is None
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
            max_requests=most_requests(config),
            step_bytes=step_stream_bytes(config, free) if can_step_stream else 0,
            num_q_heads=spec.num_q_heads if can_step_scan else 0,
            most_share=most_streamed_share(config),
        )
    buckets = decode_buckets(config) if form is DecodeForm.CAPTURED else ()
    rows, rows_why = choose_kept_rows(
        config,
        spec,
        chosen.settings,
        kv.specs,
        is_native=bounded.is_native,
        is_cuda=is_cuda,
        is_fixed=form in (DecodeForm.FIXED, DecodeForm.CAPTURED),
    )
    state = choose_policy_state(
        spec, chosen.settings, is_fixed=form in (DecodeForm.FIXED, DecodeForm.CAPTURED) and rows is not None
    )
    why_no_hot = find_no_hot(config, form, bounded)
    fixed = fixed_bytes(
        config, spec, activations=activations, graph_buckets=buckets,
        graph_modes=2 if has_fixed and Need.TIMES in policy.needs else 1,
        stream=stream, rows=rows, state=state,
        hot=staging_bytes(kv.specs) if why_no_hot is None and is_cuda else 0,
    )  # fmt: skip
    weights = choose_weights(
        config, spec, skeleton, dtype, device, kv, keeps_quantized=keeps, free=free, fixed=fixed, ring=weight_ring,
        profile=profile,
        dummy_kind=dummy_kind,
        stream_blocks=stream.step_blocks if stream is not None else 0,
        sparsity=sparsity,
    )  # fmt: skip
    if weights.placement is not None:
        check_placement(config, looks_ahead=Need.LOOK_AHEAD in policy.needs, placement=weights.placement)
        if has_fixed and form in (DecodeForm.FIXED, DecodeForm.CAPTURED):
            form_why = f"steps of policy {config.policy} are launched op by op: weights lie in DRAM"
            form = DecodeForm.ORDINARY
            state = state if config.policy.looks_ahead else None

    def plan(tier: CxlTier) -> MemoryPlan:
        return plan_memory(
            config,
            spec,
            kv.specs,
            free=free,
            weights=weights.bytes,
            fixed=fixed,
            scan_bytes=bounded.scan_bytes(kv.specs),
            mapping=tier.mapping,
            cxl_bytes=tier.num_bytes,
            num_near_v=chosen.settings.exact_layers or 0,
            rows=rows,
            state=state,
        )

    return Choices(
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
        policy=chosen,
        bounded=bounded,
        why_no_hot=why_no_hot,
        stream=stream,
        rows=rows,
        rows_why=rows_why,
        weights=weights,
        sparsity=sparsity,
        crossovers=find_crossovers(device, num_threads, profile),
        cxl=cxl,
        memory=plan(cxl),
        plan=plan,
    )


def _may_stream(config: EngineConfig, kv: KVFormat, *, is_bounded: bool) -> bool:
    """Whether decode steps may have buffers for streamed keys; integers travel only if that is asked for."""
    if kv.specs[Tier.DRAM].dtype.has_scales:
        return bool(config.stream_percent) and not is_bounded
    return config.stream_percent != 0


def _choose_decode_form(
    config: EngineConfig, spec: ModelSpec, device: torch.device, threads: ThreadPool | None
) -> tuple[DecodeForm, str]:
    """How decode steps run, and the reason."""
    has_fixed = config.policy.has_fixed_steps
    if spec.alibi_slopes is not None:
        return DecodeForm.ORDINARY, "attention with slopes (alibi) has no other form"
    if config.graphs is Graphs.OFF:
        return DecodeForm.ORDINARY, "graphs are off"
    if device.type != "cuda" and has_fixed:
        return DecodeForm.ORDINARY, f"steps of policy {config.policy} are launched op by op: graphs need a GPU"
    if device.type != "cuda":
        order, why = choose_host_order(config.block_size, threads is not None)
        if order is not KVOrder.TILES:
            return DecodeForm.ORDINARY, why
        return DecodeForm.PROGRAM, "decode steps are replayed as native programs"
    for op in ("attend_paged", "rotate_and_store", *_own_ops(config.policy)):
        choice = choose(op, device.type)
        if choice.name != "triton":
            return DecodeForm.ORDINARY, f"CUDA graphs need the Triton kernel of {op}: {choice.reason}"
    if has_fixed:
        return DecodeForm.CAPTURED, "decode steps are replayed as CUDA graphs"
    return DecodeForm.CAPTURED, "decode steps whose keys all lie on the GPU are replayed as CUDA graphs"


def _own_ops(policy: PolicyName) -> tuple[str, ...]:
    """Ops of steps of fixed form that are a policy's."""
    if policy.looks_ahead:
        return ("attend_early", "predict_far", "attend_predicted")
    if policy.adds_up:
        return ("attend_held", "add_sums")
    return {
        PolicyName.STREAMING_LLM: ("attend_windows",),
        PolicyName.QUEST: ("choose_pages", "attend_pages"),
    }.get(policy, ())


def decode_buckets(config: EngineConfig) -> tuple[int, ...]:
    return make_buckets(most_requests(config))


def make_threads(num_threads: int, *, spin_us: int) -> ThreadPool | None:
    """The threads of all native ops; None without the compiled module.

    Raises:
        ConfigError: `AMBIDEX_MAX_ISA` names no instruction set.
    """
    try:
        isa()  # a wrong limit is refused here, not by the first op
        return ThreadPool(num_threads, spin_us=spin_us)
    except NativeModuleError:
        return None


def _free_memory(device: torch.device, cxl: CxlTier) -> FreeMemory:
    """What is free beside what the CXL tier takes of it, or has for itself.

    Raises:
        ConfigError: it is emulated in DRAM, and there is not so much.
    """
    memory = read_memory()
    dram = memory.usable_bytes
    if cxl.nodes is not None:
        limit = memory.limit.free_bytes - cxl.num_bytes if memory.limit is not None else dram
        dram = max(0, min(memory.available_bytes - cxl.node_free_bytes, limit))
    elif cxl.num_bytes > dram:
        raise ConfigError(
            f"`cxl_memory` is {format_size(cxl.num_bytes)}, emulated in DRAM: {format_size(dram)} are free on this "
            f"machine"
        )
    else:
        dram -= cxl.num_bytes
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return FreeMemory(accelerator=free, dram=dram, is_shared=False)
    return FreeMemory(accelerator=dram, dram=dram, is_shared=True)

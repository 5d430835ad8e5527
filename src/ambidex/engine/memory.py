"""How many KV blocks each tier gets: budgets minus what weights and workspace take. Numbers only, no allocation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ambidex.core.config import EngineConfig
from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError
from ambidex.core.ids import Tier
from ambidex.core.kv_mapping import KVMapping
from ambidex.core.kv_spec import KeptRows, KVSpec, PolicyState, StreamBuffers
from ambidex.core.ledger import MemoryLedger
from ambidex.core.model_spec import ModelSpec
from ambidex.core.units import format_size
from ambidex.cost.workspace import STEP_STREAM_SHARE, graph_bytes, workspace_bytes
from ambidex.engine.host_blocks import HostBlocks, divide_host

DEFAULT_SHARE_OF_FREE_GPU = 0.9
"""Of the free memory of a GPU; the rest is left to the driver, the context and fragmentation."""
DEFAULT_SHARE_OF_FREE_DRAM = 0.45
"""Of the free memory of the machine, for each of the two tiers when both lie in DRAM."""
DEFAULT_CONTEXTS = 8
"""Full contexts for which a tier gets KV blocks when its budget is not named: more are rarely full at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeMemory:
    """Bytes that are free now: on the accelerator (of the machine itself when the accelerator is the CPU), in DRAM."""

    accelerator: int
    dram: int
    is_shared: bool
    """Both are the same memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """What weights take: on the accelerator, in DRAM, and on the accelerator for those on their way from there."""

    on_gpu: int
    in_dram: int = 0
    ring: int = 0
    screens: int = 0
    """In DRAM, 8-bit copies of rows that are looked at before the rows."""
    moving: int = 0
    """On the accelerator, and as many in DRAM, for neurons that change places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedBytes:
    """What the accelerator's budget pays before weights and KV."""

    workspace: int
    graphs: int
    streamed: int
    near_rows: int = 0
    """What a policy keeps there of K and V beside the blocks."""
    hot: int = 0
    """Buffers through which copies of hot blocks come."""
    state: int = 0
    """What it keeps there besides (see `PolicyState`), but for what it keeps of each token."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.workspace + self.graphs + self.streamed + self.near_rows + self.hot + self.state


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Blocks of each tier, the context limit that they allow, and the ledger that holds every byte of it. A block of
    host memory counts for the tier that its K lies on; `host` says where all of it lies. Where a policy keeps rows
    beside the blocks, there is room for those of `max_kept_rows` tokens; where it keeps a state on the
    accelerator, `state`, for that of `max_state_tokens`; None: it does not."""

    num_blocks: dict[Tier, int]
    host: HostBlocks
    max_context_len: int
    max_context_reason: str
    max_kept_rows: int | None
    max_state_tokens: int | None
    state: PolicyState | None
    ledger: MemoryLedger

    @property
    def max_kept_tokens(self) -> int | None:
        """Tokens of all requests of which a policy can keep what it keeps beside the blocks; None: it keeps nothing."""
        return min((size for size in (self.max_kept_rows, self.max_state_tokens) if size is not None), default=None)


def step_stream_bytes(config: EngineConfig, free: FreeMemory) -> int:
    """Bytes of the accelerator that decode steps may take for keys on their way from DRAM."""
    budget = config.gpu_memory if config.gpu_memory is not None else int(free.accelerator * DEFAULT_SHARE_OF_FREE_GPU)
    return int(budget * STEP_STREAM_SHARE)


def fixed_bytes(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    activations: DType,
    graph_buckets: Sequence[int] = (),
    graph_modes: int = 1,
    stream: StreamBuffers | None = None,
    rows: KeptRows | None = None,
    hot: int = 0,
    state: PolicyState | None = None,
) -> FixedBytes:
    """What the accelerator's budget pays before weights and KV.

    Args:
        activations: the format that is computed in.
        graph_buckets: rows of the decode steps that are captured as graphs; empty: none are.
        graph_modes: modes of a policy, each with graphs of its own.
        stream: buffers of the stream lane; None: there is none.
        rows: what a policy keeps of K and V beside the blocks; None: nothing.
        hot: bytes of the buffers for copies of hot blocks.
        state: what it keeps there besides; None: nothing.
    """
    most_rows, max_context_len = most_requests(config), _wanted_context_len(config, spec)
    workspace = workspace_bytes(
        spec,
        max_tokens=config.max_tokens_per_step,
        max_rows=most_rows,
        max_context_len=max_context_len,
        num_bytes=activations.num_bytes,
    )
    return FixedBytes(
        workspace=workspace,
        graphs=graph_bytes(spec, graph_buckets, num_bytes=activations.num_bytes, num_modes=graph_modes),
        streamed=stream.num_bytes if stream is not None else 0,
        near_rows=rows.gpu_bytes(most_rows, max_context_len) if rows is not None else 0,
        hot=hot,
        state=state.fixed_bytes(most_rows, max_context_len) if state is not None else 0,
    )


def most_requests(config: EngineConfig) -> int:
    """Requests of a step, at most."""
    return min(config.max_running_requests, config.max_tokens_per_step)


def find_gpu_budget(config: EngineConfig, free: FreeMemory) -> int:
    """Bytes of the accelerator's budget, if nothing needs more of it."""
    share = DEFAULT_SHARE_OF_FREE_DRAM if free.is_shared else DEFAULT_SHARE_OF_FREE_GPU
    return config.gpu_memory if config.gpu_memory is not None else int(free.accelerator * share)


def plan_memory(
    config: EngineConfig,
    spec: ModelSpec,
    kv: Mapping[Tier, KVSpec],
    *,
    free: FreeMemory,
    weights: WeightBytes,
    fixed: FixedBytes,
    scan_bytes: Mapping[Tier, int] | None = None,
    mapping: KVMapping = KVMapping.DRAM,
    cxl_bytes: int = 0,
    num_near_v: int = 0,
    rows: KeptRows | None = None,
    state: PolicyState | None = None,
) -> MemoryPlan:
    """Divide the budgets.

    Args:
        kv: the KV cache as each tier keeps it, in blocks of one size.
        scan_bytes: what bounded attention keeps beside each block of a tier; None: nothing.
        mapping: where K and V in host memory shall lie, not `auto`.
        cxl_bytes: what the CXL tier has for them.
        num_near_v: first layers in which the CPU reads V in every step: theirs rather lies in DRAM.
        rows: what a policy keeps of each token in host memory beside its block; None: nothing.
        state: what it keeps of each token on the accelerator; None: nothing.
    Raises:
        ConfigError: a budget is too small for the model; says what is needed.
    """
    taken = weights.on_gpu + weights.ring + weights.moving + fixed.total
    in_dram = weights.in_dram + weights.screens + weights.moving
    gpu_budget, dram_budget = _budgets(config, free, taken, in_dram)
    context_blocks = kv[Tier.GPU].num_blocks(_wanted_context_len(config, spec))
    most_blocks = context_blocks * config.max_running_requests
    default_blocks = context_blocks * min(config.max_running_requests, DEFAULT_CONTEXTS)
    beside = {tier: (scan_bytes or {}).get(tier, 0) for tier in kv}
    gpu_block_bytes = kv[Tier.GPU].bytes_per_block + beside[Tier.GPU]
    gpu_most = default_blocks if config.gpu_memory is None else most_blocks
    max_state_tokens, state_bytes = None, 0
    if state is not None:
        max_state_tokens = _state_tokens(
            config, kv[Tier.GPU], gpu_block_bytes, gpu_budget - taken, state, most=gpu_most
        )
        state_bytes = max_state_tokens * state.bytes_per_token
    gpu_blocks = _gpu_blocks(config, kv[Tier.GPU], gpu_block_bytes, gpu_budget - taken - state_bytes, gpu_most)
    if gpu_blocks < 0 or gpu_budget < taken:
        ring = f", weights on their way {format_size(weights.ring)}" if weights.ring else ""
        near = f", near rows of `policy` {config.policy} {format_size(fixed.near_rows)}" if fixed.near_rows else ""
        near += f", buffers for hot blocks {format_size(fixed.hot)}" if fixed.hot else ""
        near += f", its {state.owner} {format_size(fixed.state)}" if state is not None and fixed.state else ""
        fewer = "`near_tokens`, " if config.near_tokens else ""
        raise ConfigError(
            f"`gpu_memory` {format_size(gpu_budget)} is too small: weights take {format_size(weights.on_gpu)}{ring}, "
            f"workspace {format_size(fixed.workspace)}, stream buffers {format_size(fixed.streamed)}, CUDA graphs "
            f"{format_size(fixed.graphs)}{near}: give at least {format_size(taken + gpu_block_bytes)}, or a smaller "
            f"{fewer}`weights_gpu_memory`, `max_tokens_per_step`, `max_running_requests` or `max_context_len`"
        )
    dram_left = dram_budget - in_dram
    if dram_left < 0:
        raise ConfigError(
            f"`dram_memory` {format_size(dram_budget)} is too small: weights take {format_size(in_dram)}: "
            f"give at least that and what KV needs, or a larger `gpu_memory` or `weights_gpu_memory`"
        )
    host = divide_host(
        mapping,
        kv[Tier.DRAM],
        dram=dram_left,
        cxl=cxl_bytes,
        most_blocks=default_blocks if config.dram_memory is None else most_blocks,
        beside=beside[Tier.DRAM],
        num_near_v=num_near_v,
        rows=rows,
        num_gpu_blocks=gpu_blocks,
    )
    num_blocks = {Tier.GPU: gpu_blocks, **host.num_blocks}
    max_kept_rows = host.num_row_blocks * kv[Tier.DRAM].block_size if rows is not None else None
    max_len, reason = _context_len(
        config, spec, kv[Tier.DRAM], kv[Tier.DRAM].bytes_per_block + beside[Tier.DRAM], num_blocks, max_kept_rows,
        max_state_tokens, state,
    )  # fmt: skip
    row_bytes = {tier: host.num_row_blocks * size for tier, size in host.row_bytes.items()}
    host_bytes = host.bytes_of(num_blocks)
    num_beside = host.layout.num_blocks * beside[Tier.DRAM]
    ledger = MemoryLedger(
        {
            Tier.GPU: max(gpu_budget, taken + gpu_blocks * gpu_block_bytes + state_bytes),
            Tier.DRAM: max(dram_budget, in_dram + host_bytes[Tier.DRAM] + num_beside + row_bytes.get(Tier.DRAM, 0)),
            **({Tier.CXL: cxl_bytes} if mapping is not KVMapping.DRAM else {}),
        }
    )
    ledger.take(Tier.GPU, "weights", weights.on_gpu)
    ledger.take(Tier.GPU, "workspace", fixed.workspace)
    for owner, num_bytes in (
        ("weight ring", weights.ring),
        ("graphs", fixed.graphs),
        ("stream", fixed.streamed),
        ("near rows", fixed.near_rows),
        ("hot blocks", fixed.hot),
        (state.owner if state is not None else "", fixed.state + state_bytes),
    ):
        if num_bytes:
            ledger.take(Tier.GPU, owner, num_bytes)
    if weights.in_dram:
        ledger.take(Tier.DRAM, "weights", weights.in_dram)
    if weights.screens:
        ledger.take(Tier.DRAM, "screens", weights.screens)
    if weights.moving:
        for tier in (Tier.GPU, Tier.DRAM):
            ledger.take(tier, "neuron moves", weights.moving)
    for tier, size in {Tier.GPU: gpu_blocks * kv[Tier.GPU].bytes_per_block, **host_bytes}.items():
        ledger.take(tier, "kv", size)
    for tier, size in {Tier.GPU: gpu_blocks * beside[Tier.GPU], Tier.DRAM: num_beside}.items():
        if beside[tier]:
            ledger.take(tier, "scan", size)
    for tier, size in row_bytes.items():
        ledger.take(tier, "rows", size)
    return MemoryPlan(
        num_blocks=num_blocks,
        host=host,
        max_context_len=max_len,
        max_context_reason=reason,
        max_kept_rows=max_kept_rows,
        max_state_tokens=max_state_tokens,
        state=state,
        ledger=ledger,
    )


def _wanted_context_len(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_context_len is not None and config.max_context_len > spec.max_context_len:
        raise ConfigError(
            f"`max_context_len` is {config.max_context_len}: the model was made for at most "
            f"{spec.max_context_len} tokens"
        )
    return config.max_context_len or spec.max_context_len


def _budgets(config: EngineConfig, free: FreeMemory, fixed: int, weights_in_dram: int) -> tuple[int, int]:
    """Bytes of the accelerator tier and of the DRAM tier."""
    gpu = find_gpu_budget(config, free)
    if free.is_shared and config.gpu_memory is None:
        gpu = max(gpu, min(fixed, free.accelerator))
    dram = config.dram_memory
    if dram is None:
        dram = weights_in_dram + int(max(0, free.dram - weights_in_dram) * DEFAULT_SHARE_OF_FREE_DRAM)
    for name, size, limit in (("`gpu_memory`", gpu, free.accelerator), ("`dram_memory`", dram, free.dram)):
        if size > limit:
            raise ConfigError(f"{name} is {format_size(size)}: {format_size(limit)} are free on this machine")
    return gpu, dram


def _state_tokens(
    config: EngineConfig, kv: KVSpec, block_bytes: int, left: int, state: PolicyState, *, most: int
) -> int:
    """Tokens of which a policy can keep what it keeps there: those of as many blocks as are wanted in all, out of what
    the accelerator's tier leaves of the budget if its blocks are asked for, else of a half of it."""
    if state.bytes_per_token == 0:
        return most * kv.block_size
    asked = kv.num_blocks(config.kv_gpu_tokens) * block_bytes if config.kv_gpu_tokens is not None else left // 2
    share = left - asked
    return max(0, min(most * kv.block_size, share // state.bytes_per_token))


def _gpu_blocks(config: EngineConfig, kv: KVSpec, block_bytes: int, left: int, default_blocks: int) -> int:
    """Blocks of the accelerator tier; negative if the asked number does not fit."""
    fitting = left // block_bytes
    if config.kv_gpu_tokens is None:
        return max(0, min(fitting, default_blocks))
    asked = kv.num_blocks(config.kv_gpu_tokens)
    if config.gpu_memory is None and asked > fitting:
        raise ConfigError(
            f"`kv_gpu_tokens` {config.kv_gpu_tokens} needs {format_size(asked * block_bytes)}: of the default "
            f"budget, a share of the memory that is free now, weights and workspace leave {format_size(max(0, left))}: "
            f"lower it, or name a budget with `gpu_memory`"
        )
    return asked if asked <= fitting else -1


def _context_len(
    config: EngineConfig,
    spec: ModelSpec,
    kv: KVSpec,
    block_bytes: int,
    num_blocks: dict[Tier, int],
    max_kept_rows: int | None,
    max_state_tokens: int | None,
    state: PolicyState | None,
) -> tuple[int, str]:
    """The context limit, and why it is that."""
    capacity = sum(num_blocks.values()) * kv.block_size
    wanted = _wanted_context_len(config, spec)
    limits = []
    if max_kept_rows is not None:
        remedy = "`dram_memory` (and `cxl_memory`, if there is any)"
        limits.append((max_kept_rows, "K and V of each token as rows in host memory", "rows in host memory", remedy))
    if max_state_tokens is not None and state is not None:
        kept = f"{state.what} on the accelerator"
        limits.append((max_state_tokens, f"{kept} of each token", kept, "`gpu_memory`"))
    for num_tokens, what, short, remedy in sorted(limits):
        if num_tokens >= min(capacity, wanted):
            continue
        if config.max_context_len is not None or num_tokens < 2:
            raise ConfigError(
                f"`policy` {config.policy} keeps {what}, too: there is room for those of {num_tokens} tokens, and a "
                f"context has {wanted}: raise {remedy}, or lower `max_context_len`"
            )
        return num_tokens, f"the {short} that `policy` {config.policy} has room for"
    if capacity >= wanted:
        return wanted, "asked for" if config.max_context_len is not None else "the model's"
    if config.max_context_len is not None or capacity < 2:
        raise ConfigError(
            f"a context of {wanted} tokens needs {format_size(kv.num_blocks(wanted) * block_bytes)} of KV: "
            f"the tiers hold {capacity} tokens ({', '.join(f'{tier} {count}' for tier, count in num_blocks.items())} "
            f"blocks of {kv.block_size}): raise `dram_memory` or `gpu_memory`, or lower `max_context_len`"
        )
    return capacity, "what the KV tiers hold"

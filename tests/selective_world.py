"""Tiny models run through `SelectiveAttention` over random blocks of two tiers, step by step as a test has it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ambidex.attention.decode_queries import Choice
from ambidex.attention.early_decode import EarlyDecode
from ambidex.attention.row_store import RowStore
from ambidex.attention.select.policy import Need
from ambidex.attention.select.registry import make_policy
from ambidex.attention.selective import SelectiveAttention
from ambidex.attention.tiered import TieredAttention
from ambidex.attention.ways.find import find_way
from ambidex.core.config import EngineConfig
from ambidex.core.dtypes import DType
from ambidex.core.ids import BlockId, RequestId, Tier
from ambidex.core.kv_spec import TILE_TOKENS, KVOrder, KVSpec
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import PolicySettings, resolve_policy
from ambidex.core.request import SamplingParams
from ambidex.core.step import BlockRef, NewRequest, ScheduledRequest
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec
from ambidex.kernels.cpu.native import AttentionPool, ThreadPool
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.models.look_ahead import LookAhead
from ambidex.models.registry import build_model
from ambidex.models.weights import load_weights
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.policy_steps import PolicySteps
from ambidex.runner.runner import call_model
from ambidex.storage.kv_pool import KVPool, RowKVPool
from ambidex.storage.tiled_pool import TiledKVPool
from tiny_models import VOCAB_SIZE, save_tiny_model

CPU = torch.device("cpu")
NUM_BLOCKS = 64
MAX_ROWS = 1024
MAX_REQUESTS = 8


@dataclass(frozen=True)
class TinyModel:
    """A model with random weights, fp32."""

    spec: ModelSpec
    model: CausalLM


def load_tiny_model(variant: str, folder: Path, *, seed: int = 0) -> TinyModel:
    path, _ = save_tiny_model(variant, folder, seed=seed)
    source = find_model(str(path))
    spec = read_spec(source)
    model = build_model(spec, device=CPU, dtype=torch.float32)
    load_weights(model, spec, source, device=CPU, dtype=torch.float32)
    return TinyModel(spec, model.eval())


def policy_settings(policy: str, **options: object) -> PolicySettings:
    """The settings of a policy, as an engine's configuration makes them."""
    return resolve_policy(EngineConfig(model="none", policy=policy, **options))  # type: ignore[arg-type]


def random_tokens(length: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]


class SelectiveWorld:
    """Requests whose tokens are known: their hidden states are what a test compares.

    Args:
        is_early: steps of one token a request take the fast form of policies that look ahead; with `is_fixed` those
            that have it take the fixed form, in which nobody is told of choices.
        gpu_from: from this one on, blocks of a request lie on the accelerator; others where chance puts them.

    Attributes:
        choices: what was chosen, by (request, layer, position).
        num_fixed: steps of fixed form.
    """

    def __init__(
        self,
        tiny: TinyModel,
        settings: PolicySettings,
        *,
        block_size: int = 4,
        seed: int = 0,
        verify_every: int = 0,
        is_early: bool = False,
        is_fixed: bool = False,
        has_rows: bool = False,
        max_requests: int = MAX_REQUESTS,
        max_rows: int = MAX_ROWS,
        gpu_from: int | None = None,
    ) -> None:
        self.tiny = tiny
        self.block_size = block_size
        self.random = random.Random(seed)
        self._is_fixed = is_fixed
        self._gpu_from = gpu_from
        self.num_fixed = 0
        self.pools = {tier: self._make_pool(tier) for tier in (Tier.GPU, Tier.DRAM)}
        self.choices: dict[tuple[str, int, int], Choice] = {}
        policy = make_policy(settings, tiny.spec)
        look_ahead = LookAhead(tiny.model, tiny.spec.num_layers) if Need.LOOK_AHEAD in policy.needs else None
        early = None
        if is_early:
            early = EarlyDecode(
                tiny.spec,
                TieredAttention(tiny.spec, self.pools),
                find_way(policy, look_ahead, CPU),
                RowStore(tiny.spec, self.pools, max_rows=max_rows),
                ThreadPool(1),
                num_near=settings.near_tokens or 0,
                max_requests=max_requests,
                max_scored=MAX_ROWS if settings.near_tokens is not None else 0,
                is_timed=Need.TIMES in policy.needs,
            )
        self.attention = SelectiveAttention(
            policy,
            tiny.spec,
            TieredAttention(tiny.spec, self.pools),
            look_ahead=look_ahead,
            early=early,
            row_store=RowStore(tiny.spec, self.pools, max_rows=max_rows) if has_rows else None,
            verify_every=verify_every,
            watch=None if is_fixed else self._watch,
        )
        self.steps = None
        if is_fixed:
            self.steps = PolicySteps(
                model=tiny.model,
                spec=tiny.spec,
                forward=self._forward_fixed,
                pools=self.pools,
                selective=self.attention,
                buckets=(1, 2, 4),
                max_context_len=MAX_ROWS,
                max_far=MAX_ROWS,
                capture=None,
            )
        self.free = {tier: self.random.sample(range(NUM_BLOCKS), NUM_BLOCKS) for tier in self.pools}
        self.blocks: dict[str, list[BlockRef]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.num_computed: dict[str, int] = {}

    def _make_pool(self, tier: Tier) -> KVPool:
        is_tiled = self.block_size % TILE_TOKENS == 0 and not (self._is_fixed and tier is Tier.GPU)
        order = KVOrder.TILES if is_tiled else KVOrder.ROWS
        spec = KVSpec.of(self.tiny.spec, dtype=DType.FP32, block_size=self.block_size, order=order)
        if is_tiled:
            return TiledKVPool(spec, tier, NUM_BLOCKS, native=AttentionPool(ThreadPool(1)), pinned=False)
        pool = RowKVPool(spec, tier, NUM_BLOCKS, device=CPU, pinned=False)
        for part in pool.tensors:
            part.fill_(torch.nan)  # what was never stored must never be seen
        return pool

    def _watch(self, choice: Choice) -> None:
        self.choices[choice.request_id, choice.layer_idx, choice.position] = choice

    def add(self, name: str, tokens: Sequence[int], *, num_prompt: int, max_output_tokens: int | None = None) -> None:
        """A request whose answer is the tokens behind the first `num_prompt`."""
        self.tokens[name] = list(tokens)
        self.num_computed[name] = 0
        self.blocks[name] = []
        self.attention.add(
            NewRequest(
                request_id=RequestId(name),
                prompt_token_ids=tuple(tokens[:num_prompt]),
                params=SamplingParams(max_output_tokens=max_output_tokens),
                seed=0,
                max_tokens=len(tokens),
            )
        )

    def end(self, name: str) -> None:
        """The request has ended: its blocks and rows are nobody's."""
        self.preempt(name)
        self.attention.forget(RequestId(name))

    def preempt(self, name: str) -> None:
        """Take the blocks away; the request computes again from its first token."""
        self.num_computed[name] = 0
        for block in self.blocks[name]:
            self.free[block.tier].append(block.block_id)
        self.blocks[name] = []

    def step(self, work: Sequence[tuple[str, int]], *, fails_in_layer: int | None = None) -> dict[str, Tensor]:
        """Compute so many next tokens of each request; hidden states [n, E] of each. One layer may find no memory."""
        scheduled = [self._schedule(name, count) for name, count in work]
        with torch.inference_mode():
            if self.steps is not None and fails_in_layer is None and self.steps.try_run(scheduled) is not None:
                self.num_fixed += 1
                for name, count in work:
                    self.num_computed[name] += count
                return dict(zip([name for name, _ in work], self._hidden[: len(work)].split(1), strict=True))
            self.attention.begin(scheduled)
            ids = torch.tensor([token for request in scheduled for token in request.token_ids])
            positions = torch.cat([torch.arange(r.start, r.start + len(r.token_ids)) for r in scheduled])
            hidden = self.tiny.model(ids, positions, _Failing(self.attention, fails_in_layer))
        for name, count in work:
            self.num_computed[name] += count
        return dict(zip([name for name, _ in work], hidden.split([count for _, count in work]), strict=True))

    def _forward_fixed(self, model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        self._hidden = call_model(model, batch, attention)
        return self._hidden

    def run(self, name: str, *, chunks: Sequence[int]) -> Tensor:
        """Compute all tokens of one request alone, in such chunks and then one by one: hidden states [S, E]."""
        states = [self.step([(name, count)])[name] for count in chunks]
        while self.num_computed[name] < len(self.tokens[name]):
            states.append(self.step([(name, 1)])[name])
        return torch.cat(states)

    def _schedule(self, name: str, count: int) -> ScheduledRequest:
        start, blocks = self.num_computed[name], self.blocks[name]
        while len(blocks) * self.block_size < start + count:
            is_chosen = self._gpu_from is not None and len(blocks) >= self._gpu_from
            tier = Tier.GPU if is_chosen else self.random.choice(list(self.pools))
            blocks.append(BlockRef(tier, BlockId(self.free[tier].pop())))
        return ScheduledRequest(
            request_id=RequestId(name),
            token_ids=tuple(self.tokens[name][start : start + count]),
            start=start,
            blocks=tuple(blocks),
            is_sampled=False,
        )


class _Failing:
    """The attention, until a layer."""

    def __init__(self, attention: SelectiveAttention, layer_idx: int | None) -> None:
        self._attention, self._layer_idx = attention, layer_idx

    def attend(
        self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, *, angles: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        if layer_idx == self._layer_idx:
            raise torch.OutOfMemoryError("no memory, says the test")
        return self._attention.attend(layer_idx, q, k, v, angles=angles)

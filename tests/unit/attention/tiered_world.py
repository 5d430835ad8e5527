"""Requests that grow from step to step over random blocks of two tiers, beside their whole context for the truth."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ambidex.attention.chunk_stream import ChunkStream
from ambidex.attention.tiered import TieredAttention
from ambidex.core.dtypes import DType
from ambidex.core.ids import BlockId, KVPart, RequestId, Tier
from ambidex.core.kv_spec import TILE_TOKENS, KVOrder, KVSpec, StreamBuffers
from ambidex.core.model_spec import Activation, ModelSpec
from ambidex.core.step import BlockRef, ScheduledRequest
from ambidex.kernels.cpu.native import AttentionPool, ThreadPool, isa
from ambidex.storage.kv_pool import TORCH_DTYPES, KVPool, RowKVPool
from ambidex.storage.tile_writer import TileWriter
from ambidex.storage.tiled_pool import TiledKVPool
from dense_attention import visible_keys
from truth import assert_within_twice_plain, naive_attend, plain_int8_attend

TierOf = Callable[[int, int], Tier]


def make_model_spec(
    windows: tuple[int | None, ...] = (None,), *, num_q_heads: int = 6, num_kv_heads: int = 2, head_dim: int = 16
) -> ModelSpec:
    return ModelSpec(
        architecture="llama",
        num_layers=len(windows),
        hidden_size=num_q_heads * head_dim,
        intermediate_size=1,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=1,
        max_context_len=4096,
        norm_eps=1e-5,
        activation=Activation.SILU,
        rope=None,
        windows=windows,
        tie_embeddings=True,
    )


def make_pools(
    spec: ModelSpec, num_blocks: dict[Tier, int], *, block_size: int, dtype: DType = DType.FP32, device: str = "cpu"
) -> dict[Tier, KVPool]:
    """Pools full of NaN: what was never stored must never be seen. In host memory they are in tiles if they can."""
    pools = {
        tier: _make_pool(
            spec,
            tier,
            count,
            block_size,
            dtype,
            device if tier is Tier.GPU else "cpu",
            device == "cuda" and tier is Tier.DRAM,
        )
        for tier, count in num_blocks.items()
    }
    for pool in pools.values():
        for part in pool.tensors:
            part.fill_(torch.nan if part.is_floating_point() else 99)
    return pools


def _make_pool(
    spec: ModelSpec, tier: Tier, num_blocks: int, block_size: int, dtype: DType, device: str, pinned: bool
) -> KVPool:
    is_tiled = device == "cpu" and block_size % TILE_TOKENS == 0
    order = KVOrder.TILES if is_tiled else KVOrder.ROWS
    kv_spec = KVSpec.of(spec, dtype=dtype, block_size=block_size, order=order)
    if is_tiled:
        return TiledKVPool(kv_spec, tier, num_blocks, native=AttentionPool(ThreadPool(2)), pinned=pinned)
    return RowKVPool(kv_spec, tier, num_blocks, device=torch.device(device), pinned=False)


class TieredWorld:
    """Runs steps through `TieredAttention` and checks each layer's output against attention over the whole context.

    `tier_of(request_idx, block_idx)` says where a block is placed; ids are drawn at random. `kv_dtype`: the format of
    both pools, `dtype` unless named. `min_streamed`: the DRAM pool is read by the stream lane for so many queries or
    more, and written by the accelerator, on a CPU as on a GPU.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tier_of: TierOf,
        *,
        block_size: int,
        num_blocks: dict[Tier, int] | None = None,
        dtype: DType = DType.FP32,
        kv_dtype: DType | None = None,
        device: str = "cpu",
        seed: int = 0,
        min_streamed: int | None = None,
    ) -> None:
        num_blocks = num_blocks or {Tier.GPU: 64, Tier.DRAM: 64}
        self.spec, self.tier_of, self.block_size, self.device = spec, tier_of, block_size, device
        self.dtype = TORCH_DTYPES[dtype]
        self.kv_dtype = kv_dtype or dtype
        self.pools = make_pools(spec, num_blocks, block_size=block_size, dtype=self.kv_dtype, device=device)
        self.attention = TieredAttention(spec, self.pools, **self._stream(min_streamed))
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.free = {tier: self.random.sample(range(count), count) for tier, count in num_blocks.items()}
        self.blocks: dict[int, list[BlockRef]] = {}
        self.contexts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (request, layer) → K, V [Hkv, S, D]

    def _stream(self, min_streamed: int | None) -> dict[str, Any]:
        pool, device = self.pools[Tier.DRAM], torch.device(self.device)
        if min_streamed is None:
            return {}
        assert isinstance(pool, TiledKVPool)
        assert pool.is_within_reach(device)
        sizes = StreamBuffers(kv=pool.spec, piece_blocks=2, number_bytes=self.dtype.itemsize)
        lane = ChunkStream(
            pool, device=device, dtype=self.dtype, scale=self.spec.head_dim**-0.5, windows=self.spec.windows,
            sizes=sizes, min_queries=min_streamed,
        )  # fmt: skip
        return {"stream": lane, "writer": TileWriter(pool, device)}

    def context_len(self, request_idx: int) -> int:
        return self.contexts[request_idx, 0][0].shape[1] if (request_idx, 0) in self.contexts else 0

    def schedule(self, request_idx: int, num_tokens: int) -> ScheduledRequest:
        """Plan the request's next tokens, with as many blocks as they need."""
        start, blocks = self.context_len(request_idx), self.blocks.setdefault(request_idx, [])
        while len(blocks) * self.block_size < start + num_tokens:
            tier = self.tier_of(request_idx, len(blocks))
            blocks.append(BlockRef(tier, BlockId(self.free[tier].pop())))
        return ScheduledRequest(
            request_id=RequestId(str(request_idx)),
            token_ids=(0,) * num_tokens,
            start=start,
            blocks=tuple(blocks),
            is_sampled=False,
        )

    def step(self, work: Sequence[tuple[int, int]]) -> None:
        """One step over (request index, new tokens) pairs, all layers, each output checked."""
        self.attention.begin([self.schedule(request_idx, num_tokens) for request_idx, num_tokens in work])
        for layer_idx in range(self.spec.num_layers):
            q, k, v = (self._random_rows(work, heads) for heads in self._head_counts())
            out = self.attention.attend(layer_idx, q.to(self.device), k.to(self.device), v.to(self.device))
            assert out.dtype == self.dtype
            assert out.device.type == self.device
            row = 0
            for request_idx, num_tokens in work:
                rows = slice(row, row + num_tokens)
                self._check(request_idx, layer_idx, out[rows].cpu(), q[rows], k[rows], v[rows])
                row += num_tokens

    def _check(self, request_idx: int, layer_idx: int, out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
        k, v = (
            self.pools[Tier.GPU].round(part, rows.to(self.device)).cpu().transpose(0, 1)
            for part, rows in zip(KVPart, (k, v), strict=True)
        )
        if (request_idx, layer_idx) in self.contexts:
            old_k, old_v = self.contexts[request_idx, layer_idx]
            k, v = torch.cat((old_k, k), 1), torch.cat((old_v, v), 1)
        self.contexts[request_idx, layer_idx] = (k, v)
        visible = visible_keys(len(q), k.shape[1], self.spec.windows[layer_idx])
        scale = self.spec.head_dim**-0.5
        truth, _ = naive_attend(q.double(), k.double(), v.double(), scale, visible)
        plain, _ = naive_attend(q, k, v, scale, visible)
        if self.kv_dtype in (DType.INT8, DType.INT4):  # queries and probabilities are rounded to 8 bits, too
            plain = plain_int8_attend(q, k, v, scale, visible)
        if self.kv_dtype is DType.BF16 and self.dtype == torch.float32 and isa() in ("avx512bf16", "amx"):
            # Their dot products take queries and probabilities as bf16, too.
            plain = naive_attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), scale, visible)[0].float()
        # Own, GPU and CPU states, result; fp32 attention of torch on CUDA is off by up to 5 (test_ops_attention).
        per_state = 5 if self.device == "cuda" and self.dtype == torch.float32 else 1
        assert_within_twice_plain(out, plain, truth, num_roundings=4 * per_state)

    def _head_counts(self) -> tuple[int, int, int]:
        return self.spec.num_q_heads, self.spec.num_kv_heads, self.spec.num_kv_heads

    def _random_rows(self, work: Sequence[tuple[int, int]], num_heads: int) -> Tensor:
        num_tokens = sum(count for _, count in work)
        return torch.randn(num_tokens, num_heads, self.spec.head_dim, generator=self.generator).to(self.dtype)

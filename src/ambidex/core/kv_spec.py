"""`KVSpec`: the shape of the KV cache and the bytes that follow from it, for allocator, cost model and benchmarks."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final, Protocol

from ambidex.core.dtypes import DType
from ambidex.core.ids import KVPart
from ambidex.core.kv_dtypes import KVDTypes
from ambidex.core.model_spec import ModelSpec
from ambidex.core.units import MIB

TILE_TOKENS: Final = 16
"""A block in tile order holds a multiple of so many tokens: the rows of an AMX tile, the lanes of an AVX-512 vector."""
STREAM_BUFFERS: Final = 3
"""Pieces of the stream lane that are on their way or waiting to be attended. Two would do to copy one while another is
attended; a third lets the link go on while a layer's products run, when no piece is used up."""
STEP_BUFFERS: Final = 2
"""Layers of a decode step whose streamed blocks the accelerator holds: one is read while the other fills."""
STEP_MOST_SHARE: Final = 0.6
"""Of a context's blocks that decode steps stream at most: a link is seldom faster than the CPU's way to DRAM."""
SCAN_CODE_BYTES: Final = 2
"""Of a key that the accelerator scans over the link, for each query head."""
SCAN_BYTES: Final = 32 * MIB
"""Bytes of such codes, at most: with 32 heads those of 512K keys."""
STREAM_PIECE_BYTES: Final = 32 * MIB
"""Bytes of a piece in the compute format, if the context has them: 0.6 ms of a link of 55 GB/s. Each piece costs one
more merge of all queries' states, so larger ones are better; 8192 tokens of 8 heads of 128 16-bit numbers."""
SCORE_BUFFERS: Final = 2
"""Layers whose early scores the host holds: one is read while the next is computed."""
FIXED_SCORE_BYTES: Final = 32 * MIB
"""Bytes of early scores that a decode step of fixed form brings to the accelerator, if one context has no more: with 32
heads in 16-bit numbers those of 349K keys."""
NEAR_SLACK: Final = 64
"""Steps until the near rows on the accelerator are moved to the front of their buffer."""
TILE_DIMS: Final = 32
"""A row in tile order is padded to a multiple of so many numbers: the bf16 pairs of an AMX tile's row."""
INT4_GROUP: Final = 16
"""Numbers of an int4 row that share a step and a zero. Measured on K and V of a model: docs/kv_formats.md."""
SCALE_WORD_BYTES: Final = 4


class KVOrder(StrEnum):
    """How the numbers of a block stand in memory (docs/kv_layout.md)."""

    ROWS = "rows"
    TILES = "tiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """KV cache of one model on one tier: a block holds K and V of `block_size` consecutive tokens in all layers.

    `dtype` is the format of K, and of V unless `v_dtype` names another.

    Raises:
        ConfigError: K and V do not go together.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    block_size: int
    order: KVOrder = KVOrder.ROWS
    v_dtype: DType | None = None

    def __post_init__(self) -> None:
        if self.v_dtype is self.dtype:
            object.__setattr__(self, "v_dtype", None)  # one spec for one layout
        KVDTypes(self.dtype, self.v_dtype or self.dtype)  # they go together

    @classmethod
    def of(
        cls, model: ModelSpec, *, dtype: DType | KVDTypes, block_size: int, order: KVOrder = KVOrder.ROWS
    ) -> "KVSpec":
        """The KV cache of a model."""
        dtypes = dtype if isinstance(dtype, KVDTypes) else KVDTypes.both(dtype)
        return cls(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=dtypes.k,
            v_dtype=dtypes.v,
            block_size=block_size,
            order=order,
        )

    @property
    def dtypes(self) -> KVDTypes:
        """The formats of K and V."""
        return KVDTypes(self.dtype, self.v_dtype or self.dtype)

    @property
    def row_size(self) -> int:
        """Numbers of K or V of one token and head, padding included."""
        if self.order is KVOrder.ROWS:
            return self.head_dim
        return -(-self.head_dim // TILE_DIMS) * TILE_DIMS

    def row_bytes(self, part: KVPart) -> int:
        """Bytes of these numbers; scales are not among them."""
        return self.row_size * self.dtypes.of(part).num_bits // 8

    def stored_row_size(self, part: KVPart) -> int:
        """Elements that hold a row: numbers, of int4 bytes with two of them."""
        return self.row_bytes(part) if self.dtypes.of(part) is DType.INT4 else self.row_size

    def num_scale_words(self, part: KVPart) -> int:
        """Words of 4 bytes beside a row: its scale, and of int4 a step and a zero for each group of `INT4_GROUP`."""
        dtype = self.dtypes.of(part)
        if not dtype.has_scales:
            return 0
        return 1 + (self.row_size // (2 * INT4_GROUP) if dtype is DType.INT4 else 0)

    @property
    def bytes_per_token_layer(self) -> int:
        """Bytes of K and V of one token in one layer, scales included."""
        return sum(self.part_bytes_per_token_layer(part) for part in KVPart)

    def part_bytes_per_token_layer(self, part: KVPart) -> int:
        """Bytes of K or V of one token in one layer, scales included."""
        return self.num_kv_heads * (self.row_bytes(part) + SCALE_WORD_BYTES * self.num_scale_words(part))

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return self.bytes_per_token_layer * self.num_layers

    @property
    def bytes_per_block(self) -> int:
        """Bytes of K and V of one block in all layers."""
        return self.bytes_per_token * self.block_size

    def part_bytes_per_block(self, part: KVPart) -> int:
        """Bytes of the numbers of K, or of V, of one block in all layers; scales are not among them."""
        return self.num_layers * self.num_kv_heads * self.block_size * self.row_bytes(part)

    @property
    def scale_bytes_per_block(self) -> int:
        """Bytes of the scales of K and V of one block in all layers; 0 for floating formats."""
        return self.bytes_per_block - sum(self.part_bytes_per_block(part) for part in KVPart)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamBuffers:
    """What the stream lane holds on the accelerator: a ring of pieces as they lie in DRAM, and one piece as rows.

    A piece is K and V of `piece_blocks` blocks of one layer and request, all KV heads.
    """

    kv: KVSpec
    piece_blocks: int
    number_bytes: int
    """Bytes of a number of the rows that are attended."""
    step_blocks: int = 0
    """Blocks of one layer and all requests that a decode step holds, in each of STEP_BUFFERS buffers; of integers once
    more, as rows."""
    scan_blocks: int = 0
    """Blocks of one layer and all requests that a decode step scans over the link under the bounded policy."""
    num_q_heads: int = 0
    """Of each scanned key, so many heads have a code."""

    @classmethod
    def of(
        cls,
        kv: KVSpec,
        *,
        max_context_len: int,
        number_bytes: int,
        max_requests: int = 0,
        step_bytes: int = 0,
        num_q_heads: int = 0,
        most_share: float = STEP_MOST_SHARE,
    ) -> "StreamBuffers":
        """Buffers for contexts of at most `max_context_len` tokens over a pool of DRAM.

        Args:
            max_requests: of a decode step.
            step_bytes: that its buffers may take.
            num_q_heads: of a model whose decode steps scan keys over the link; 0: they do not.
            most_share: of a context's blocks that decode steps stream at most.
        """
        most_blocks = math.ceil(most_share * kv.num_blocks(max_context_len)) * max_requests
        row_bytes = 2 * kv.num_kv_heads * kv.head_dim * number_bytes * kv.block_size
        of_rows = row_bytes if kv.dtype.has_scales else 0
        fitting = step_bytes // (STEP_BUFFERS * kv.bytes_per_token_layer * kv.block_size + of_rows)
        return cls(
            kv=kv,
            piece_blocks=max(1, min(STREAM_PIECE_BYTES // row_bytes, kv.num_blocks(max_context_len))),
            number_bytes=number_bytes,
            step_blocks=min(most_blocks, fitting),
            scan_blocks=min(most_blocks, SCAN_BYTES // (SCAN_CODE_BYTES * num_q_heads * kv.block_size))
            if num_q_heads
            else 0,
            num_q_heads=num_q_heads,
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        tokens = self.piece_blocks * self.kv.block_size
        rows = 2 * self.kv.num_kv_heads * self.kv.head_dim * self.number_bytes
        step = STEP_BUFFERS * self.step_blocks * self.kv.block_size * self.kv.bytes_per_token_layer
        if self.kv.dtype.has_scales:
            step += self.step_blocks * self.kv.block_size * rows
        codes = self.scan_blocks * self.kv.block_size * self.num_q_heads * SCAN_CODE_BYTES
        return tokens * (STREAM_BUFFERS * self.kv.bytes_per_token_layer + rows) + step + codes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRows:
    """What a policy keeps of K and V beside their blocks: rows of each token in host memory; with `num_q_heads`, which
    is that of a policy that looks ahead, on the accelerator the `num_near` newest rows of each request, and scores of
    as many heads; and if the CPU makes these early, likewise in host memory."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    number_bytes: int
    """Of a number of the rows, and of a score on its way to the accelerator."""
    num_q_heads: int = 0
    num_near: int = 0
    is_scored: bool = True
    """The CPU makes early scores of far keys; else they are predicted on the accelerator alone."""
    is_fixed: bool = False
    """Decode steps have a fixed form, which holds the scores of all its requests at once."""
    leaves_scores: bool = False
    """These are the accelerator's own, of each query head, in fp32."""
    page_tokens: int = 0
    """It holds bounds of pages of so many tokens instead, of each query head, in fp32; 0: it does not."""

    @property
    def part_bytes_per_layer(self) -> int:
        """Bytes of K, or of V, of a token in one layer."""
        return self.num_kv_heads * self.head_dim * self.number_bytes

    @property
    def score_bytes(self) -> int:
        """Bytes of a token's early scores in host memory, in all buffers."""
        return SCORE_BUFFERS * self._score_row_bytes

    @property
    def _score_row_bytes(self) -> int:
        """Bytes of a token's early scores, as the CPU makes them."""
        return self.num_q_heads * self.number_bytes if self.is_scored else 0

    def gpu_bytes(self, num_requests: int, max_context_len: int) -> int:
        """Bytes on the accelerator: near rows of so many requests, and the scores of one, as they come from the CPU and
        in fp32; those of a step of fixed form besides."""
        if not self.num_q_heads:
            return 0
        near = num_near_rows(self.num_near) * 2 * self.num_layers * self.part_bytes_per_layer
        scores = max_context_len * (self._score_row_bytes + self.num_q_heads * DType.FP32.num_bytes)
        fixed = self.max_fixed_keys(num_requests, max_context_len) * self._fixed_key_bytes
        return num_requests * near + scores + fixed

    def max_fixed_keys(self, num_requests: int, max_context_len: int) -> int:
        """Far keys of all requests of a step of fixed form, at most; 0: there are no such steps."""
        if not self.is_fixed:
            return 0
        fitting = max(max_context_len, FIXED_SCORE_BYTES // self._fixed_key_bytes)
        return min(num_requests * max_context_len, fitting)

    @property
    def _fixed_key_bytes(self) -> int:
        """Bytes of a key in such steps: its scores, if the CPU makes them, and a number of 4 bytes of each KV head; or
        its scores of the accelerator, or its share of the bounds of its page."""
        if self.page_tokens:
            return -(-self.num_q_heads * DType.FP32.num_bytes // self.page_tokens)
        if self.leaves_scores:
            return self.num_q_heads * DType.FP32.num_bytes
        return self._score_row_bytes + self.num_kv_heads * DType.FP32.num_bytes


PREDICTOR_QUERIES: Final = 512
"""Of a prompt, at most, that a predictor is made of: with a group of 4, 2,048 vectors for 128 columns."""
_NUM_OPEN_PROMPTS: Final = 2
"""Prompts that are computed in part between two steps: a step begins no other one before the one that runs is whole,
unless that had to yield."""


class PolicyState(Protocol):
    """What a policy keeps on the accelerator beside K and V; `owner`: its name in the ledger; `what` it keeps of each
    token, for people."""

    owner: ClassVar[str]
    what: ClassVar[str]

    @property
    def bytes_per_token(self) -> int:
        """Of what grows with a request, all layers."""
        ...

    def fixed_bytes(self, num_requests: int, max_context_len: int) -> int:
        """What does not depend on how many tokens there are."""
        ...


SUM_COPIES: Final = 2
"""Of what keys have got: a step reads one and writes the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SumState:
    """What steps of fixed form keep of policies that add up what keys get: of each KV head a sum in fp32 and a byte
    that says whether the key is held."""

    owner: ClassVar[str] = "sums"
    what: ClassVar[str] = "sums of what keys get"
    num_layers: int
    num_kv_heads: int

    @property
    def bytes_per_token(self) -> int:
        """All layers."""
        return SUM_COPIES * self.num_layers * self.num_kv_heads * (DType.FP32.num_bytes + 1)

    def fixed_bytes(self, num_requests: int, max_context_len: int) -> int:
        """Nothing is kept that does not grow with a request."""
        del num_requests, max_context_len
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxState:
    """What steps of fixed form keep of policies that choose pages: of each full page and KV head the least and the
    largest number of each channel, in fp32, in the `num_layers` that choose."""

    owner: ClassVar[str] = "boxes"
    what: ClassVar[str] = "boxes of pages of keys"
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int

    @property
    def bytes_per_token(self) -> int:
        """All layers, rounded up."""
        page_bytes = self.num_layers * self.num_kv_heads * 2 * self.head_dim * DType.FP32.num_bytes
        return -(-page_bytes // self.page_tokens)

    def fixed_bytes(self, num_requests: int, max_context_len: int) -> int:
        """Nothing is kept that does not grow with a request."""
        del num_requests, max_context_len
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorState:
    """What a predictor of scores keeps on the accelerator, in fp32, in each of the `num_layers` that look ahead: some
    columns of K of each token, what turns queries into them, and while a prompt is computed some of its queries."""

    owner: ClassVar[str] = "predictor"
    what: ClassVar[str] = "columns of K"
    num_layers: int
    num_kv_heads: int
    num_q_heads: int
    head_dim: int
    num_columns: int

    @property
    def bytes_per_token(self) -> int:
        """Of partial keys, all layers."""
        return self.num_layers * self.num_kv_heads * self.num_columns * DType.FP32.num_bytes

    def fixed_bytes(self, num_requests: int, max_context_len: int) -> int:
        """What does not depend on how many tokens there are: turns of so many requests, queries of prompts, and K of
        one layer of the longest, from which partial keys are made."""
        turns = num_requests * self.num_layers * self.num_kv_heads * self.head_dim * self.num_columns
        num_queries = _NUM_OPEN_PROMPTS * min(PREDICTOR_QUERIES, max_context_len)
        queries = num_queries * self.num_layers * self.num_q_heads * self.head_dim
        keys = max_context_len * self.num_kv_heads * self.head_dim
        return (turns + queries + keys) * DType.FP32.num_bytes


def num_partial_columns(head_dim: int, percent: int) -> int:
    """Columns of K that a predictor keeps."""
    return max(1, head_dim * percent // 100)


def num_near_rows(num_near: int) -> int:
    """Rows of a buffer of near rows: those before a step's own, that one, and room for the steps to come; where there
    are none before it, nothing is ever moved, and nothing needs room."""
    return num_near + 1 + (NEAR_SLACK if num_near else 0)


def scan_bytes_per_block(spec: KVSpec) -> int:
    """Bytes that bounded attention keeps beside a block in tile order, all layers: two norms a head; and where K is not
    int8 an 8-bit copy of it with a scale a row, and K and V row after row."""
    row = 0
    if spec.dtype is not DType.INT8:
        row = spec.row_size * (DType.INT8.num_bytes + 2 * spec.dtype.num_bytes) + SCALE_WORD_BYTES
    return spec.num_layers * spec.num_kv_heads * (spec.block_size * row + 2 * DType.FP32.num_bytes)

"""What the processor does with DRAM: plain reads, products of weights by format and tokens, attention over keys."""

import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ambidex.calibrate.copies import thread_counts
from ambidex.calibrate.figures import Quantiles, measure_seconds
from ambidex.calibrate.memory_rate import native_read_rate
from ambidex.core.dtypes import DType
from ambidex.core.ids import KVPart
from ambidex.core.kv_spec import KVOrder, KVSpec
from ambidex.core.units import MIB
from ambidex.kernels.cpu.linear import LinearPool, Matrices
from ambidex.kernels.cpu.native import AttentionPool, KeyBatch, ThreadPool
from ambidex.kernels.cpu.quantized import BLOCKS, GROUP_ROWS, QuantizedMatrix, Weight, packed_bytes
from ambidex.kernels.linear import LinearContext, LinearOp

TORCH_DTYPES: Final = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8, "int4": torch.uint8,
}  # fmt: skip
PRODUCT_FORMATS: Final = ("fp32", "bf16", "fp16", *BLOCKS)
ATTENTION_FORMATS: Final = tuple(dtype.value for dtype in DType)
TOKENS: Final = (1, 4, 8, 16, 32, 64, 128)
"""Of a product: from a matrix-vector product to one whose operations take the time; beyond, time grows with tokens."""
WIDTH: Final = 4096
"""Columns and rows of the matrices: those of a model of 7 to 8 billion parameters."""
NUM_RUNS: Final = 3
PASS_S: Final = 0.05
"""Of a run through the matrices, which ends with the one that is multiplied then: where operations take the time a few
matrices say as much as all, and slow forms (16-bit weights that are widened first) would take minutes on few cores."""
KV_HEADS: Final = 8
GROUP: Final = 4
HEAD_DIM: Final = 128
BLOCK_SIZE: Final = 64
SMALL_CALLS: Final = 8
"""Native calls of a layer that compute little for a token: norms, rotation, storing, activation, residuals."""
NUM_SMALL: Final = 1000


def measure_reads(num_threads: int, buffer: Tensor) -> list[tuple[int, float]]:
    """Bytes/s of plain reads with 1, 2, 4, … and all threads.

    Args:
        buffer: [n] uint8, written before, larger than the caches.
    """
    return [(num, native_read_rate(ThreadPool(num), buffer).median) for num in thread_counts(num_threads)]


def measure_products(
    threads: ThreadPool, kind: str, buffer: Tensor, *, is_lane: bool = False
) -> list[tuple[int, float]]:
    """Bytes of weights/s of products as the engine computes them, by tokens.

    Args:
        kind: one of `PRODUCT_FORMATS`.
        buffer: [n] uint8, cut into as many matrices as it holds; numbers below 60, so that no scale is infinite.
        is_lane: the CPU works beside a GPU: then an engine finds out at start which form of a product is the faster one
            (`mlp/rates.py`), and so does this.
    """
    weights = cut_weights(kind, buffer)
    contexts = [LinearContext(threads)]
    if is_lane and kind not in BLOCKS:
        contexts += [LinearContext(threads, most_native_tokens=0) for _ in range(2)]
        contexts[-1].weight_first = True
    forms = [[LinearOp(context) for _ in weights] for context in contexts]
    points = []
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, _width(weights[0]))
        if is_lane:  # as an accelerator sends it
            x = x.to(TORCH_DTYPES.get(kind, torch.bfloat16)).float()
        rates = []
        for ops in forms:
            _pass_rate(ops, weights, x)  # the first call lays out what a native product needs
            rates.append(Quantiles.of([_pass_rate(ops, weights, x) for _ in range(NUM_RUNS)]).median)
        points.append((num_tokens, max(rates)))
    return points


def _pass_rate(ops: Sequence[LinearOp], weights: Sequence[Weight], x: Tensor) -> float:
    """Bytes of weights/s of one run through the matrices, or as many of them as `PASS_S` allows."""
    start = time.perf_counter()
    num_bytes, seconds = 0, 0.0
    for op, weight in zip(ops, weights, strict=True):
        op(x, [weight], [None])
        num_bytes += _num_bytes(weight)
        seconds = time.perf_counter() - start
        if seconds > PASS_S:
            break
    return num_bytes / seconds


def cut_weights(kind: str, buffer: Tensor) -> list[Weight]:
    """Matrices of WIDTH columns and rows (fewer if the buffer is smaller) that lie in a buffer."""
    rows = WIDTH
    while rows > GROUP_ROWS and _matrix_bytes(kind, rows) > buffer.numel():
        rows //= 2
    size = _matrix_bytes(kind, rows)
    pieces = [buffer[start : start + size] for start in range(0, buffer.numel() - size + 1, size)]
    if kind in BLOCKS:
        return [QuantizedMatrix(kind, (rows, WIDTH), piece.view(rows // GROUP_ROWS, -1)) for piece in pieces]
    return [piece.view(TORCH_DTYPES[kind]).view(rows, WIDTH) for piece in pieces]


def measure_attention(threads: ThreadPool, kind: str, buffer: Tensor) -> float:
    """Bytes/s of keys and values that decode attention reads: one request, groups of 4 queries, in tile order.

    Args:
        kind: one of `ATTENTION_FORMATS`.
        buffer: [n] uint8, of which one layer's keys and values are made.
    """
    dtype = TORCH_DTYPES[kind]
    row = KVSpec(num_layers=1, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=DType(kind), block_size=BLOCK_SIZE,
                 order=KVOrder.TILES)  # fmt: skip
    block_bytes = 2 * row.part_bytes_per_block(KVPart.K)
    num_blocks = max(1, buffer.numel() // block_bytes)
    part = num_blocks * block_bytes // 2
    k, v = (
        buffer[idx * part : (idx + 1) * part].view(dtype).view(KV_HEADS, num_blocks, BLOCK_SIZE, -1) for idx in range(2)
    )
    scales = None
    if num_words := row.num_scale_words(KVPart.K):
        words = (num_words,) if dtype == torch.uint8 else ()
        scales = torch.full((*k.shape[:2], *words, BLOCK_SIZE), 0.01)  # of int4 steps and zeros are some bytes, too
    keys = num_blocks * BLOCK_SIZE
    batch = KeyBatch(
        torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)), torch.tensor([0, num_blocks]),
        torch.zeros(1, dtype=torch.int64), torch.tensor([keys]), torch.tensor([0, 1]), block_size=BLOCK_SIZE,
    )  # fmt: skip
    q = torch.randn((1, KV_HEADS * GROUP, HEAD_DIM)).to(dtype if dtype.is_floating_point else torch.float32)
    pool = AttentionPool(threads)

    def run() -> None:
        pool.attend_blocks(q, k, v, batch, scale=HEAD_DIM**-0.5, k_scales=scales, v_scales=scales)

    num_bytes = 2 * part + (0 if scales is None else 2 * scales.nbytes)
    return Quantiles.of([num_bytes / s for s in measure_seconds(run, num_warmups=1, num_runs=NUM_RUNS)]).median


def measure_layer(threads: ThreadPool) -> float:
    """Seconds of what a layer computes beside products and attention, for a token: its native calls, nearly empty."""
    pool, matrices, x = LinearPool(threads), Matrices([torch.zeros(16, 16)], [None]), torch.zeros(1, 16)

    def run() -> None:
        for _ in range(NUM_SMALL):
            pool.multiply(matrices, x)

    return SMALL_CALLS * min(measure_seconds(run, num_warmups=1, num_runs=NUM_RUNS)) / NUM_SMALL


def make_buffer(num_bytes: int) -> Tensor:
    """Memory to read, [n] uint8, whose bytes are finite numbers in every format."""
    whole = max(MIB, num_bytes // MIB * MIB)
    some = torch.randint(0, 0x3C, (min(whole, 16 * MIB),), dtype=torch.uint8)
    return some.repeat(-(-whole // some.numel()))[:whole].contiguous()


def _matrix_bytes(kind: str, rows: int) -> int:
    return packed_bytes(kind, (rows, WIDTH)) if kind in BLOCKS else rows * WIDTH * TORCH_DTYPES[kind].itemsize


def _num_bytes(weight: Weight) -> int:
    return weight.data.nbytes if isinstance(weight, QuantizedMatrix) else weight.nbytes


def _width(weight: Weight) -> int:
    return weight.shape[1]

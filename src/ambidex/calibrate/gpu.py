"""What a GPU and the link to it do: products, attention, small kernels of a captured step, copies, handovers."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from ambidex.calibrate.copies import copy_rate
from ambidex.calibrate.figures import Quantiles, measure_seconds
from ambidex.core.units import MIB
from ambidex.kernels import api
from ambidex.kernels.cpu.linear import LinearPool, Matrices
from ambidex.kernels.cpu.native import ThreadPool

TORCH_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOKENS: Final = (1, 8, 64, 512, 4096)
WIDTH: Final = 8192
PRODUCT_BYTES: Final = 1024 * MIB
"""Of weights that are read in turn: many times a GPU's cache."""
COPY_BYTES: Final = 256 * MIB
NUM_RUNS: Final = 5
NODES_OF_LAYER: Final = 8
"""Small kernels of a layer in a captured step: two norms, rotation and storing, activation, merges of attention."""
NUM_LAYERS: Final = 64
SMALL_WIDTH: Final = 8192
"""Numbers of a token's hidden state that cross the link in a handover."""
CONTEXT: Final = 32768
REQUESTS: Final = 4
KV_HEADS: Final = 8
GROUP: Final = 4
HEAD_DIM: Final = 128
BLOCK_SIZE: Final = 64


def measure_products(device: torch.device, kind: str) -> list[tuple[int, float]]:
    """Bytes of weights/s of products, by tokens.

    Args:
        kind: `fp32`, `bf16` or `fp16`.
    """
    dtype = TORCH_DTYPES[kind]
    num = max(1, PRODUCT_BYTES // (WIDTH * WIDTH * dtype.itemsize))
    weights = [torch.randn(WIDTH, WIDTH, device=device).to(dtype) for _ in range(num)]
    points = []
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, WIDTH, device=device).to(dtype)

        def run(x: Tensor = x) -> None:
            for weight in weights:
                torch.nn.functional.linear(x, weight)

        seconds = _device_seconds(device, run)
        points.append((num_tokens, sum(weight.nbytes for weight in weights) / seconds))
    return points


def measure_attention(device: torch.device, kind: str) -> float:
    """Bytes/s of keys and values that decode attention reads with the engine's own op."""
    dtype, blocks = TORCH_DTYPES[kind], CONTEXT // BLOCK_SIZE
    shape = (KV_HEADS, REQUESTS * blocks, BLOCK_SIZE, HEAD_DIM)
    k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    q = torch.randn(REQUESTS, KV_HEADS * GROUP, HEAD_DIM, device=device).to(dtype)
    table = torch.arange(REQUESTS * blocks, dtype=torch.int32, device=device).view(REQUESTS, blocks)
    first = torch.zeros(REQUESTS, dtype=torch.int32, device=device)
    num_keys = torch.full_like(first, CONTEXT)
    seconds = _device_seconds(device, lambda: api.attend_paged(q, k, v, table, first, num_keys, scale=HEAD_DIM**-0.5))
    return (k.nbytes + v.nbytes) / seconds


def measure_layer(device: torch.device) -> float:
    """Seconds of a layer's small kernels inside a captured step."""
    x = torch.zeros(SMALL_WIDTH, device=device)

    def launch() -> None:
        for _ in range(NUM_LAYERS * NODES_OF_LAYER):
            x.add_(1.0)

    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
    with torch.cuda.stream(stream):
        launch()  # a first call may allocate, which a capture must not
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    return _device_seconds(device, graph.replay) / NUM_LAYERS


def measure_copies(device: torch.device) -> tuple[float, float]:
    """Bytes/s of large pinned copies, to the GPU and from it."""
    to_gpu, from_gpu = (
        copy_rate(device, memory="pinned", way=way, num_bytes=COPY_BYTES).median for way in ("to_gpu", "from_gpu")
    )
    return to_gpu, from_gpu


def measure_beside(device: torch.device, threads: ThreadPool, buffer: Tensor) -> float:
    """Bytes/s that DRAM gives in all while all threads read it and copies to the GPU run.

    Args:
        buffer: [n] uint8, larger than the caches.
    """
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True).fill_(1)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    samples = []
    for _ in range(NUM_RUNS):
        ends = []
        for _ in range(2 + 2 * buffer.numel() // COPY_BYTES):
            target.copy_(source, non_blocking=True)
            ends.append(torch.cuda.current_stream(device).record_event())
        num_before = sum(end.query() for end in ends)
        (seconds,) = measure_seconds(lambda: threads.read(buffer), num_warmups=0, num_runs=1)
        copied = COPY_BYTES * (sum(end.query() for end in ends) - num_before)
        samples.append((buffer.numel() + copied) / seconds)
        torch.cuda.synchronize(device)
    return Quantiles.of(samples[1:]).median


def measure_handover(device: torch.device, threads: ThreadPool) -> float:
    """Seconds from the GPU to the CPU and back: a token's hidden state, a native call, its answer."""
    on_gpu = torch.zeros(SMALL_WIDTH, device=device)
    there, back = (torch.zeros(SMALL_WIDTH, pin_memory=True) for _ in range(2))
    pool, matrices, x = LinearPool(threads), Matrices([torch.zeros(16, 16)], [None]), torch.zeros(1, 16)

    def run() -> None:
        there.copy_(on_gpu, non_blocking=True)
        torch.cuda.current_stream(device).synchronize()
        pool.multiply(matrices, x)
        on_gpu.copy_(back, non_blocking=True)
        torch.cuda.current_stream(device).synchronize()

    return Quantiles.of(measure_seconds(run, num_warmups=20, num_runs=200)).median


def _device_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Median seconds of a call by the device's clock."""
    samples = []
    for idx in range(NUM_RUNS + 2):
        torch.cuda.synchronize(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # torch has no types here
        start.record()
        run()
        end.record()
        end.synchronize()
        if idx >= 2:  # the first choose algorithms and fill caches
            samples.append(start.elapsed_time(end) / 1e3)
    return Quantiles.of(samples).median

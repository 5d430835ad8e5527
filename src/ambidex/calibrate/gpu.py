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
from ambidex.kernels.cpu.quantized import GROUP_ROWS, QuantizedMatrix, Weight, packed_bytes
from ambidex.kernels.linear import LinearContext, LinearOp

TORCH_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOKENS: Final = (1, 8, 16, 32, 64, 128, 512, 4096)
MANY_TOKENS: Final = 512
"""From so many tokens on a quarter of the weights is enough: operations take the time."""
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
    """Bytes of weights/s of products, by tokens: of few in a captured step, as decode is, of many launched one by one.

    Args:
        kind: `fp32`, `bf16`, `fp16`, or a quantised format that the GPU multiplies as it is stored, with a bf16 x.
    """
    dtype = TORCH_DTYPES.get(kind, torch.bfloat16)
    weights = make_weights(device, kind, num_bytes=PRODUCT_BYTES, width=WIDTH)
    op = LinearOp(LinearContext())
    points = []
    for num_tokens in TOKENS:
        some = weights if num_tokens < MANY_TOKENS else weights[: max(1, len(weights) // 4)]
        x = torch.randn(num_tokens, WIDTH, device=device).to(dtype)

        def run(x: Tensor = x, some: list[Weight] = some) -> None:
            for weight in some:
                op(x, [weight], [None])

        num_bytes = sum(weight.data.nbytes for weight in some)
        seconds = _device_seconds(device, run if num_tokens >= MANY_TOKENS else _capture(device, run))
        points.append((num_tokens, num_bytes / seconds))
    return points


def make_weights(device: torch.device, kind: str, *, num_bytes: int, width: int) -> list[Weight]:
    """Square matrices of about so many bytes together, with finite random numbers."""
    if kind in TORCH_DTYPES:
        dtype = TORCH_DTYPES[kind]
        num = max(1, num_bytes // (width * width * dtype.itemsize))
        return [torch.randn(width, width, device=device).to(dtype) for _ in range(num)]
    size = packed_bytes(kind, (width, width))
    return [
        QuantizedMatrix(
            kind,
            (width, width),
            torch.randint(0, 0x3C, (size,), dtype=torch.uint8, device=device).view(width // GROUP_ROWS, -1),
        )
        for _ in range(max(1, num_bytes // size))
    ]


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

    return _device_seconds(device, _capture(device, launch)) / NUM_LAYERS


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


def _capture(device: torch.device, launch: Callable[[], object]) -> Callable[[], object]:
    """What replays a call as a graph, whose launches cost the host nothing."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types here
    with torch.cuda.stream(stream):
        launch()  # a first call may allocate or compile, which a capture must not
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    return graph.replay


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

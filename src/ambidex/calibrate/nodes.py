"""What each NUMA node's memory gives: plain reads by all threads, the latency of one read, copies to a GPU."""

import ctypes
import mmap
import platform
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from ambidex.calibrate.figures import Quantiles, measure_seconds
from ambidex.calibrate.memory_rate import native_read_rate
from ambidex.core.errors import TierFullError
from ambidex.core.units import MIB
from ambidex.kernels.cpu.native import ThreadPool
from ambidex.storage.huge_pages import advise_huge_pages
from ambidex.storage.numa_calls import NUMA_CALLS, NumaCalls
from ambidex.storage.pinned import register_pinned
from ambidex.storage.placed_memory import PlacedMemory

LINE_BYTES: Final = 64
"""Of a cache line: each step of the chase goes to another one."""
NUM_STEPS: Final = 200_000
"""Of the chase: 20 ms at 100 ns."""
MOST_BYTES: Final = 1024 * MIB
LEAST_BYTES: Final = 16 * MIB
NUM_RUNS: Final = 5
_CHASE: Final = bytes.fromhex("488b3f 48ffce 75f8 4889f8 c3")
"""x86-64: `1: mov rdi, [rdi]; dec rsi; jnz 1b; mov rax, rdi; ret`. Each read needs the one before, which neither Python
nor a tensor library can be made to do without time of its own for each."""


def measure_node(
    node_id: int,
    threads: ThreadPool,
    num_bytes: int,
    *,
    device: torch.device | None,
    calls: NumaCalls = NUMA_CALLS,
) -> dict[str, Any]:
    """Rates of one node, as JSON has them; or under `refusal` why they could not be measured.

    Args:
        threads: those that read, wherever they run.
        num_bytes: of the buffer on the node, larger than the caches.
        device: a GPU that copies from there; None: there is none.
    Cost: takes `num_bytes` of the node.
    """
    try:
        memory = PlacedMemory(num_bytes, calls)
    except TierFullError as error:
        return {"refusal": str(error)}
    buffer = torch.frombuffer(memory.buffer, dtype=torch.uint8, count=num_bytes)
    advise_huge_pages(buffer)
    refusal = memory.place(0, num_bytes, [node_id])
    if refusal is not None:
        return {"refusal": refusal}
    buffer.fill_(1)
    return {
        "read_bytes_per_s": native_read_rate(threads, buffer, num_runs=NUM_RUNS).median,
        "latency_s": measure_latency(memory),
        "to_gpu_bytes_per_s": None if device is None else _copy_rate(buffer, device),
    }


def measure_latency(memory: PlacedMemory) -> float | None:
    """Seconds of a read that nothing predicts, by following pointers through memory; None: not on this processor.

    Overwrites the memory. Cost: 0.1 s and more, by the memory's size.
    """
    chase = _load_chase()
    if chase is None:
        return None
    words = np.frombuffer(memory.buffer, dtype=np.uint64)
    per_line = LINE_BYTES // words.itemsize
    order = np.random.default_rng(0).permutation(len(words) // per_line).astype(np.uint64)
    words[order * per_line] = np.uint64(memory.address) + np.roll(order, -1) * np.uint64(LINE_BYTES)  # one ring
    first = memory.address + int(order[0]) * LINE_BYTES
    samples = []
    for _ in range(NUM_RUNS):
        start = time.perf_counter()
        first = chase(first, NUM_STEPS)  # goes on where it was: what it saw is in no cache
        samples.append((time.perf_counter() - start) / NUM_STEPS)
    return Quantiles.of(samples).median


def _load_chase() -> Callable[[int, int], int] | None:
    """A function that follows pointers: (address, steps) → address. None: another processor, or the system lets no
    program bring code of its own."""
    if platform.machine() != "x86_64":
        return None
    try:
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return None
    code.write(_CHASE)
    function = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)(
        ctypes.addressof(ctypes.c_char.from_buffer(code))
    )

    def chase(address: int, num_steps: int) -> int:
        _ = code  # the function's memory
        return int(function(address, num_steps))

    return chase


def _copy_rate(buffer: torch.Tensor, device: torch.device) -> float | None:
    """Bytes/s of copies to a GPU by its copy engine; None: the driver does not pin the memory."""
    owner = _Owner()
    if register_pinned(buffer, owner) is not None:
        return None
    target = torch.empty(buffer.numel(), dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(buffer, non_blocking=True)
        torch.cuda.synchronize(device)

    return Quantiles.of([buffer.nbytes / s for s in measure_seconds(copy, num_warmups=1, num_runs=NUM_RUNS)]).median


class _Owner:
    """Pinned memory is unpinned when it dies."""

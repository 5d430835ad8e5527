"""What each NUMA node's memory gives: plain reads by all threads, the latency of one read, copies to a GPU."""

import time
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

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
    """Seconds of a read that nothing predicts, of one number after another each of which says where the next one is;
    None: this numpy does not read them so. Some 2 ns of it are the loop's.

    Overwrites the memory. Cost: 0.1 s and more, by the memory's size.
    """
    words = np.frombuffer(memory.buffer, dtype=np.intp)
    ring = make_ring(words)
    trail = np.zeros(NUM_STEPS + 1, dtype=np.intp)
    trail[0] = ring[0]
    samples = []
    for run in range(NUM_RUNS):
        start = time.perf_counter()
        follow(words, trail)
        samples.append((time.perf_counter() - start) / NUM_STEPS)
        if run == 0 and not np.array_equal(trail, np.resize(ring, len(trail))):
            return None
        trail[0] = trail[-1]  # goes on where it was: what it saw is in no cache
    return Quantiles.of(samples).median


def make_ring(words: NDArray[np.intp]) -> NDArray[np.intp]:
    """Have one number of each cache line hold the place of that of another, so that all are one ring.

    Returns:
        Their places, [n] as they follow each other.
    """
    per_line = LINE_BYTES // words.itemsize
    ring = np.random.default_rng(0).permutation(len(words) // per_line).astype(np.intp) * per_line
    words[ring] = np.roll(ring, -1)
    return ring


def follow(words: NDArray[np.intp], trail: NDArray[np.intp]) -> None:
    """Fill `trail` behind its first number: words[trail[0]], words of that, and so on.

    What one read gives is the index of the next: numpy takes index after index in a loop without Python, and where it
    clips it neither copies them first nor checks them. That it reads what it has just written is not promised: whoever
    asks looks at the trail.
    """
    words.take(trail[:-1], out=trail[1:], mode="clip")


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

"""How fast memory is read: of DRAM by native threads or by torch, of a GPU by torch."""

import torch

from ambidex.calibrate.figures import Quantiles, measure_seconds
from ambidex.core.errors import MachineError
from ambidex.core.units import format_size
from ambidex.hw.memory import read_memory
from ambidex.hw.topology import last_level_cache_bytes
from ambidex.kernels.cpu.native import ThreadPool

GPU_PROBE_BYTES = 4 * 2**30
"""Of the buffer that is read to measure a GPU's bandwidth: many times its last-level cache."""
LEAST_GPU_PROBE_BYTES = 256 * 2**20
"""The same where little is free: twice the largest last-level cache of a GPU so far."""


def read_bandwidth(*, num_threads: int, num_bytes: int, num_runs: int = 7) -> Quantiles:
    """Bytes/s at which `num_threads` threads read a buffer that no cache holds (torch's sum over fp32).

    Cost: allocates and touches `num_bytes`; changes torch's thread count for this process.
    """
    torch.set_num_threads(num_threads)
    buffer = torch.ones(num_bytes // 4, dtype=torch.float32)
    seconds = measure_seconds(buffer.sum, num_warmups=2, num_runs=num_runs)
    return Quantiles.of([buffer.nbytes / s for s in seconds])


def probe_bytes() -> int:
    """Size of the buffer for `read_bandwidth`: 16 times the last-level cache, within 256 MiB … 4 GiB and a quarter of
    the free memory."""
    wanted = min(max(16 * last_level_cache_bytes(), 256 * 2**20), 4 * 2**30)
    return min(wanted, read_memory().usable_bytes // 4)


def native_read_rate(threads: ThreadPool, buffer: torch.Tensor, *, num_runs: int = 7) -> Quantiles:
    """Bytes/s at which native threads read a buffer, which should be larger than the caches.

    Args:
        buffer: [n] uint8 in CPU memory, written before.
    """
    seconds = measure_seconds(lambda: threads.read(buffer), num_warmups=1, num_runs=num_runs)
    return Quantiles.of([buffer.nbytes / s for s in seconds])


def gpu_read_rate(device: torch.device, *, num_bytes: int = GPU_PROBE_BYTES, num_runs: int = 10) -> Quantiles:
    """Bytes/s at which a GPU reads a buffer (torch's sum over fp32), by CUDA events.

    Raises:
        MachineError: too little GPU memory is free for a buffer that no cache holds.
    Cost: allocates `num_bytes`, at most half of what is free, and gives it back.
    """
    free, _ = torch.cuda.mem_get_info(device)
    size = min(num_bytes, free // 2)
    if size < LEAST_GPU_PROBE_BYTES:
        raise MachineError(
            f"{format_size(free)} of GPU memory are free, {format_size(2 * LEAST_GPU_PROBE_BYTES)} are needed to "
            f"measure its read rate: stop other programs, or lower --gpu-memory"
        )
    buffer = torch.ones(size // 4, dtype=torch.float32, device=device)
    samples = []
    for run_idx in range(num_runs + 2):
        torch.cuda.synchronize(device)
        start = torch.cuda.current_stream(device).record_event(_new_event())
        buffer.sum()
        end = torch.cuda.current_stream(device).record_event(_new_event())
        end.synchronize()
        if run_idx >= 2:
            samples.append(buffer.nbytes / (start.elapsed_time(end) / 1e3))
    del buffer
    torch.cuda.empty_cache()
    return Quantiles.of(samples)


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here

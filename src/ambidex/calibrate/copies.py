"""How fast copies between host and GPU memory are."""

from collections.abc import Sequence
from typing import Final

import torch

from ambidex.calibrate.figures import Quantiles, measure_seconds

NUM_COPIES: Final = 20


def thread_counts(most: int) -> Sequence[int]:
    """1, 2, 4, … below `most`, and `most`."""
    powers = [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent < most]
    return [*powers, most]


def copy_rate(device: torch.device, *, memory: str, way: str, num_bytes: int) -> Quantiles:
    """Bytes/s of copies between a GPU and host memory; see `copy_seconds`."""
    return Quantiles.of([num_bytes / s for s in copy_seconds(device, memory=memory, way=way, num_bytes=num_bytes)])


def copy_seconds(device: torch.device, *, memory: str, way: str, num_bytes: int) -> list[float]:
    """Wall seconds of each of `NUM_COPIES` copies, from the call to the end of the copy, after two not counted.

    Args:
        memory: `pinned` or `pageable` memory of the host.
        way: `to_gpu` or `from_gpu`.
    """
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=memory == "pinned").fill_(1)
    on_gpu = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target, source = (on_gpu, host) if way == "to_gpu" else (host, on_gpu)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)

    copy()
    return measure_seconds(copy, num_warmups=1, num_runs=NUM_COPIES)

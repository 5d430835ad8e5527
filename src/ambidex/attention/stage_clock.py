"""`StageClock`: how long a policy's stages take in a step, for feedback."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ambidex.core.selection import StageTimes


class StageClock:
    """Seconds of scoring and of transfer in one step.

    Args:
        is_on: False: nothing is measured, and nothing waits.
        device: on CUDA each stage is waited for, at its begin and its end.
    """

    def __init__(self, device: torch.device, *, is_on: bool) -> None:
        self._device = device
        self._is_on = is_on
        self._seconds = {"scores": 0.0, "transfer": 0.0}

    def begin(self) -> None:
        """Start anew with a step."""
        self._seconds = dict.fromkeys(self._seconds, 0.0)

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Book a block's time on `scores` or `transfer`."""
        if not self._is_on:
            yield
            return
        start = self._now()
        yield
        self._seconds[stage] += self._now() - start

    def times(self, total_s: float) -> StageTimes | None:
        """The step's stages: what is neither scores nor transfer of `total_s` seconds is the accelerator's. None: there
        was neither."""
        cpu_s, transfer_s = self._seconds["scores"], self._seconds["transfer"]
        if cpu_s + transfer_s == 0:
            return None
        return StageTimes(gpu_s=max(0.0, total_s - cpu_s - transfer_s), cpu_s=cpu_s, transfer_s=transfer_s)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

"""How much memory this process takes at most, to be held against what the ledger promised."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ambidex.core.ids import Tier
from ambidex.core.ledger import MemoryLedger
from ambidex.hw.memory import kib_to_bytes, read_fields

_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes above what the process held before the engine was built; None where the kernel or the GPU does not say.

    `host_peak` is resident memory at its largest since the engine is ready, without pages of files: those are mapped
    weights and libraries (CUDA's are loaded when a kernel is first needed), which the system may take back. `gpu_peak`
    is what torch reserved on the GPU. The predictions are what the ledger holds for the tiers that
    lie there: both tiers on the host where the accelerator is the CPU.
    """

    host_peak: int | None
    host_predicted: int
    gpu_peak: int | None
    gpu_predicted: int | None

    def record(self) -> dict[str, int | None]:
        """For a JSON record."""
        return {
            "host_peak_bytes": self.host_peak,
            "host_predicted_bytes": self.host_predicted,
            "gpu_peak_bytes": self.gpu_peak,
            "gpu_predicted_bytes": self.gpu_predicted,
        }

    def words(self) -> str:
        """For people: what was taken at most, over what the ledger promised."""
        pairs = {"host": (self.host_peak, self.host_predicted), "GPU": (self.gpu_peak, self.gpu_predicted)}
        return "memory: " + "; ".join(
            f"{place} {peak / 2**30:.2f} GiB at most, {predicted / 2**30:.2f} in the ledger ({peak / predicted:.3f})"
            for place, (peak, predicted) in pairs.items()
            if peak is not None and predicted
        )


class MemoryWatch:
    """Made before the engine is built; told when it is ready.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._before = own_bytes("VmRSS")
        self._can_reset = False
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def engine_is_ready(self) -> None:
        """From now on the peak counts."""
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (man 5 proc)
        except OSError:  # some containers forbid it: then there is no honest peak to give
            return
        self._can_reset = True

    def read(self, ledger: MemoryLedger) -> MemoryUse:
        """What was taken so far."""
        is_cuda = self._device.type == "cuda"
        peak = own_bytes("VmHWM") if self._can_reset else None
        known = peak is not None and self._before is not None
        gpu, dram = ledger.used(Tier.GPU), ledger.used(Tier.DRAM) + ledger.used(Tier.CXL)
        return MemoryUse(
            host_peak=max(0, (peak or 0) - (self._before or 0)) if known else None,
            host_predicted=dram if is_cuda else gpu + dram,
            gpu_peak=torch.cuda.max_memory_reserved(self._device) if is_cuda else None,
            gpu_predicted=gpu if is_cuda else None,
        )


def resident_bytes(field: str) -> int | None:
    """`VmRSS` (now) or `VmHWM` (at most so far) of this process."""
    value = read_fields(_STATUS).get(field)
    return None if value is None else kib_to_bytes(value)


def own_bytes(field: str) -> int | None:
    """`resident_bytes` without pages of files."""
    values = read_fields(_STATUS)
    if field not in values or "RssFile" not in values:
        return None
    return max(0, kib_to_bytes(values[field]) - kib_to_bytes(values["RssFile"]))

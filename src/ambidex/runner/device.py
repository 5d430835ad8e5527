"""Which accelerator computes, in which number format, and what it has."""

from dataclasses import dataclass

import torch

from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError

TORCH_DTYPES = {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDescription:
    """A CUDA device as the driver describes it; memory in bytes."""

    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: str


def choose_device(kind: DeviceKind) -> torch.device:
    """The accelerator for a setting.

    Raises:
        ConfigError: CUDA is asked for and not there.
    """
    has_cuda = torch.cuda.is_available()
    if kind is DeviceKind.CUDA and not has_cuda:
        raise ConfigError("--device is cuda, but torch sees no CUDA device: run `ambidex doctor`, or use --device cpu")
    if kind is DeviceKind.CPU or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(
    choice: DTypeChoice, *, checkpoint: DType, device: torch.device, cpu_multiplies_bf16: bool
) -> tuple[DType, str]:
    """The format to compute in, and the reason.

    `auto` on a CPU is fp32 unless the CPU multiplies bf16 in hardware: elsewhere bf16 is slower than fp32.
    """
    if choice is not DTypeChoice.AUTO:
        return DType(choice.value), "asked for"
    half = checkpoint if checkpoint is not DType.FP32 else DType.BF16
    if device.type == "cuda":
        return half, "16 bits on a GPU"
    if cpu_multiplies_bf16:
        return DType.BF16, "the CPU multiplies bf16"
    return DType.FP32, "the CPU does not multiply bf16"


def describe_gpus() -> list[GpuDescription]:
    """The CUDA devices; empty without a GPU."""
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            GpuDescription(
                name=properties.name,
                total_bytes=total,
                free_bytes=free,
                compute_capability=f"{properties.major}.{properties.minor}",
            )
        )
    return found

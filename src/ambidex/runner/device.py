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
        raise ConfigError("`device` is cuda, but torch sees no CUDA device: run `ambidex doctor`, or use `device` cpu")
    if kind is DeviceKind.CPU or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(
    choice: DTypeChoice, *, checkpoint: DType, is_quantized: bool, device: torch.device, has_native: bool
) -> tuple[DType, str]:
    """The format in which matrices and KV are stored, and the reason.

    Args:
        checkpoint: the format of the model's files; is_quantized: whether matrices have fewer bits there.
        has_native: whether the compiled module is there: without it 16-bit weights are slower than fp32 on a CPU.
    """
    if choice is not DTypeChoice.AUTO:
        return DType(choice.value), "asked for"
    if device.type == "cuda":
        return checkpoint if checkpoint is not DType.FP32 else DType.BF16, "16 bits on a GPU"
    if not has_native:
        return DType.FP32, "there is no compiled module to multiply 16-bit weights"
    if is_quantized:
        return DType.FP16, "finer than the quantized weights, and half the bytes of fp32"
    return checkpoint, "the checkpoint's: exact"


def keeps_quantized(choice: DTypeChoice, *, is_quantized: bool, device: torch.device, has_native: bool) -> bool:
    """Whether quantised matrices are multiplied as they are stored, as far as their types have a native product.

    They are a fraction of 16-bit ones, and reading them is what takes the time of a decode step on a CPU.
    """
    return choice is DTypeChoice.AUTO and is_quantized and device.type == "cpu" and has_native


def activation_dtype(dtype: DType, device: torch.device) -> DType:
    """The format of vectors and of what flows between layers, for matrices and KV stored as `dtype`.

    A CPU computes in fp32: it widens 16-bit numbers as it reads them, and reading is what takes the time.
    """
    return dtype if device.type == "cuda" else DType.FP32


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

"""In which formats numbers are stored and computed."""

import pytest
import torch

from ambidex.core.config import DTypeChoice
from ambidex.core.dtypes import DType
from ambidex.runner.device import activation_dtype, choose_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def choose(
    checkpoint: DType,
    device: torch.device,
    *,
    choice: DTypeChoice = DTypeChoice.AUTO,
    is_quantized: bool = False,
    has_native: bool = True,
) -> DType:
    dtype, why = choose_dtype(
        choice, checkpoint=checkpoint, is_quantized=is_quantized, device=device, has_native=has_native
    )
    assert why
    return dtype


@pytest.mark.parametrize("checkpoint", list(DType))
def test_choose_dtype_on_a_cpu_keeps_the_checkpoints(checkpoint: DType) -> None:
    assert choose(checkpoint, CPU) is checkpoint


def test_choose_dtype_of_quantized_weights_on_a_cpu_is_fp16() -> None:
    assert choose(DType.BF16, CPU, is_quantized=True) is DType.FP16


def test_choose_dtype_on_a_cpu_without_the_compiled_module_is_fp32() -> None:
    assert choose(DType.BF16, CPU, has_native=False) is DType.FP32


@pytest.mark.parametrize(
    ("checkpoint", "expected"), [(DType.FP32, DType.BF16), (DType.BF16, DType.BF16), (DType.FP16, DType.FP16)]
)
def test_choose_dtype_on_a_gpu_has_16_bits(checkpoint: DType, expected: DType) -> None:
    assert choose(checkpoint, CUDA) is expected


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_choose_dtype_asked_for_is_taken(device: torch.device) -> None:
    assert choose(DType.BF16, device, choice=DTypeChoice.FP32, is_quantized=True) is DType.FP32


@pytest.mark.parametrize("dtype", list(DType))
def test_activation_dtype_is_fp32_on_a_cpu_and_the_stored_one_on_a_gpu(dtype: DType) -> None:
    assert activation_dtype(dtype, CPU) is DType.FP32
    assert activation_dtype(dtype, CUDA) is dtype

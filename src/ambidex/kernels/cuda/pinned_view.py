"""Pinned host memory as a tensor of the GPU, which reads and writes it over the link without a copy.

The driver maps pinned memory at the same address for the host and for the GPU (unified addressing), so kernels may use
it as it is. torch takes such an address through the CUDA array interface. Loads and stores of whole 128-byte lines run
at the speed of the link; the GPU keeps nothing of it.
"""

from typing import Any

import torch
from torch import Tensor

from ambidex.core.errors import MachineError

_TYPE_CODES = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8"}  # the interface has no bf16: any type of that size


def view_on_gpu(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of the current GPU; the host's tensor must outlive it.

    Args:
        tensor: contiguous, in pinned host memory.
    Raises:
        MachineError: the driver has no unified addressing.
        RuntimeError: torch's, if the memory is not pinned.
    """
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
    view = torch.as_tensor(_Interface(tensor), device="cuda").view(tensor.dtype)
    if view.data_ptr() != tensor.data_ptr():
        raise MachineError("the GPU sees pinned memory at another address than the host: no unified addressing")
    return view


class _Interface:
    """What torch reads an address from: the CUDA array interface, version 3, of Numba's documentation."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(tensor.shape),
            "typestr": _TYPE_CODES[tensor.element_size()],
            "data": (tensor.data_ptr(), False),
            "version": 3,
            "strides": None,
        }

"""Registering host memory with the CUDA driver, so that the copy engine reaches it at full speed.

A buffer of exact size is registered after the fact; torch's own pinned allocator would round sizes up to a power of 2.
"""

import weakref
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

_PAGE_BYTES: Final = 4096
_NO_MEMORY: Final = "CUDA error: out of memory", "DefaultCPUAllocator: can't allocate memory"
_MAPPED: Final = 2  # cudaHostRegisterMapped: kernels on the GPU may follow the address, too


def register_pinned(tensor: Tensor, owner: object) -> str | None:
    """Pin the host memory of `tensor` until `owner` dies; returns why that cannot be, or None.

    Cost: touches every page of the tensor.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return None
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    touch_pages(tensor)
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types here
    error = cudart.cudaHostRegister(tensor.data_ptr(), num_bytes, _MAPPED)
    if int(error) != 0:
        _forget_error()
        return f"the driver says {cudart.cudaGetErrorString(error)} (limit: ulimit -l)"
    weakref.finalize(owner, cudart.cudaHostUnregister, tensor.data_ptr())
    return None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether torch says by this error that there is no memory, of the device, pinned or not; any other is a fault.

    The host's memory has no type of its own there, but words. Source: PyTorch, c10/core/impl/alloc_cpu.cpp, and for
    pinned memory cudaErrorMemoryAllocation as c10/cuda/CUDAException.cpp words it.
    """
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _NO_MEMORY)


def touch_pages(tensor: Tensor) -> None:
    """Let the system find memory for every page of a contiguous tensor, by all threads of torch; numbers stay what they
    are. The driver, which needs the pages too, would ask for one after the other in a single thread."""
    with torch.inference_mode():
        tensor.view(-1).view(torch.uint8)[::_PAGE_BYTES].add_(0)


def _forget_error() -> None:
    """Let a throw-away kernel report the driver's last error, which would otherwise fail the next one that matters."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")

"""Registering host memory with the CUDA driver, so that the copy engine reaches it at full speed.

A buffer of exact size is registered after the fact; torch's own pinned allocator would round sizes up to a power of 2.
"""

import logging
import weakref
from contextlib import suppress
from typing import Final

import torch
from torch import Tensor

from ambidex.core.units import format_size

logger = logging.getLogger(__name__)

_MAPPED: Final = 2  # cudaHostRegisterMapped: kernels on the GPU may follow the address, too


def register_pinned(tensor: Tensor, owner: object) -> bool:
    """Pin the host memory of `tensor` until `owner` dies; says whether it worked, with a warning if not.

    Cost: touches every page of the tensor.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes == 0:
        return True
    if not torch.cuda.is_available():
        logger.warning("%s of host memory stay pageable: there is no CUDA device", format_size(num_bytes))
        return False
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no types here
    error = cudart.cudaHostRegister(tensor.data_ptr(), num_bytes, _MAPPED)
    if int(error) != 0:
        logger.warning(
            "%s of host memory stay pageable, copies are slower: the driver says %s (limit: ulimit -l)",
            format_size(num_bytes), cudart.cudaGetErrorString(error),
        )  # fmt: skip
        _forget_error()
        return False
    weakref.finalize(owner, cudart.cudaHostUnregister, tensor.data_ptr())
    return True


def _forget_error() -> None:
    """Let a throw-away kernel report the driver's last error, which would otherwise fail the next one that matters."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")

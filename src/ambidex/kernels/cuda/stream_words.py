"""Words in pinned host memory that a CUDA stream of copies writes and waits for (streams that compute, and captured
graphs above all, have kernels for that: `kernels/triton/words.py`).

The driver's stream memory operations do that without a kernel or a callback. torch has no door to them, so they are
called in the driver's library itself. Source: CUDA Driver API, "Stream Memory Operations".
"""

import ctypes
from functools import cache
from typing import Final

import torch
from torch import Tensor

from ambidex.core.errors import MachineError

_WAIT_UNTIL_AT_LEAST: Final = 0  # CU_STREAM_WAIT_VALUE_GEQ, compared as a signed difference
_WRITE_AFTER_ALL_BEFORE: Final = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: behind a fence for the whole system


def write_word(word: Tensor, value: int, stream: int | None = None) -> None:
    """Let a stream write `value` when all it was given before is done and visible to the host.

    Args:
        word: one int32 in pinned host memory.
        stream: its handle; None: the current one, which takes longer to find than the call itself.
    Raises:
        MachineError: the driver refuses.
    """
    _call("cuStreamWriteValue32_v2", word, value, _WRITE_AFTER_ALL_BEFORE, stream)


def wait_word(word: Tensor, value: int, stream: int | None = None) -> None:
    """Let a stream wait until the word is at least `value`.

    NOTE: nothing ends the wait but the word: who starts such a stream sees to it that the word comes.

    Args:
        word: one int32 in pinned host memory.
        stream: see `write_word`.
    Raises:
        MachineError: the driver refuses.
    """
    _call("cuStreamWaitValue32_v2", word, value, _WAIT_UNTIL_AT_LEAST, stream)


def _call(function: str, word: Tensor, value: int, flags: int, stream: int | None) -> None:
    if stream is None:
        stream = torch.cuda.current_stream().cuda_stream
    error = getattr(driver(), function)(
        ctypes.c_void_p(stream), ctypes.c_uint64(word.data_ptr()), ctypes.c_uint32(value), ctypes.c_uint(flags)
    )
    if error != 0:
        raise MachineError(
            f"{function} failed with CUDA driver error {error}: stream memory operations are not to be had"
        )


@cache
def driver() -> ctypes.CDLL:
    """The driver's library.

    Raises:
        MachineError: it cannot be loaded.
    """
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MachineError(f"the CUDA driver's library libcuda.so.1 cannot be loaded: {error}") from error

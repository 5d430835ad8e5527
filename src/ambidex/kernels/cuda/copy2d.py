"""Copies of rows with gaps between them, between pinned host memory and the GPU, by the copy engine in one call.

torch copies what is contiguous on both sides; rows with gaps it would gather in pageable memory first. The driver's
two-dimensional copy takes them as they are. Source: CUDA Driver API, cuMemcpy2DAsync.
"""

import ctypes
from typing import Final

from torch import Tensor

from ambidex.core.errors import CopyError, ShapeError
from ambidex.kernels.cuda.stream_words import driver

_HOST: Final = 1  # CU_MEMORYTYPE_HOST
_DEVICE: Final = 2  # CU_MEMORYTYPE_DEVICE
_LARGEST_PITCH: Final = 2**31 - 1
"""Bytes from row to row that the driver takes; rows further apart are copied one by one."""


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [  # as ctypes has it
        ("src_x", ctypes.c_size_t), ("src_y", ctypes.c_size_t), ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p), ("src_device", ctypes.c_uint64), ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t), ("dst_y", ctypes.c_size_t), ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p), ("dst_device", ctypes.c_uint64), ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    ]  # fmt: skip


class RunCopies:
    """Copies of runs, indices of the second axis one behind the other, from one tensor to another. What is the same for
    all of them is worked out once: a step launches dozens.

    Args:
        source: [H, N, …] in pinned host memory or on the GPU, each source[h] contiguous.
        to: [H, M, …] on the other side, likewise, of the same dtype.
    Raises:
        ShapeError: they differ in more than N and M, one is not contiguous, or both lie on one side.
    """

    def __init__(self, source: Tensor, to: Tensor) -> None:
        if (
            (source.shape[0], source.shape[2:], source.dtype) != (to.shape[0], to.shape[2:], to.dtype)
            or not source[0].is_contiguous()
            or not to[0].is_contiguous()
        ):
            raise ShapeError(
                f"copies of runs: expected contiguous tensors that differ in their second axis, got {source.dtype} "
                f"{tuple(source.shape)} and {to.dtype} {tuple(to.shape)}"
            )
        if source.is_cuda == to.is_cuda:
            raise ShapeError(f"copies of runs: expected one side on the GPU, got {source.device} and {to.device}")
        size = source.element_size()
        self._source, self._to = source.data_ptr(), to.data_ptr()
        self._pitches = source.stride(0) * size, to.stride(0) * size
        self._item_bytes = source.stride(1) * size
        self._height = len(source)
        self._kept = source, to  # the addresses are theirs
        self._is_up = to.is_cuda
        self._copy = _Copy2D(src_type=_HOST if self._is_up else _DEVICE, dst_type=_DEVICE if self._is_up else _HOST)
        self._copy_ref = ctypes.byref(self._copy)

    def launch(self, stream: ctypes.c_void_p, *, first: int, place: int, num: int) -> None:
        """Bring source[:, first : first + num] to to[:, place : place + num]; within both, which nobody checks.

        Args:
            stream: the CUDA stream's handle.
        Raises:
            CopyError: the driver refuses.
        """
        source, to = self._source + first * self._item_bytes, self._to + place * self._item_bytes
        width = num * self._item_bytes
        if max(self._pitches) <= _LARGEST_PITCH:
            self._send(stream, source, to, width, self._pitches, self._height)
            return
        for row in range(self._height):
            places = source + row * self._pitches[0], to + row * self._pitches[1]
            self._send(stream, *places, width, (width, width), 1)

    def _send(
        self, stream: ctypes.c_void_p, source: int, to: int, width: int, pitches: tuple[int, int], height: int
    ) -> None:
        copy = self._copy
        if self._is_up:
            copy.src_host, copy.dst_device = source, to
        else:
            copy.src_device, copy.dst_host = source, to
        copy.src_pitch, copy.dst_pitch = pitches
        copy.width, copy.height = width, height
        error = driver().cuMemcpy2DAsync_v2(self._copy_ref, stream)
        if error != 0:
            raise CopyError(f"cuMemcpy2DAsync of {height} rows of {width} bytes failed with CUDA driver error {error}")

"""Copies of rows with a gap between them, from pinned host memory to the GPU, by the copy engine in one call.

torch copies what is contiguous on both sides; rows with gaps it would gather in pageable memory first. The driver's
two-dimensional copy takes them as they are. Source: CUDA Driver API, cuMemcpy2DAsync.
"""

import ctypes
from typing import Final

import torch
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


def copy_rows(source: Tensor, to: Tensor) -> None:
    """Launch on the current stream: bring rows to the GPU as they are.

    Args:
        source: [H, ...] in pinned host memory, each source[h] contiguous; to: the same shape and dtype on the GPU.
    Raises:
        ShapeError: shapes or dtypes differ, or a row is not contiguous.
        CopyError: the driver refuses.
    """
    if (
        source.shape != to.shape
        or source.dtype != to.dtype
        or not source[0].is_contiguous()
        or not to[0].is_contiguous()
    ):
        raise ShapeError(
            f"copy_rows: expected rows of one shape and dtype, got {source.dtype} {tuple(source.shape)} and {to.dtype} "
            f"{tuple(to.shape)}"
        )
    size, width = source.element_size(), source[0].nbytes
    pitches = source.stride(0) * size, to.stride(0) * size
    if max(pitches) > _LARGEST_PITCH:
        for row, target in zip(source, to, strict=True):
            _copy(row.data_ptr(), width, target.data_ptr(), width, width, 1)
    else:
        _copy(source.data_ptr(), pitches[0], to.data_ptr(), pitches[1], width, len(source))


def _copy(source: int, source_pitch: int, to: int, to_pitch: int, width: int, height: int) -> None:
    copy = _Copy2D(
        src_type=_HOST, src_host=source, src_pitch=source_pitch, dst_type=_DEVICE, dst_device=to, dst_pitch=to_pitch,
        width=width, height=height,
    )  # fmt: skip
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    error = driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), stream)
    if error != 0:
        raise CopyError(f"cuMemcpy2DAsync of {height} rows of {width} bytes failed with CUDA driver error {error}")

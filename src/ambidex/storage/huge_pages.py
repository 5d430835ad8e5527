"""Asking the system to back large host memory with huge pages, before it is touched: fewer address translations when
threads and the GPU read blocks that lie far apart."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Final

from torch import Tensor

_SETTING: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_ADVISE_HUGE: Final = 14  # MADV_HUGEPAGE
_HUGE_PAGE: Final = 2 * 2**20
_PAGE: Final = 4096


def advise_huge_pages(tensor: Tensor, *, setting: Path = _SETTING) -> str | None:
    """Ask for huge pages for the host memory of `tensor`; returns why the system gives none, or None.

    It is advice: the system gives huge pages as far as it has them. Memory smaller than one is left as it is.

    Args:
        setting: the file in which Linux says whether it gives huge pages at all.
    Cost: none; pages come when they are touched.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes < _HUGE_PAGE:
        return None
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} has no such advice"
    if setting.is_file() and "[never]" in setting.read_text():
        return f"{setting} says never: write madvise there"
    start = -(-tensor.data_ptr() // _PAGE) * _PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    length = (tensor.data_ptr() + num_bytes - start) // _PAGE * _PAGE
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _ADVISE_HUGE) != 0:
        return f"the system refuses: {os.strerror(ctypes.get_errno())}"
    return None

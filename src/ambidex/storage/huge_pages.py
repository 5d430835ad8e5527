"""Asking the system to back large host memory with huge pages, before it is touched: fewer address translations when
threads and the GPU read blocks that lie far apart."""

import ctypes
import logging
import sys
from typing import Final

from torch import Tensor

from ambidex.core.units import format_size

logger = logging.getLogger(__name__)

_ADVISE_HUGE: Final = 14  # MADV_HUGEPAGE
_HUGE_PAGE: Final = 2 * 2**20
_PAGE: Final = 4096


def advise_huge_pages(tensor: Tensor) -> bool:
    """Ask for huge pages for the host memory of `tensor`; says whether the system took the advice.

    It is advice: the system gives huge pages as far as it has them. Memory smaller than one is left as it is.

    Cost: none; pages come when they are touched.
    """
    num_bytes = tensor.numel() * tensor.element_size()
    if num_bytes < _HUGE_PAGE:
        return True
    if not sys.platform.startswith("linux"):
        return False
    start = -(-tensor.data_ptr() // _PAGE) * _PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    length = (tensor.data_ptr() + num_bytes - start) // _PAGE * _PAGE
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _ADVISE_HUGE) != 0:
        logger.warning(
            "%s of host memory have small pages, random reads are slower: the system refuses huge ones (error %d)",
            format_size(num_bytes), ctypes.get_errno(),
        )  # fmt: skip
        return False
    return True

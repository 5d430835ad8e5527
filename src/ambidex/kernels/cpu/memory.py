"""Where native ops put their results: new memory, or that of the program which the thread records."""

import threading
from collections.abc import Sequence
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt


class Memory(Protocol):
    """Gives out arrays whose memory stays in place."""

    def new_array(self, shape: Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        """An array with any content; its memory is given out again once nothing refers to it."""
        ...

    def keep(self, owner: object) -> None:
        """Keep what owns memory that a recorded op reads, for as long as the op may run again."""
        ...


class _Current(threading.local):
    memory: Memory | None = None


_current = _Current()


def is_recording() -> bool:
    """Whether this thread records a program."""
    return _current.memory is not None


def use_memory(memory: Memory | None) -> None:
    """Take this thread's results from `memory`; None: from numpy."""
    _current.memory = memory


def keep(owner: object) -> None:
    """Tell the recording of this thread, if any, what owns memory that an op reads besides the step's tensors."""
    if _current.memory is not None:
        _current.memory.keep(owner)


def new_int64(shape: Sequence[int]) -> npt.NDArray[np.int64]:
    """An int64 array with any content."""
    if _current.memory is None:
        return np.empty(shape, np.int64)
    return cast("npt.NDArray[np.int64]", _current.memory.new_array(shape, np.int64))


def new_fp32(shape: Sequence[int]) -> npt.NDArray[np.float32]:
    """An fp32 array with any content.

    Cost: numpy's empty and torch's from_numpy take a third of the time of torch's empty and numpy().
    """
    if _current.memory is None:
        return np.empty(shape, np.float32)
    return cast("npt.NDArray[np.float32]", _current.memory.new_array(shape, np.float32))

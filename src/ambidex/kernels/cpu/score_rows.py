"""Scores of queries over keys that lie row after row in host memory: one native call for all requests of a step.

A product of 16-bit matrices by torch costs many times what the memory gives, and its threads sleep between calls.
"""

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu.native import ThreadPool, array_of, check_loaded, number_of

with suppress(ImportError):  # `native` says so when the module is used
    from ambidex import _native


class KeyRows:
    """Keys of one request in one layer, as the op takes them; to make it once spares each call the looking.

    Args:
        keys: [Hkv, capacity, D] in CPU memory, contiguous; fp32, bf16 or fp16. Rows that are not scored may hold
            anything.
    Raises:
        ShapeError: it is not contiguous, or of other numbers.
    """

    __slots__ = ("array", "number")

    def __init__(self, keys: Tensor) -> None:
        self.array: npt.NDArray[np.generic] = array_of(keys)
        self.number = number_of(keys)


class ScorePool:
    """The threads, and what queries are laid out in.

    Args:
        threads: who computes; calls with the same threads run one after the other.
    Raises:
        NativeModuleError: the compiled module is missing or does not load.
    """

    def __init__(self, threads: ThreadPool) -> None:
        check_loaded()
        self._native = _native.ScorePool(threads.native)

    def score_rows(
        self,
        q: Tensor,
        keys: Sequence[KeyRows],
        num_keys: Sequence[int],
        scores: Tensor,
        *,
        scale: float,
        isa: str | None = None,
    ) -> None:
        """scale · q·k of each request's query with the first keys of its own, each head's group with its KV head.

        Products and sums are fp32; scores are rounded once, to the numbers of `scores`.

        Args:
            q: [B, Hq, D] in CPU memory, contiguous; fp32, bf16 or fp16.
            keys: of each request, in one number format.
            num_keys: how many of each are scored, at most its capacity; 0 is none.
            scores: [n] contiguous; fp32, bf16 or fp16; [Hkv, Hq / Hkv, num_keys] of request after request are written.
            isa: one of `native.available_isas()`, for tests; None for the fastest.
        Raises:
            ShapeError: the tensors do not fit each other.
        Cost: reads the rows that are scored once, with all threads, in their order; the GIL is released.
        """
        if not keys:
            return
        if any(part.number != keys[0].number for part in keys):
            raise ShapeError(f"score_rows: keys of {', '.join(sorted({part.number for part in keys}))}: one is expected")
        try:
            self._native.score_rows(
                array_of(q), number_of(q), [part.array for part in keys], list(num_keys), keys[0].number, scale,
                array_of(scores), number_of(scores), isa=isa,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise ShapeError(f"score_rows: {error}") from error

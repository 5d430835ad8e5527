"""Scores of queries over keys that lie row after row in host memory: one native call for all requests of a step, made
by the caller or by a native thread that waits for the queries.

A product of 16-bit matrices by torch costs many times what the memory gives, and its threads sleep between calls.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

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
        self.native = _native.ScorePool(threads.native)

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
        try:
            self.native.score_rows(*_arguments(q, keys, num_keys, scores, scale), isa=isa)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"score_rows: {error}") from error


@dataclass(frozen=True, slots=True)
class Scored:
    """How a question of a `ScoreThread` ended: whether its queries came in time, and from when to when it was scored,
    in seconds of `time.perf_counter`."""

    is_answered: bool
    begin_s: float
    end_s: float


class ScoreThread:
    """A native thread that scores, one question after the other. It waits without the interpreter's lock, which who
    asks holds most of the time. Dropped, it ends behind the answer to its last question.

    Args:
        pool: who scores.
        limit_s: how long the queries of a question are waited for.
        spin_s: how long the thread looks for the next question before it sleeps; to wake it takes 50 µs.
    """

    def __init__(self, pool: ScorePool, *, limit_s: float, spin_s: float = 200e-6) -> None:
        self._native = _native.ScoreThread(pool.native, limit_s, spin_s)

    def ask(
        self,
        q: Tensor,
        keys: Sequence[KeyRows],
        num_keys: Sequence[int],
        scores: Tensor,
        *,
        scale: float,
        word: npt.NDArray[np.int32] | None,
    ) -> int:
        """Ask for scores; see `ScorePool.score_rows`.

        Args:
            keys: at least one request's. All that is named must be there, and stay as it is, until the answer.
            word: [1], 0 until the queries are there and 1 from then on; None: they are there.
        Returns:
            The question's number.
        Raises:
            ShapeError: the tensors do not fit each other.
        """
        try:
            return self._native.ask(*_arguments(q, keys, num_keys, scores, scale), word)
        except (TypeError, ValueError) as error:
            raise ShapeError(f"score_rows: {error}") from error

    def wait(self, number: int) -> Scored:
        """Wait for the answer to a question, which can be had once.

        Raises:
            ValueError: there is no such question, or its answer has been had.
        Cost: the GIL is released; the first millisecond of a wait is spun.
        """
        return Scored(*self._native.wait(number))


def _arguments(
    q: Tensor, keys: Sequence[KeyRows], num_keys: Sequence[int], scores: Tensor, scale: float
) -> tuple[
    npt.NDArray[np.generic], str, list[npt.NDArray[np.generic]], list[int], str, float, npt.NDArray[np.generic], str
]:
    number = keys[0].number
    if any(part.number != number for part in keys):
        raise ShapeError(f"score_rows: keys of {', '.join(sorted({part.number for part in keys}))}: one is expected")
    return (
        array_of(q), number_of(q), [part.array for part in keys], list(num_keys), number, scale, array_of(scores),
        number_of(scores),
    )  # fmt: skip

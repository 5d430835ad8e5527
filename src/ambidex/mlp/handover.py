"""`WeightHandover`: how a step that the accelerator runs on its own gets the CPU's part of products, place after place.

    accelerator    x ────────▶ pinned   asked[i] = 1       … its own rows and chunks …      wait for answered[i]   join
    CPU                                 wait for asked[i]  multiply in DRAM   answered[i] = 1

The same buffers serve every place: the accelerator sends the next x only after it has read the last answer. Words are
those of `attention/handover.py`, which may stand between two places of the same step.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from ambidex.core.errors import LaneError, UnrecordableError
from ambidex.kernels.cpu.native import WORD_STRIDE
from ambidex.kernels.cpu.recorded import Arena, Program, Recording
from ambidex.kernels.cuda.pinned_view import view_on_gpu
from ambidex.mlp.host_lane import Answer, HostSide
from ambidex.mlp.split_site import HostPlace
from ambidex.storage.lane_clock import LaneClock
from ambidex.storage.words import WAIT_LIMIT_S, HostWords, KernelWords, StepFence, TimedWords, Words, naming

logger = logging.getLogger(__name__)

_POLLS_PER_YIELD: Final = 100
"""About 10 µs: as long as a meeting takes; then other Python threads may run."""
_SPIN_S: Final = 0.005
"""Behind which a wait is a long one, as in a first step, whose launch compiles kernels and needs Python for that."""
_LONG_POLL_S: Final = 50e-6


class WeightHandover:
    """Buffers and words for steps of B rows.

    Args:
        places: those where the CPU has rows, in the order of use.
        num_rows: B.
        dtype: of x.
        device: the accelerator; with CUDA the buffers are pinned.
        arena: memory of recorded products, if they are to be recorded: one native call a place; None: they are not.
        clock: is told how long both sides work; None: nobody is.
    """

    def __init__(
        self,
        places: Sequence[HostPlace],
        num_rows: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        arena: Arena | None,
        clock: LaneClock | None = None,
    ) -> None:
        self._clock = clock
        is_cuda = device.type == "cuda"
        self._names = [str(place) for place in places]
        sides = [place.side for place in places]
        self._sides = tuple(sides)
        self._places = {side: place for place, side in enumerate(sides)}
        self._words: Words = KernelWords() if is_cuda else HostWords()
        if clock is not None:
            self._words = TimedWords(self._words, clock)
        shapes = [(num_rows, side.shape.num_in) for side in sides]
        answers = [(num_rows, side.answer_width) for side in sides]
        x = torch.empty(max(map(math.prod, shapes)), dtype=dtype, pin_memory=is_cuda)
        answer = torch.empty(max(map(math.prod, answers)), dtype=torch.float32, pin_memory=is_cuda)
        # The same memory as the accelerator sees it: its kernels read and write it over the link, without copies.
        x_there, answer_there = (view_on_gpu(buffer) if is_cuda else buffer for buffer in (x, answer))
        self._x, self._x_there = _views(x, shapes), _views(x_there, shapes)
        self._answer, self._answer_there = _views(answer, answers), _views(answer_there, answers)
        # [asked or answered, places, words of a cache line]
        self._flags = torch.zeros(2, len(sides), WORD_STRIDE, dtype=torch.int32, pin_memory=is_cuda)
        self._host_flags = self._flags.numpy()  # the same memory
        self._fence = StepFence(is_cuda=is_cuda)
        self._arena = arena
        self._programs: list[Program | None] = [None] * len(sides)

    def begin(self, side: HostSide, x: Tensor) -> Callable[[], Answer]:
        """Launch: bring x [B, K] to the CPU.

        Returns:
            What launches the wait for the answer, which is read over the link, and valid until the next place's.
        """
        place = self._places[side]
        torch.add(x, 0, out=self._x_there[place])  # a kernel; copy_ would be a job for the copy engine, which is slower
        self._words.write(self._flags[0, place, :1])
        return lambda: self._receive(place)

    def reset(self) -> None:
        """Make ready for a step.

        Raises:
            LaneError: the accelerator has not come to the end of the last step in time.
        """
        self._fence.wait(WAIT_LIMIT_S, self.describe)
        self._host_flags[:] = 0

    def describe(self) -> str:
        """How far the words of the last step are, for people."""
        asked, answered = (int((flags != 0).sum()) for flags in self._host_flags[:, :, 0])
        next_one = f"; next: {self._names[answered]}" if answered < len(self._names) else ""
        return f"of {len(self._names)} products with weights in DRAM {asked} were asked, {answered} answered{next_one}"

    def mark_launched(self) -> None:
        """Say that a whole step has been launched."""
        self._fence.mark()

    def answer(self, place: int) -> None:
        """Do the CPU's part of a place of a step, in the calling thread, within `torch.inference_mode`.

        Raises:
            LaneError: x did not come in time.
        """
        self._wait(place)
        start = time.perf_counter()
        program = self._programs[place]
        if program is not None:
            program.run()
        elif self._arena is not None and self._sides[place].is_recordable:
            self._programs[place] = self._record(place, self._arena)
        else:
            self._compute(place)
        self._host_flags[1, place, 0] = 1
        if self._clock is not None:
            self._clock.add_cpu(time.perf_counter() - start)

    def release(self) -> None:
        """End all waits of both sides: a step that cannot be answered runs out; what it gives is worthless."""
        self._host_flags[:, :, 0] = 1

    def _receive(self, place: int) -> Answer:
        with naming(f"the CPU lane, weights in DRAM, {self._names[place]}"):
            self._words.wait(self._flags[1, place, :1])
        return self._sides[place].rows, self._answer_there[place]

    def _wait(self, place: int) -> None:
        word = self._host_flags[0, place]
        start = time.monotonic()
        while True:
            for _ in range(_POLLS_PER_YIELD):
                if word[0]:
                    return
            waited = time.monotonic() - start
            if waited > WAIT_LIMIT_S:
                raise LaneError(
                    f"the accelerator sent no input of {self._names[place]} to the CPU lane within {WAIT_LIMIT_S:.0f} s"
                )
            time.sleep(0 if waited < _SPIN_S else _LONG_POLL_S)

    def _compute(self, place: int) -> None:
        self._answer[place].copy_(self._sides[place].compute(self._x[place].float()))

    def _record(self, place: int, arena: Arena) -> Program | None:
        """Compute a place and record it; None if that cannot be, and then it is computed as it is from now on."""
        recording = Recording(arena)
        try:
            with recording:
                self._compute(place)
        except UnrecordableError as error:
            logger.warning("the CPU's part of products is not recorded: %s", error)
            self._arena = None
            self._compute(place)
            return None
        recording.program.keep(self._sides[place], self._x[place], self._answer[place])
        return recording.program


def _views(buffer: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    return [buffer[: math.prod(shape)].view(shape) for shape in shapes]

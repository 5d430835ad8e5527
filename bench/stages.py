"""`Stages`: what a benchmark is doing, and for how long, on stderr; one that hangs shows the stacks of all threads."""

import faulthandler
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from harness import significant

STAGE_S: Final = 45.0
"""After which a stage is thought to hang: the stacks of all threads are printed then, and again as often."""


class Stages:
    """Times stages, which may stand within each other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By name; those of stages of the same name are summed up."""
        self._depth = 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Say that a stage begins, and at its end what it took."""
        print(f"{'  ' * self._depth}   {name} ...", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(STAGE_S, repeat=True)  # in place of the last one
        self._depth += 1
        start = time.perf_counter()
        try:
            yield
        finally:
            self._depth -= 1
            seconds = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            if self._depth:
                faulthandler.dump_traceback_later(STAGE_S, repeat=True)
            else:
                faulthandler.cancel_dump_traceback_later()
            print(f"{'  ' * self._depth}   {name}: {seconds:.2f} s", file=sys.stderr, flush=True)

    def timed_capture(self, capture: Callable[[], Any]) -> Callable[[], Any]:
        """The same maker of captures, each of which is a stage."""

        def make() -> Callable[[Callable[[], None]], Callable[[], None]]:
            inner = capture()

            def timed(body: Callable[[], None]) -> Callable[[], None]:
                with self.stage("capture"):
                    replay: Callable[[], None] = inner(body)
                return replay

            return timed

        return make

    def record(self) -> dict[str, float]:
        """For a JSON record."""
        return {name: significant(seconds, 3) for name, seconds in self.seconds.items()}


class KernelWatch:
    """Counts the Triton kernels that are compiled from now on, or read from Triton's cache, and their seconds."""

    def __init__(self) -> None:
        from triton import knobs  # where there is no GPU nobody needs it

        self.num_compiled = self.num_cached = 0
        self.seconds = 0.0
        knobs.compilation.listener = self._note

    def _note(self, *, cache_hit: bool, times: Any, **_: object) -> None:
        self.num_compiled += not cache_hit
        self.num_cached += cache_hit
        self.seconds += times.total / 1e6

    def words(self) -> str:
        """For people."""
        return (
            f"Triton: {self.num_compiled} kernels compiled, {self.num_cached} found in its cache, {self.seconds:.1f} s"
        )

    def record(self) -> dict[str, float]:
        """For a JSON record."""
        return {
            "compiled": self.num_compiled, "from_cache": self.num_cached, "seconds": significant(self.seconds, 3),
        }  # fmt: skip

"""`beside`: one lane's part of a step in a thread of its own, while the caller launches the other's."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def beside(
    work: Callable[[], None], *, release: Callable[[], None], mark_launched: Callable[[], None]
) -> Iterator[None]:
    """Run `work` in a thread of its own, and wait for its end behind the block.

    Args:
        release: ends the waits of `work` if the block breaks off.
        mark_launched: called when the block has ended, however it did.
    Raises:
        What `work` raises, unless the block did.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # handed to the caller, below
            failures.append(error)

    thread = threading.Thread(target=run, name="ambidex-cpu-lane")
    try:
        thread.start()
        yield
    except BaseException:
        release()  # what was not launched will never ask: the lane need not wait for it
        raise
    finally:
        mark_launched()
        if thread.ident is not None:
            thread.join()
    if failures:
        raise failures[0]

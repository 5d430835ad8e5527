"""A worker's process, forked from one that has imported all that workers need and computed nothing: where an engine
takes two seconds, importing torch takes five."""

import faulthandler
import multiprocessing
import os
import signal
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

_FORKED: Final = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(["ambidex.compare.worker"])
TELL_PLACE: Final = signal.SIGUSR1
"""Has a worker say on its output where it is, whatever it waits for."""


def start_worker(part_file: Path, results: Path, output: Path) -> BaseProcess:
    """Begin to measure the part in a file; results and all that is printed are appended to the other two.

    The process ends when this one does, unless that is killed.
    """
    process = _FORKED.Process(target=_work, args=(str(part_file), str(results), str(output)), daemon=True)
    process.start()
    return process


def _work(part_file: str, results_file: str, output_file: str) -> None:
    if not Path(part_file).exists():  # whoever asked has ended while this process was made
        return
    with Path(output_file).open("ab") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    faulthandler.enable()
    faulthandler.register(TELL_PLACE, all_threads=False)
    from ambidex.compare.worker import measure_file  # torch and all else: there already

    measure_file(part_file, results_file)

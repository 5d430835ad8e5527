"""The engine's process with a model that stands still, so that a test knows what its requests have and have not got.

python tests/held_worker.py NUM_REQUESTS SOCKET PARENT: once `NUM_STEPS` steps have given a token to each of so many
requests at once, the next step never ends. The process goes on answering messages.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import pytest
from torch import Tensor

from ambidex import AsyncLLM, EngineConfig
from ambidex.attention.tiered import TieredAttention
from ambidex.core.config import Graphs
from ambidex.engine.compose import build_engine
from ambidex.models.base import CausalLM
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import call_model
from ambidex.server.worker import client, main

NUM_STEPS: Final = 6


@contextmanager
def held_worker(num_requests: int) -> Iterator[None]:
    """Engines' processes that are started inside are such ones."""

    def spawn(descriptor: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, __file__, str(num_requests), str(descriptor), str(os.getpid())],
            stdin=subprocess.DEVNULL, pass_fds=(descriptor,), start_new_session=True,
        )  # fmt: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_spawn", spawn)
        yield


def make_held(num_requests: int) -> Callable[..., AsyncLLM]:
    """Stands in for `AsyncLLM`."""
    num_steps = 0

    def forward(model: CausalLM, batch: InputBatch, attention: TieredAttention) -> Tensor:
        nonlocal num_steps
        if num_steps == NUM_STEPS:
            threading.Event().wait()
        num_steps += len(batch.sampled_ids) == num_requests
        return call_model(model, batch, attention)

    def make(config: EngineConfig, *, progress: Callable[[int, int], None]) -> AsyncLLM:
        config = replace(config, graphs=Graphs.OFF)  # a recorded step calls no model
        return AsyncLLM(build_engine(config, progress=progress, forward=forward))

    return make


if __name__ == "__main__":
    main.AsyncLLM = make_held(int(sys.argv.pop(1)))  # type: ignore[misc,assignment]
    sys.exit(main.main())

"""What the fault tests share: a few prompts, their answers, running an engine to its end, and a few faults."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import pytest
from torch import Tensor

from ambidex import SamplingParams
from ambidex.core.config import DeviceKind
from ambidex.core.errors import LaneError
from ambidex.engine.engine import Engine
from ambidex.engine.outputs import RequestOutput
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.decode import DecodeForm
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import call_model
from ambidex.storage.words import HostWords

Form = tuple[DeviceKind, DecodeForm]

ON_CPU: Final[Form] = (DeviceKind.CPU, DecodeForm.FIXED)
CAPTURED_ON_CPU: Final[Form] = (DeviceKind.CPU, DecodeForm.CAPTURED)
FORMS: Final = (
    pytest.param(ON_CPU, id="cpu"),
    pytest.param((DeviceKind.CUDA, DecodeForm.CAPTURED), marks=pytest.mark.gpu, id="cuda"),
)
"""Steps in which lanes wait for each other, on either device."""
PROMPTS: Final = ("hello world, this is a prompt of some length", "another one of these", "x" * 60)
GREEDY: Final = SamplingParams(max_output_tokens=12, temperature=0.0, ignore_eos=True)
SPLIT: Final = {"block_size": 16, "kv_gpu_tokens": 96, "num_sink_tokens": 16, "recent_window": 16}
"""Settings with which most keys of `PROMPTS` come to lie in DRAM, in tile order."""


def run(engine: Engine, prompts: Sequence[str] = PROMPTS, params: SamplingParams = GREEDY) -> list[RequestOutput]:
    """The last output of each prompt, all asked at once."""
    ids = [engine.add(prompt, params) for prompt in prompts]
    outputs: dict[str, RequestOutput] = {}
    for _ in range(1000):
        outputs |= {output.request_id: output for output in engine.step()}
        if not engine.has_work:
            assert sum(engine.stats.kv_bytes.values()) == 0, "blocks were lost"
            return [outputs[request_id] for request_id in ids]
    raise AssertionError("the engine did not end")


def tokens(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    """The answers, none of which failed."""
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.token_ids for output in outputs]


class CompilingForward:
    """A model whose first step of each size takes 2 s, as Triton does; only steps with attention of one kind count.

    Args:
        kind: of the attention.
    """

    def __init__(self, kind: type[AttentionOp]) -> None:
        self._kind = kind
        self.compiled: set[int] = set()
        """Sizes of such steps so far."""

    def __call__(self, model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        if isinstance(attention, self._kind) and len(batch.token_ids) not in self.compiled:
            self.compiled.add(len(batch.token_ids))
            time.sleep(2.0)
        return call_model(model, batch, attention)


class GivingUp:
    """Lanes of a CPU that soon give each other up, and what they say when they do.

    Args:
        limit_s: how long they wait; a busy machine may be late by less.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, limit_s: float = 1.0) -> None:
        self.has_given_up = threading.Event()
        """Set when one has waited for too long."""
        wait = HostWords.wait

        def noting_wait(words: HostWords, word: Tensor) -> None:
            try:
                wait(words, word)
            except LaneError:
                self.has_given_up.set()
                raise

        patch.setattr("ambidex.storage.words.WAIT_LIMIT_S", limit_s)
        patch.setattr(HostWords, "wait", noting_wait)


def capture_nothing(_body: Callable[[], None]) -> Callable[[], None]:
    """Stands in for the capture of a step."""
    raise RuntimeError("a CPU captures no step in which its lanes wait for each other")


def refuse_pinned(*_: object, **__: object) -> NoReturn:
    """Stands in for a class whose buffers are pinned."""
    raise RuntimeError("CUDA error: out of memory (cudaHostAlloc)")

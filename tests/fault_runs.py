"""What the fault tests share: a few prompts, their answers, and running an engine to its end."""

from collections.abc import Sequence
from typing import Final

from ambidex import SamplingParams
from ambidex.engine.engine import Engine
from ambidex.engine.outputs import RequestOutput

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

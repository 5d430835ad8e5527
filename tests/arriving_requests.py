"""Seven requests that come one after the other, and run side by side in an engine."""

import random
from collections.abc import Sequence

from ambidex import SamplingParams
from ambidex.engine.engine import Engine
from tiny_models import VOCAB_SIZE

LENGTHS = (1, 40, 5, 16, 33, 17, 70)
NUM_OUTPUTS = (20, 9, 24, 1, 12, 30, 8)
ARRIVALS = (0, 0, 0, 4, 6, 6, 15)
"""Steps before each request comes: rows come and go, and chunks of prompts stand between decode steps."""


def make_prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def run(engine: Engine, params: Sequence[SamplingParams]) -> list[tuple[int, ...]]:
    """Answers of all prompts, each added when its time has come."""
    prompts, ids, answers = make_prompts(), [], {}
    for step_idx in range(1000):
        while len(ids) < len(prompts) and ARRIVALS[len(ids)] <= step_idx:
            ids.append(engine.add(prompts[len(ids)], params[len(ids)]))
        answers |= {output.request_id: output for output in engine.step()}
        if len(ids) == len(prompts) and not engine.has_work:
            assert not [output.error for output in answers.values() if output.error]
            return [answers[request_id].token_ids for request_id in ids]
    raise AssertionError("the engine did not end")

"""Requests of a given length and number, as benchmarks need them: checked against the engine's limits beforehand, then
filled to their context, stepped, ended."""

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError, RequestFailedError
from ambidex.core.ids import Lane
from ambidex.core.request import Request, SamplingParams
from ambidex.engine.engine import Engine

NUM_WARMUP_STEPS: Final = 5
"""Decode steps of each point that are not counted, at least: the first compiles kernels and captures graphs, caches
fill."""
WARMUP: Final = "each point, until its lanes have found their shares"
"""What records say of `warm_up`."""
MOST_WARMUP_STEPS: Final = 48
"""How many at most, while lanes still look for their shares (`attention/lane_share.py`)."""
_MOST_WARMUP_S: Final = 3.0
"""Seconds after which no more steps are taken than must be; the first ones, with their captures, take a third of it."""
_LONG_STEP_S: Final = 0.3
"""A step that takes longer has compiled kernels meanwhile, and a GPU that idles lowers its clocks."""
_WAKE_S: Final = 0.3
"""For which it is kept busy then. Seen on an H200: steps of the engine that compiled a shape's kernels took 1.03 to
1.09 times as long as the same steps of engines behind it."""
_WAKE_BYTES: Final = 64 * 2**20
_NUM_ALIKE: Final = 8
"""Steps of about the same shares after which these have been found."""
_ALIKE: Final = 0.04
"""How far shares may lie apart in them: a share that has been found goes on moving by a percent or two of itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """`batch` requests, each with a prompt of `context` tokens."""

    context: int
    batch: int


class Prompts:
    """Token ids of prompts: a text's first ones, or random ones of the model's vocabulary.

    Args:
        text_ids: tokens of a text; None for random ids.
    """

    def __init__(self, vocab_size: int, text_ids: Sequence[int] | None = None) -> None:
        self._vocab_size = vocab_size
        self._text_ids = text_ids

    def check(self, longest: int) -> None:
        """See to it that there are enough tokens.

        Raises:
            ConfigError: the text is shorter.
        """
        if self._text_ids is not None and len(self._text_ids) < longest:
            raise ConfigError(
                f"--text has {len(self._text_ids)} tokens: the longest context has {longest}: give a longer text, or "
                f"leave --text out for random tokens"
            )

    def make(self, point: Point) -> list[list[int]]:
        """The prompts of a point: those of a text are equal, random ones differ but are the same in each run."""
        if self._text_ids is not None:
            return [list(self._text_ids[: point.context])] * point.batch
        rng = random.Random(point.batch * 1_000_003 + point.context)
        return [[rng.randrange(self._vocab_size) for _ in range(point.context)] for _ in range(point.batch)]


def most_warmup_steps(engine: Engine) -> int:
    """Steps that are not counted, at most: without a GPU there is no link and no share to be found."""
    return MOST_WARMUP_STEPS if engine.figures.device.startswith("cuda") else NUM_WARMUP_STEPS


def num_answer_tokens(point: Point, *, num_steps: int, max_tokens_per_step: int) -> int:
    """Tokens that a request of the point may give: one in each step from its prompt's end to the last of `num_steps`.

    The first of a batch goes on while the prompts of the others are computed, at worst in half-full steps.
    """
    free = max(1, max_tokens_per_step - point.batch)
    num_fill_steps = -(-(point.batch - 1) * point.context // free) + point.batch if point.batch > 1 else 1
    return num_fill_steps + num_steps + 1


def check_point(engine: Engine, config: EngineConfig, point: Point, *, num_answer: int, flag: str) -> None:
    """See to it that all requests of a point run together and to their end.

    Raises:
        ConfigError: a limit of the model, the settings or the memory is in the way; says which.
    """
    needed = point.context + num_answer
    if needed > engine.max_context_len:
        raise ConfigError(
            f"{flag} {point.context} at batch {point.batch} needs {needed} tokens of context ({num_answer} for what is "
            f"decoded): the limit is {engine.max_context_len} ({engine.report.why('kv', 'max_context_len')}): lower "
            f"{flag}, --batch or --steps, or raise --max-context-len or the KV budgets"
        )
    if point.batch > min(config.max_running_requests, config.max_tokens_per_step):
        raise ConfigError(
            f"--batch {point.batch} is more than a step computes: --max-running-requests is "
            f"{config.max_running_requests}, --max-tokens-per-step {config.max_tokens_per_step}: raise them"
        )
    # One spare block a request: a block that is demoted takes its place on both tiers for a step.
    blocks = point.batch * (-(-needed // config.block_size) + 1)
    total = sum(engine.figures.num_blocks.values())
    if point.batch > 1 and blocks > total:
        raise ConfigError(
            f"--batch {point.batch} at {flag} {point.context} needs {blocks} KV blocks of {config.block_size} tokens: "
            f"the tiers hold {total}: raise --dram-memory or --gpu-memory, or lower --batch or {flag}"
        )


def fill(engine: Engine, prompts: Sequence[Sequence[int]], *, num_answer: int) -> tuple[list[Request], float]:
    """Queue prompts and step until each has its first token; returns the requests and the seconds that took.

    Raises:
        RequestFailedError: one of them failed.
    """
    params = SamplingParams(max_output_tokens=num_answer, temperature=0.0, ignore_eos=True)
    requests = [engine.make_request(prompt, params) for prompt in prompts]
    start = time.perf_counter()
    for request in requests:
        engine.core.scheduler.add(request)
    while not all(request.output_token_ids for request in requests):
        engine.core.step()
        _refuse_ended(requests)
    return requests, time.perf_counter() - start


def decode_once(engine: Engine, requests: Sequence[Request]) -> None:
    """One step that gives each request a token.

    Raises:
        RequestFailedError: it gave less, so it was not what is to be measured.
    """
    _, tokens = engine.core.step()
    if len(tokens) != len(requests):
        _refuse_ended(requests)
        raise RequestFailedError(
            f"a step gave {len(tokens)} tokens for {len(requests)} requests, some wait for KV blocks: raise "
            f"--dram-memory or --gpu-memory, or lower --batch"
        )


def warm_up(engine: Engine, step: Callable[[], None]) -> int:
    """Take steps that are not counted, until kernels, graphs and the lanes' shares are there; returns how many.

    Shares are looked at: what the stream lane read of each step's keys beside the CPU lane. Where no key travels these
    are `NUM_WARMUP_STEPS`; of steps that take long there are fewer than `MOST_WARMUP_STEPS`, since a share is nearly
    right after its first timed step.

    Args:
        step: one decode step; is called `most_warmup_steps` times at most.
    """
    most = most_warmup_steps(engine)
    began, longest = time.perf_counter(), 0.0
    shares: deque[float] = deque(maxlen=_NUM_ALIKE)
    before = dict(engine.stats.lane_bytes)
    for num_steps in range(1, most + 1):
        start = time.perf_counter()
        step()
        longest = max(longest, time.perf_counter() - start)
        if num_steps == NUM_WARMUP_STEPS - 1 and longest > _LONG_STEP_S:
            _wake(engine.figures.device)
            began = time.perf_counter()
        read = {lane: size - before.get(lane, 0) for lane, size in engine.stats.lane_bytes.items()}
        before = dict(engine.stats.lane_bytes)
        streamed = read.get(Lane.STREAM, 0)
        shares.append(streamed / max(1, streamed + read.get(Lane.CPU, 0)))
        are_found = len(shares) == _NUM_ALIKE and max(shares) - min(shares) <= _ALIKE * max(shares)
        is_long = time.perf_counter() - began > _MOST_WARMUP_S
        if num_steps >= NUM_WARMUP_STEPS and (are_found or is_long or not any(shares)):
            return num_steps
    return most


def _wake(device: str) -> None:
    """Keep a GPU busy until its clocks are those of steps that follow each other."""
    if not device.startswith("cuda"):
        return
    numbers = torch.zeros(_WAKE_BYTES, dtype=torch.uint8, device=device)
    start = time.perf_counter()
    while time.perf_counter() - start < _WAKE_S:
        numbers.add_(1)
        torch.cuda.synchronize(numbers.device)


def end(engine: Engine, requests: Sequence[Request]) -> None:
    """End requests, and step until the executor has heard of it and moves have ended."""
    for request in requests:
        engine.core.scheduler.abort(request.request_id)
    while engine.has_work:
        engine.core.step()


def _refuse_ended(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.finish_reason is not None:
            raise RequestFailedError(
                f"request {request.request_id} ended ({request.finish_reason}) before it was measured: "
                f"{request.error or 'no reason given'}"
            )

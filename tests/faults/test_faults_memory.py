"""Out of accelerator memory: a chunk of a prompt is tried again with half its tokens, down to one block; other requests
do not notice."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ambidex import EngineConfig, FinishReason
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.ids import Fallback
from ambidex.engine.compose import build_engine
from ambidex.models.base import AttentionOp, CausalLM
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import Forward, call_model
from fault_runs import SPLIT, run, tokens

LONG = "y" * 110
PROMPTS = ("hello", LONG, "world")


def make_config(folder: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model=str(folder), **{**SPLIT, "kv_gpu_tokens": 512, **settings})


def room_for(limit: int, seen: list[int]) -> Forward:
    """A model that has memory for `limit` tokens of a step, and notes the tokens of those that ran."""

    def forward(model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        num_tokens = batch.token_ids.numel()
        if num_tokens > limit:
            call_model(model, batch, attention)  # as far as it came: rows of the chunk are stored already
            raise torch.OutOfMemoryError(f"tried to allocate {num_tokens} rows")
        seen.append(num_tokens)
        return call_model(model, batch, attention)

    return forward


@pytest.mark.parametrize("limit", [20, 60, 100])
def test_a_chunk_that_does_not_fit_is_halved_until_it_does(
    folder: Path, limit: int, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = tokens(run(build_engine(make_config(folder)), PROMPTS))
    seen: list[int] = []
    engine = build_engine(make_config(folder), forward=room_for(limit, seen))
    assert tokens(run(engine, PROMPTS)) == wanted
    num_smaller = engine.stats.fallbacks[Fallback.SMALLER_CHUNKS]
    assert 1 <= num_smaller <= 4
    assert max(seen) > limit / 4, "chunks became smaller than they had to"
    assert engine.stats.num_failed_requests == 0
    assert engine.stats.num_computed_tokens == sum(map(len, wanted)) - len(PROMPTS) + sum(map(len, PROMPTS))
    assert caplog.text.count("no memory on the accelerator") == 1


def test_a_request_for_which_one_block_is_too_much_fails_and_others_go_on(folder: Path) -> None:
    wanted = tokens(run(build_engine(make_config(folder)), PROMPTS))
    engine = build_engine(make_config(folder), forward=room_for(12, []))
    first, long, last = run(engine, PROMPTS)
    assert long.finish_reason is FinishReason.ERROR
    assert (long.error or "").startswith("no memory left on the accelerator for 16 tokens of this request: tried to")
    assert tokens([first, last]) == [wanted[0], wanted[2]]
    assert engine.stats.num_failed_requests == 1
    assert tokens(run(engine, ["world"])) == [wanted[2]]


def test_memory_that_runs_out_once_costs_nothing_but_time(folder: Path) -> None:
    wanted = tokens(run(build_engine(make_config(folder)), PROMPTS))
    for fatal_step in range(1, 14, 3):
        engine = build_engine(make_config(folder), forward=failing_once(fatal_step))
        outputs = run(engine, PROMPTS)
        failed = [output for output in outputs if output.error]
        # A step of single tokens has nothing to halve: one of its requests fails.
        assert len(failed) <= 1
        assert engine.stats.num_failed_requests == len(failed)
        for output, answer in zip(outputs, wanted, strict=True):
            assert output.error or output.token_ids == answer


def failing_once(fatal_step: int) -> Callable[[CausalLM, InputBatch, AttentionOp], Tensor]:
    num_steps = 0

    def forward(model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        nonlocal num_steps
        num_steps += 1
        hidden = call_model(model, batch, attention)
        if num_steps == fatal_step:
            raise torch.OutOfMemoryError("injected")
        return hidden

    return forward


@pytest.mark.gpu
def test_a_gpu_whose_memory_is_taken_by_another_computes_in_smaller_chunks(folder: Path) -> None:
    config = make_config(folder, device=DeviceKind.CUDA, dtype=DTypeChoice.FP32, max_tokens_per_step=4096)
    prompts = ["hello", "z" * 110, "world"]
    wanted = tokens(run(build_engine(config), prompts))

    def greedy(model: CausalLM, batch: InputBatch, attention: AttentionOp) -> Tensor:
        # Quadratic in the chunk: 110 tokens ask for more than any GPU has, 48 for 300 MB.
        torch.empty(batch.token_ids.numel() ** 2, 2**17 if batch.token_ids.numel() < 64 else 2**25, dtype=torch.uint8,
                    device="cuda")  # fmt: skip
        return call_model(model, batch, attention)

    engine = build_engine(config, forward=greedy)
    assert tokens(run(engine, prompts)) == wanted
    assert engine.stats.fallbacks[Fallback.SMALLER_CHUNKS] == 1

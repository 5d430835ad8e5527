"""Partial keys: what they hold while an engine runs, which requests wait for room, and what they are made of."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ambidex import EngineConfig, SamplingParams
from ambidex.attention.select import infinigen
from ambidex.attention.select.infinigen import Predicting
from ambidex.attention.select.policy import PolicyRequest, PromptRows, Selection, Selector
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import PredictorState
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.runner.runner import ModelRunner
from tiny_engine import make_engine_folder

SETTINGS: dict[str, Any] = {"max_context_len": 96, "num_threads": 1, "dtype": "fp32", "block_size": 16,
                            "exact_layers": 1, "max_tokens_per_step": 23, "kv_gpu_tokens": 512}  # fmt: skip
POLICIES: dict[str, dict[str, Any]] = {
    "infinigen": {"policy": "infinigen"},
    "pre": {"policy": "hybridgen", "hybridgen_mode": "pre", "near_tokens": 3},
    "mode": {"policy": "hybridgen", "hybridgen_feedback": "mode", "near_tokens": 3},
}
PROMPTS = [f"hello {letter}, this is a prompt of some length" for letter in "abcdef"]
GREEDY = SamplingParams(max_output_tokens=16, temperature=0.0, ignore_eos=True)
STATE = PredictorState(num_layers=1, num_kv_heads=2, num_q_heads=6, head_dim=16, num_columns=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("predictor"))


def make_engine(folder: Path, name: str, **settings: Any) -> Engine:
    return build_engine(EngineConfig(model=str(folder), **SETTINGS, **POLICIES[name], **settings))


def run(engine: Engine) -> tuple[list[tuple[int, ...]], int, int]:
    """Answers, the most bytes that predictors held after a step, and the most requests that ran."""
    ids = [engine.add(prompt, GREEDY) for prompt in PROMPTS]
    outputs, most_bytes, most_running = {}, 0, 0
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
        most_bytes = max(most_bytes, sum(tensor.untyped_storage().nbytes() for tensor in held_tensors(engine)))
        most_running = max(most_running, engine.core.scheduler.num_running)
    engine.close()
    assert [outputs[request_id].error for request_id in ids] == [None] * len(ids)
    return [outputs[request_id].token_ids for request_id in ids], most_bytes, most_running


def held_tensors(engine: Engine) -> Iterator[Tensor]:
    """Tensors of all requests' selectors, each storage once."""
    runner = engine.core.executor
    assert isinstance(runner, ModelRunner)
    assert runner.selective is not None
    seen: set[int] = set()
    for state in runner.selective._states.by_id.values():
        for selector in state.selectors:
            for tensor in tensors_of(selector):
                if tensor.untyped_storage().data_ptr() not in seen:
                    seen.add(tensor.untyped_storage().data_ptr())
                    yield tensor


def tensors_of(selector: Selector) -> list[Tensor]:
    """All that an object holds in its attributes, in lists of them and in what it is made of."""
    found: list[Tensor] = []
    left: list[object] = [selector]
    while left:
        item = left.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, list | tuple):
            left += item
        elif type(item).__module__.startswith("ambidex.attention.select"):
            slots = [getattr(item, name) for name in getattr(type(item), "__slots__", ())]
            left += [*getattr(item, "__dict__", {}).values(), *slots]
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_requests_wait_for_room_and_predictors_hold_no_more_than_the_ledger(folder: Path, name: str) -> None:
    engine = make_engine(folder, name)
    wanted, held, running = run(engine)
    taken = {entry.owner: entry.num_bytes for entry in engine.figures.ledger.entries(Tier.GPU)}
    assert running == len(PROMPTS)
    assert 0 < held <= taken["predictor"]
    assert engine.report.value("compute", "policy_predictor").startswith("of ")

    num_tokens = 2 * (len(PROMPTS[0]) + 16) + 10  # two requests, and not three
    others = sum(size for owner, size in taken.items() if owner != "predictor")
    budget = others + STATE.fixed_bytes(23, 96) + num_tokens * STATE.bytes_per_token
    tight = make_engine(folder, name, gpu_memory=budget)
    got, held, running = run(tight)
    taken = {entry.owner: entry.num_bytes for entry in tight.figures.ledger.entries(Tier.GPU)}
    assert taken["predictor"] == STATE.fixed_bytes(23, 96) + num_tokens * STATE.bytes_per_token
    assert 0 < held <= taken["predictor"]
    assert sum(taken.values()) <= budget
    assert running == 2
    assert tight.stats.num_preemptions == 0
    if name != "mode":  # there the mode depends on how fast steps are
        assert got == wanted


class Seen(Predicting):
    """A selector whose predictions nobody asks for."""

    def select(self, row: object) -> Selection:
        raise NotImplementedError


def show_prompt(q: Tensor, k: Tensor, cuts: list[int]) -> Seen:
    request = PolicyRequest(num_prompt_tokens=len(q), max_output_tokens=8, max_tokens=len(q) + 8)
    selector = Seen(50, request, num_kv_heads=len(k))
    for start, stop in zip([0, *cuts], [*cuts, len(q)], strict=True):
        selector.add_rows(k[:, start:stop], k[:, start:stop])
        selector.see_prompt(PromptRows(q=q[start:stop], k=k[:, :stop], scale=0.5))
        assert sum(len(queries) for queries in selector._queries) <= 8
    return selector


def test_partial_keys_are_made_of_evenly_spread_queries_however_a_prompt_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(infinigen, "PREDICTOR_QUERIES", 8)
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(37, 4, 6, generator=generator), torch.randn(2, 37, 6, generator=generator)
    spread = infinigen.PartialKeys.of(q[::5], k, percent=50, capacity=45)
    probe = torch.randn(4, 6, generator=generator)
    for cuts in ([], [1], [4, 5, 6, 30], list(range(1, 37))):
        selector = show_prompt(q, k, cuts)
        assert selector._partial is not None
        assert not selector._queries
        torch.testing.assert_close(selector._partial.scores(probe, 0.5), spread.scores(probe, 0.5), rtol=0, atol=1e-5)


@pytest.mark.parametrize("num_queries", [1, 2, 5, 40])
def test_partial_keys_of_a_prompt_with_few_queries_do_not_depend_on_how_these_were_rounded(num_queries: int) -> None:
    """Rounding turned all columns that were of no query, so answers to prompts of up to 20 tokens changed with those
    who shared their steps."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(num_queries, 3, 32, generator=generator)
    k = 9 * torch.randn(1, num_queries, 32, generator=generator)  # larger: they make columns of no query worth keeping
    rounded = q * (1 + 1e-6 * torch.randn(q.shape, generator=generator))
    later, probe = torch.randn(1, 50, 32, generator=generator), torch.randn(3, 32, generator=generator)
    one, other = (infinigen.PartialKeys.of(queries, k, percent=20).append(later) for queries in (q, rounded))
    torch.testing.assert_close(one.scores(probe, 0.2), other.scores(probe, 0.2), rtol=0, atol=1e-2)


def test_partial_keys_of_answers_follow_and_need_no_more_room() -> None:
    generator = torch.Generator().manual_seed(4)
    q, k = torch.randn(12, 4, 6, generator=generator), torch.randn(2, 20, 6, generator=generator)
    selector = show_prompt(q, k[:, :12], [])
    partial = selector._partial
    assert partial is not None
    buffer = partial._rows._buffer
    assert buffer.shape == (2, 20, 3)
    for place in range(12, 20):
        selector.add_rows(k[:, place : place + 1], k[:, place : place + 1])
    assert selector._partial is not None
    assert selector._partial._rows._buffer is buffer
    torch.testing.assert_close(selector._partial._rows.values, k @ partial._turn)

"""Scores of keys in rows: each instruction set that this machine runs, against float64."""

import time

import numpy as np
import pytest
import torch
from torch import Tensor

from ambidex import _native
from ambidex.core.errors import ShapeError
from ambidex.kernels.cpu.native import ThreadPool
from ambidex.kernels.cpu.score_rows import KeyRows, ScorePool, ScoreThread

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_keys(num_heads: int, capacity: int, num_keys: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Behind the keys lies what is no number."""
    generator = torch.Generator().manual_seed(num_keys)
    keys = torch.randn(num_heads, capacity, head_dim, generator=generator).to(dtype)
    keys[:, num_keys:] = torch.nan
    return keys


def make_queries(num_requests: int, num_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(head_dim)
    return torch.randn(num_requests, num_heads, head_dim, generator=generator).to(dtype)


def check(
    q: Tensor,
    keys: list[Tensor],
    num_keys: list[int],
    scores_dtype: torch.dtype,
    *,
    isa: str,
    num_threads: int = 2,
) -> None:
    """Scores are as good as twice what a plain low-precision product's are; what lies behind them stays."""
    scale, num_heads = q.shape[2] ** -0.5, q.shape[1]
    size = num_heads * sum(num_keys)
    scores = torch.full((size + 5,), 7.0, dtype=scores_dtype)
    pool = ScorePool(ThreadPool(num_threads))
    pool.score_rows(q, [KeyRows(part) for part in keys], num_keys, scores, scale=scale, isa=isa)
    assert torch.equal(scores[size:], torch.full((5,), 7.0, dtype=scores_dtype))
    found = scores[:size].split([num_heads * num for num in num_keys])
    for row, (part, key, num) in enumerate(zip(found, keys, num_keys, strict=True)):
        grouped = q[row].view(key.shape[0], -1, q.shape[2])
        seen = key[:, :num].transpose(1, 2)
        true = (grouped.double() @ seen.double() * scale).flatten()
        plain = (grouped.to(scores_dtype) @ seen.to(scores_dtype) * scale).flatten()
        if num:
            least = torch.finfo(scores_dtype).eps * float(true.abs().max())
            allowed = 2 * max(float((plain.double() - true).abs().max()), least)
            assert float((part.double() - true).abs().max()) <= allowed


@pytest.mark.parametrize("group_size", [1, 3, 4, 7])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_equal_float64(dtype: torch.dtype, head_dim: int, group_size: int, isa: str) -> None:
    keys = make_keys(2, 150, 131, head_dim, dtype)
    q = make_queries(1, 2 * group_size, head_dim, dtype)
    check(q, [keys], [131], dtype, isa=isa)
    check(q, [keys], [131], torch.float32, isa=isa)


@pytest.mark.parametrize("num_keys", [1, 3, 4, 5, 31, 32, 33, 64, 1000])
@pytest.mark.parametrize("head_dim", [3, 40, 64])
def test_numbers_of_keys_that_are_multiples_of_nothing(num_keys: int, head_dim: int, isa: str) -> None:
    keys = make_keys(3, 1000, num_keys, head_dim, torch.bfloat16)
    check(make_queries(1, 15, head_dim, torch.float32), [keys], [num_keys], torch.float32, isa=isa)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_requests_of_any_length_are_shared_out(num_threads: int, isa: str) -> None:
    num_keys = [0, 2100, 1, 0, 777, 0]
    keys = [make_keys(4, num + 9, num, 64, torch.float16) for num in num_keys]
    q = make_queries(len(num_keys), 8, 64, torch.bfloat16)
    check(q, keys, num_keys, torch.float16, isa=isa, num_threads=num_threads)


def test_the_same_bits_whatever_the_threads_and_the_neighbours(isa: str) -> None:
    keys, q = make_keys(2, 3000, 2999, 128, torch.bfloat16), make_queries(2, 8, 128, torch.bfloat16)
    together = torch.empty(8 * (2999 + 100), dtype=torch.bfloat16)
    ScorePool(ThreadPool(3)).score_rows(q, [KeyRows(keys)] * 2, [100, 2999], together, scale=0.1, isa=isa)
    alone = torch.empty(8 * 2999, dtype=torch.bfloat16)
    ScorePool(ThreadPool(1)).score_rows(q[1:], [KeyRows(keys)], [2999], alone, scale=0.1, isa=isa)
    assert torch.equal(together[800:], alone)


def test_a_number_that_is_none_stays_in_its_row(isa: str) -> None:
    keys = make_keys(1, 40, 40, 80, torch.bfloat16)
    keys[0, 17, 79] = torch.nan
    scores = torch.empty(4 * 40)
    ScorePool(ThreadPool(1)).score_rows(
        make_queries(1, 4, 80, torch.float32), [KeyRows(keys)], [40], scores, scale=1.0, isa=isa
    )
    is_none = torch.zeros(4, 40, dtype=torch.bool)
    is_none[:, 17] = True
    assert torch.equal(scores.view(4, 40).isnan(), is_none)


def test_what_does_not_fit_is_refused() -> None:
    pool, q = ScorePool(ThreadPool(1)), torch.zeros(1, 4, 64)
    rows = KeyRows(torch.zeros(2, 8, 64))
    with pytest.raises(ShapeError, match="at most 8 rows, got 9"):
        pool.score_rows(q, [rows], [9], torch.zeros(64), scale=1.0)
    with pytest.raises(ShapeError, match="too few for all query heads and keys"):
        pool.score_rows(q, [rows], [8], torch.zeros(31), scale=1.0)
    with pytest.raises(ShapeError, match="not a multiple of the 2"):
        pool.score_rows(torch.zeros(1, 3, 64), [rows], [8], torch.zeros(64), scale=1.0)
    with pytest.raises(ShapeError, match="head_dim"):
        pool.score_rows(torch.zeros(1, 4, 32), [rows], [8], torch.zeros(64), scale=1.0)
    with pytest.raises(ShapeError, match="expected 2 for the requests"):
        pool.score_rows(torch.zeros(1, 4, 64), [rows, rows], [8, 8], torch.zeros(64), scale=1.0)
    with pytest.raises(ShapeError, match="bf16, fp32"):
        pool.score_rows(
            torch.zeros(2, 4, 64), [rows, KeyRows(torch.zeros(2, 8, 64, dtype=torch.bfloat16))], [8, 8],
            torch.zeros(64), scale=1.0,
        )  # fmt: skip
    with pytest.raises(ShapeError, match="got int8"):
        pool.score_rows(q, [KeyRows(torch.zeros(2, 8, 64, dtype=torch.int8))], [8], torch.zeros(64), scale=1.0)
    with pytest.raises(ShapeError, match="contiguous"):
        KeyRows(torch.zeros(2, 8, 64)[:, ::2])


def test_a_thread_scores_question_after_question_once_their_queries_are_there() -> None:
    keys, words = make_keys(2, 900, 900, 64, torch.bfloat16), np.zeros((2, 16), np.int32)
    pool, rows = ScorePool(ThreadPool(2)), KeyRows(keys)
    thread = ScoreThread(pool, limit_s=20.0)
    q = torch.zeros(2, 1, 8, 64)
    found = torch.full((2, 8 * 900), torch.nan)
    numbers = [thread.ask(q[turn], [rows], [900], found[turn], scale=0.5, word=words[turn]) for turn in range(2)]
    wanted = torch.empty(8 * 900)
    for turn, number in enumerate(numbers):
        assert found[turn].isnan().all(), "what was not there was not scored"
        q[turn] = make_queries(1, 8, 64, torch.float32) + turn
        words[turn, 0] = 1
        scored = thread.wait(number)
        assert scored.is_answered
        assert scored.begin_s <= scored.end_s <= time.perf_counter()
        pool.score_rows(q[turn], [rows], [900], wanted, scale=0.5)
        assert torch.equal(found[turn], wanted)


def test_queries_that_never_come_are_given_up() -> None:
    thread = ScoreThread(ScorePool(ThreadPool(1)), limit_s=0.01)
    q, rows, scores = torch.ones(1, 2, 64), KeyRows(torch.ones(2, 8, 64)), torch.zeros(2, 16)
    late = thread.ask(q, [rows], [8], scores[0], scale=1.0, word=np.zeros(1, np.int32))
    there = thread.ask(q, [rows], [8], scores[1], scale=1.0, word=None)
    assert thread.wait(there).is_answered, "the thread goes on"
    assert not thread.wait(late).is_answered
    assert scores[0].tolist() == [0.0] * 16
    assert scores[1].tolist() == [64.0] * 16


def test_an_answer_is_had_once_and_a_thread_ends_behind_its_last() -> None:
    thread = ScoreThread(ScorePool(ThreadPool(1)), limit_s=20.0)
    q, rows, scores = torch.ones(1, 2, 64), KeyRows(torch.ones(2, 8, 64)), torch.zeros(16)
    number = thread.ask(q, [rows], [8], scores, scale=1.0, word=None)
    thread.wait(number)
    with pytest.raises(ValueError, match="has been had"):
        thread.wait(number)
    with pytest.raises(ValueError, match="expected 1 to 1, got 2"):
        thread.wait(2)
    thread.ask(q, [rows], [8], scores, scale=2.0, word=None)
    del thread
    assert scores.tolist() == [128.0] * 16

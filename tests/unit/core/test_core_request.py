from typing import Any

import pytest

from ambidex.core.errors import RequestError
from ambidex.core.ids import RequestId
from ambidex.core.request import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_STRINGS, Request, SamplingParams


def make_request(num_prompt: int, output: list[int]) -> Request:
    return Request(
        request_id=RequestId("a"),
        prompt_token_ids=tuple(range(num_prompt)),
        params=SamplingParams(),
        max_total_tokens=64,
        output_token_ids=output,
    )


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("max_output_tokens", 0, "at least 1"),
        ("min_output_tokens", -1, "at least 0"),
        ("temperature", -0.1, r"in \[0, 100\]"),
        ("temperature", float("nan"), "finite"),
        ("temperature", float("inf"), "finite"),
        ("top_k", -1, "at least 0"),
        ("top_p", 1.1, r"in \[0, 1\]"),
        ("top_p", 0.0, "above 0"),
        ("min_p", -0.5, r"in \[0, 1\]"),
        ("presence_penalty", 2.5, r"in \[-2, 2\]"),
        ("frequency_penalty", -2.5, r"in \[-2, 2\]"),
        ("repetition_penalty", 0.0, "above 0"),
        ("seed", -1, "in"),
        ("seed", 2**63, "in"),
        ("logprobs", MAX_LOGPROBS + 1, r"in \[0, 20\]"),
        ("stop", ("x",) * (MAX_STOP_STRINGS + 1), "at most 16"),
        ("stop", ("",), "empty"),
        ("logit_bias", ((5, 101.0),), "token 5 is 101.0"),
        ("logit_bias", ((5, float("nan")),), "token 5 is nan"),
        ("logit_bias", ((5, 1.0),) * (MAX_LOGIT_BIAS + 1), "at most 1024"),
    ],
)
def test_sampling_params_out_of_range_raise_with_the_limit(name: str, value: Any, limit: str) -> None:
    with pytest.raises(RequestError, match=limit):
        SamplingParams(**{name: value})


def test_sampling_params_with_minimum_above_maximum_raise() -> None:
    with pytest.raises(RequestError, match="min_output_tokens 5 is above max_output_tokens 4"):
        SamplingParams(min_output_tokens=5, max_output_tokens=4)


def test_sampling_params_at_their_limits_are_valid() -> None:
    SamplingParams(
        max_output_tokens=None, min_output_tokens=3, temperature=0, top_p=1, min_p=1, presence_penalty=-2,
        frequency_penalty=2, seed=2**63 - 1, logprobs=MAX_LOGPROBS, stop=("x",) * MAX_STOP_STRINGS,
        logit_bias=((0, -100.0), (1, 100.0)),
    )  # fmt: skip


def test_num_tokens_counts_prompt_and_answer() -> None:
    assert make_request(3, [7, 8]).num_tokens == 5


@pytest.mark.parametrize(
    ("start", "end", "token_ids"),
    [(0, 2, (0, 1)), (1, 3, (1, 2)), (2, 4, (2, 7)), (3, 5, (7, 8)), (4, 5, (8,)), (0, 5, (0, 1, 2, 7, 8)), (5, 5, ())],
)
def test_token_ids_span_prompt_and_answer(start: int, end: int, token_ids: tuple[int, ...]) -> None:
    assert make_request(3, [7, 8]).token_ids(start, end) == token_ids

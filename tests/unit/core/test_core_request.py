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
        ("max_output_tokens", 0, r"in \[1, 2147483647\]"),
        ("min_output_tokens", -1, r"in \[0, 2147483647\]"),
        ("temperature", -0.1, r"in \[0, 100\]"),
        ("temperature", float("nan"), "finite"),
        ("temperature", float("inf"), "finite"),
        ("top_k", -1, r"in \[0, 2147483647\]"),
        ("top_p", 1.1, r"in \[0, 1\]"),
        ("top_p", 0.0, "above 0"),
        ("min_p", -0.5, r"in \[0, 1\]"),
        ("presence_penalty", 2.5, r"in \[-2, 2\]"),
        ("frequency_penalty", -2.5, r"in \[-2, 2\]"),
        ("repetition_penalty", 0.0, r"in \[0.01, 100\]"),
        ("seed", -1, "in"),
        ("seed", 2**63, "in"),
        ("logprobs", MAX_LOGPROBS + 1, r"in \[0, 20\]"),
        ("stop", ("x",) * (MAX_STOP_STRINGS + 1), "at most 16"),
        ("stop", ("",), "empty"),
        ("logit_bias", ((5, 101.0),), "token 5 is 101.0"),
        ("logit_bias", ((5, float("nan")),), "token 5 is nan"),
        ("logit_bias", tuple((i, 1.0) for i in range(MAX_LOGIT_BIAS + 1)), "at most 1024"),
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop": "END"}, "stop is 'END': it must be a list"),
        ({"stop": (5,)}, "stop holds 5: each must be text"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5: it must be a list"),
        ({"stop_token_ids": (True,)}, "stop_token_ids holds True"),
        ({"logit_bias": {"a": 1.0}}, "must map token ids to numbers"),
        ({"logit_bias": ((1, 1.0), (1, 2.0))}, "names a token id twice"),
        ({"max_output_tokens": 2.5}, "max_output_tokens is 2.5: it must be a whole number"),
        ({"seed": 1.5}, "seed is 1.5: it must be a whole number"),
        ({"logprobs": 1.5}, "logprobs is 1.5: it must be a whole number"),
        ({"top_k": 10**400}, "top_k is .*: it must be in"),
        ({"temperature": "hot"}, "temperature is 'hot': it must be a number"),
        ({"temperature": 10**400}, "temperature is .*: it must be in"),
        ({"ignore_eos": 1}, "ignore_eos is 1: it must be true or false"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300: it must be in"),
    ],
)
def test_sampling_params_of_a_wrong_kind_are_refused(changes: dict[str, object], message: str) -> None:
    """They were taken, and crashed the step or cut the answer at single letters."""
    with pytest.raises(RequestError, match=message):
        SamplingParams(**changes)  # type: ignore[arg-type]


def test_sampling_params_take_lists_and_mappings() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1], logit_bias={3: 1})  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), ((3, 1.0),))

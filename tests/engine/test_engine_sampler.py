"""The sampler: filters, penalties, streams of random numbers, failures."""

import math

import pytest
import torch

from ambidex.core.ids import RequestId
from ambidex.core.request import SamplingParams
from ambidex.core.step import NewRequest, SampledToken
from ambidex.runner.sampler import Sampler

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])


def make_sampler(*requests: tuple[RequestId, SamplingParams], prompt: tuple[int, ...] = (), seed: int = 0) -> Sampler:
    sampler = Sampler(vocab_size=len(LOGITS), device=torch.device("cpu"))
    for request_id, params in requests:
        sampler.add(
            NewRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                params=params,
                seed=seed,
                max_tokens=9999,
                stop_ids=frozenset({0}),
            )
        )
    return sampler


def draw(sampler: Sampler, count: int, logits: torch.Tensor = LOGITS) -> list[int]:
    return [sampler.sample(logits.clone()[None], [A])[0][A].token_id for _ in range(count)]


def shares(params: SamplingParams, count: int = 4000) -> list[float]:
    tokens = draw(make_sampler((A, params)), count)
    return [tokens.count(token_id) / count for token_id in range(len(LOGITS))]


def test_sample_at_temperature_0_takes_the_largest_logit() -> None:
    assert draw(make_sampler((A, SamplingParams(temperature=0.0))), 3) == [0, 0, 0]


def test_sample_at_temperature_1_follows_softmax() -> None:
    wanted = torch.softmax(LOGITS, 0).tolist()
    for got, share in zip(shares(SamplingParams(temperature=1.0)), wanted, strict=True):
        assert abs(got - share) < 4 * math.sqrt(share * (1 - share) / 4000) + 1e-9


def test_sample_at_temperature_2_follows_flattened_softmax() -> None:
    wanted = torch.softmax(LOGITS / 2, 0).tolist()
    for got, share in zip(shares(SamplingParams(temperature=2.0)), wanted, strict=True):
        assert abs(got - share) < 4 * math.sqrt(share * (1 - share) / 4000) + 1e-3


def test_sample_with_top_k_draws_only_the_k_likeliest() -> None:
    got = shares(SamplingParams(temperature=1.0, top_k=2))
    assert got[0] > got[1] > 0
    assert got[2:] == [0, 0, 0]


def test_sample_with_top_p_keeps_tokens_until_the_mass_is_reached() -> None:
    got = shares(SamplingParams(temperature=1.0, top_p=0.7))  # softmax: 0.64, 0.24, 0.09, 0.03
    assert got[1] > 0
    assert got[2:] == [0, 0, 0]


def test_sample_with_min_p_drops_tokens_below_the_share_of_the_likeliest() -> None:
    got = shares(SamplingParams(temperature=1.0, min_p=0.2))
    assert got[1] > 0
    assert got[2:] == [0, 0, 0]


def test_sample_with_same_seed_repeats_and_with_other_seed_differs() -> None:
    params = SamplingParams(temperature=1.0)
    first, second = (draw(make_sampler((A, params), seed=5), 50) for _ in range(2))
    assert first == second
    assert draw(make_sampler((A, params), seed=6), 50) != first


def test_sample_beside_another_request_gives_the_same_tokens_as_alone() -> None:
    params = SamplingParams(temperature=1.0)
    alone = draw(make_sampler((A, params), seed=3), 40)
    sampler = make_sampler((B, SamplingParams(temperature=1.5, top_k=3)), (A, params), seed=3)
    together = [sampler.sample(torch.stack([LOGITS.flip(0), LOGITS]), [B, A])[0][A].token_id for _ in range(40)]
    assert together == alone


def test_sample_with_frequency_penalty_moves_to_other_tokens() -> None:
    sampler = make_sampler((A, SamplingParams(temperature=0.0, frequency_penalty=0.6)))
    assert draw(sampler, 4) == [0, 0, 1, 0]  # 2, 1.4, then 0.8 against 1, then 0.8 against 0.4


def test_sample_with_presence_penalty_counts_a_token_once() -> None:
    sampler = make_sampler((A, SamplingParams(temperature=0.0, presence_penalty=0.9)))
    assert draw(sampler, 3) == [0, 0, 0]  # 2, then 1.1 against 1 for ever


def test_sample_with_repetition_penalty_counts_the_prompt() -> None:
    sampler = make_sampler((A, SamplingParams(temperature=0.0, repetition_penalty=3.0)), prompt=(0,))
    assert draw(sampler, 1) == [1]  # 2 / 3 against 1


def test_sample_with_logit_bias_adds_to_the_logit() -> None:
    sampler = make_sampler((A, SamplingParams(temperature=0.0, logit_bias=((4, 100.0),))))
    assert draw(sampler, 1) == [4]


def test_sample_with_a_mask_takes_only_what_it_allows_in_its_own_row() -> None:
    greedy = SamplingParams(temperature=0.0)
    sampler = make_sampler((A, greedy), (B, greedy), (C, SamplingParams(temperature=1.0)))
    masks = [(0b01100).to_bytes(4, "little"), None, (0b10000).to_bytes(8, "little")[:4]]
    tokens, failures = sampler.sample(LOGITS.repeat(3, 1), [A, B, C], masks)
    assert [tokens[request_id].token_id for request_id in (A, B, C)] == [2, 0, 4]
    assert failures == {}


def test_sample_with_an_empty_mask_fails_the_request() -> None:
    sampler = make_sampler((A, SamplingParams(temperature=0.0)), (B, SamplingParams(temperature=0.0)))
    tokens, failures = sampler.sample(LOGITS.repeat(2, 1), [A, B], [bytes(4), None])
    assert tokens[B].token_id == 0
    assert "every token is forbidden" in failures[A]


def test_guided_request_never_gets_its_likeliest_token_unseen() -> None:
    sampler = make_sampler((A, SamplingParams(temperature=0.0)), (B, SamplingParams(temperature=0.0, regex="a")))
    assert sampler.takes_likeliest([A])
    assert not sampler.takes_likeliest([A, B])


def test_sample_below_minimum_length_avoids_stop_ids() -> None:
    sampler = make_sampler((A, SamplingParams(temperature=0.0, min_output_tokens=2)))
    assert draw(sampler, 3) == [1, 1, 0]


def test_sample_with_logprobs_gives_those_of_the_model_before_penalties() -> None:
    params = SamplingParams(temperature=0.0, logprobs=2, logit_bias=((3, 50.0),))
    token = make_sampler((A, params)).sample(LOGITS.clone()[None], [A])[0][A]
    wanted = torch.log_softmax(LOGITS, 0)
    assert token.token_id == 3
    assert token.logprob == pytest.approx(wanted[3].item())
    assert token.top_logprobs == ((0, pytest.approx(wanted[0].item())), (1, pytest.approx(wanted[1].item())))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_sample_of_logits_that_are_not_finite_fails_that_request_only(bad: float) -> None:
    params = SamplingParams(temperature=1.0)
    logits = torch.stack([LOGITS, LOGITS])
    logits[0, 2] = bad
    tokens, failures = make_sampler((A, params), (B, params)).sample(logits, [A, B])
    assert list(failures) == [A]
    assert isinstance(tokens[B], SampledToken)


def test_sample_at_a_tiny_temperature_is_greedy() -> None:
    """Temperature 1e-308 made every logit infinite, and the answer token 0."""
    logits = torch.tensor([0.0, 1.0, 3.0, 2.0, -30.0])
    assert draw(make_sampler((A, SamplingParams(temperature=1e-308))), 3, logits) == [2, 2, 2]


def test_sample_when_every_token_is_forbidden_fails_the_request() -> None:
    sampler = Sampler(vocab_size=5, device=torch.device("cpu"))
    params = SamplingParams(temperature=1.0, min_output_tokens=1)
    stop_ids = frozenset(range(5))
    sampler.add(NewRequest(request_id=A, prompt_token_ids=(), params=params, seed=0, max_tokens=9, stop_ids=stop_ids))
    tokens, failures = sampler.sample(LOGITS.clone()[None], [A])
    assert tokens == {}
    assert "every token is forbidden" in failures[A]


def test_sample_with_uniform_logits_reaches_the_last_token() -> None:
    sampler = make_sampler((A, SamplingParams(temperature=1.0)))
    assert set(draw(sampler, 300, torch.zeros(5))) == {0, 1, 2, 3, 4}

"""Figures of decode_cpu.py from invented answers."""

import pytest

from decode_engines import Generation
from decode_figures import Traffic, count_same, make_point, make_ratios

TRAFFIC = Traffic(weights=1_000, kv_per_token=10)


def make_answer(*, token_ids=(5, 6, 7), busy_cores=0.0):
    return {
        "context": 100,
        "token_ids": list(token_ids),
        "prefill_s": 2.0,
        "step_s": [0.5, 0.25],
        "lane_bytes": {"cpu": 7},
        "others": {"busy_cores": busy_cores, "stolen_cores": 0.0},
    }


def make_figures(*answers, reference=()):
    return make_point("ambidex-fp32", 100, answers, TRAFFIC, reference=reference, bytes_per_s=10_050)


def test_generation_seconds_split_at_the_first_token():
    answer = Generation(10.0, token_ids=[1, 2, 3], moments=[12.0, 12.5, 12.75])
    assert answer.prefill_s == 2.0
    assert answer.step_s == [0.5, 0.25]


def test_point_speeds_are_tokens_over_median_seconds():
    point = make_figures(make_answer())
    assert point["prefill_tokens_per_s"] == 50
    assert point["decode_tokens_per_s"] == pytest.approx(1 / 0.375, rel=1e-3)


def test_point_floor_reads_weights_once_and_the_context_of_the_middle_step():
    point = make_figures(make_answer())
    assert point["bytes_per_step"] == 1_000 + 10 * 101
    assert point["predicted_step_s"] == pytest.approx(0.2)
    assert point["share_of_ceiling"] == pytest.approx(0.2 / 0.375, rel=1e-2)


def test_point_of_two_rounds_is_quiet_only_if_both_were():
    assert make_figures(make_answer(), make_answer())["is_quiet"]
    point = make_figures(make_answer(), make_answer(busy_cores=0.5))
    assert not point["is_quiet"]
    assert point["others"]["busy_cores"] == 0.5


def test_point_without_a_reference_says_nothing_of_tokens():
    assert make_figures(make_answer())["num_same_tokens"] is None


def test_point_with_a_reference_counts_tokens_to_the_first_difference():
    assert make_figures(make_answer(), reference=[make_answer(token_ids=(5, 6, 9))])["num_same_tokens"] == 2


@pytest.mark.parametrize(("left", "right", "same"), [([1, 2], [1, 2], 2), ([1, 2], [3, 2], 0), ([1, 2], [1, 2, 3], 2)])
def test_count_same_stops_at_the_first_difference_or_the_shorter_end(left, right, same):
    assert count_same(left, right) == same


def test_ratios_divide_ours_by_each_peer_of_the_same_context():
    points = [
        {"variant": "ambidex-fp32", "context": 512, "prefill_tokens_per_s": 10.0, "decode_tokens_per_s": 3.0},
        {"variant": "llama.cpp", "context": 512, "prefill_tokens_per_s": 40.0, "decode_tokens_per_s": 2.0},
        {"variant": "llama.cpp", "context": 2048, "prefill_tokens_per_s": 1.0, "decode_tokens_per_s": 1.0},
    ]
    assert make_ratios(points) == [
        {"context": 512, "ours": "ambidex-fp32", "peer": "llama.cpp", "prefill": 0.25, "decode": 1.5}
    ]

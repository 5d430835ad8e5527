"""Floors: which bytes and operations count, held against numbers worked out by hand."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ambidex.bench.floor import (
    Rates,
    StepBytes,
    decode_floor,
    link_bytes,
    prefill_floor,
    prefill_flops,
    step_weights,
)
from ambidex.core.dtypes import DType
from ambidex.core.ids import Lane
from ambidex.core.model_spec import Activation, ModelSpec, RopeSpec
from ambidex.cost.terms import visible_pairs
from ambidex.models.registry import build_model

CPU = torch.device("cpu")
SPEC = ModelSpec(
    architecture="llama", num_layers=2, hidden_size=32, intermediate_size=48, num_q_heads=4, num_kv_heads=2,
    head_dim=8, vocab_size=100, max_context_len=512, norm_eps=1e-5, activation=Activation.SILU,
    rope=RopeSpec(theta=10000.0, dim=8), windows=(None, None), tie_embeddings=False,
)  # fmt: skip
STEP = StepBytes(weights=600, kv={Lane.GPU: 200, Lane.CPU: 300, Lane.STREAM: 100}, link=50)


def test_floor_of_one_memory_adds_all_bytes():
    assert decode_floor(STEP, Rates(dram=100.0)) == {"dram": 12.0}


def test_floor_on_a_gpu_has_a_time_for_each_lane():
    assert decode_floor(STEP, Rates(dram=100.0, gpu=400.0, link=25.0)) == {"gpu": 2.0, "cpu": 3.0, "link": 6.0}


def test_best_rates_are_the_larger_of_each():
    found = Rates(dram=3.0, gpu=10.0, link=1.0).best(Rates(dram=2.0, gpu=11.0, link=2.0))
    assert found == Rates(dram=3.0, gpu=11.0, link=2.0)


def test_visible_pairs_are_those_that_a_mask_shows():
    for num_tokens in (1, 5, 9):
        for window in (None, 1, 3, 9, 20):
            distance = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
            mask = (distance >= 0) & (distance < (window or num_tokens))
            assert visible_pairs(num_tokens, window) == int(mask.sum())


@pytest.mark.parametrize("tie", [False, True])
def test_step_weights_leave_out_a_table_of_which_rows_are_read(tie: bool):
    spec = dataclasses.replace(SPEC, tie_embeddings=tie)
    model = build_model(spec, device=torch.device("meta"), dtype=torch.float32)
    table = spec.vocab_size * spec.hidden_size
    every = sum(parameter.numel() for parameter in model.parameters())
    found = step_weights(spec, DType.FP32, CPU)
    assert found.num_bytes == 4 * (every if tie else every - table)
    assert found.num_output_params == table
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    assert found.num_params == every - vectors - (table if tie else 2 * table)


def test_prefill_flops_are_those_that_torch_counts_and_the_visible_pairs():
    spec, num_tokens = SPEC, 7
    weights = step_weights(spec, DType.FP32, CPU)
    model = build_model(spec, device=CPU, dtype=torch.float32)
    counter = FlopCounterMode(display=False)
    with counter, torch.inference_mode():
        hidden = model(torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens), _NoAttention())
        model.logits(hidden[-1:])
    expected = counter.get_total_flops() + _attention(spec, num_tokens)
    assert prefill_flops(spec, weights, num_tokens=num_tokens) == expected


def test_prefill_floor_is_the_larger_of_operations_and_bytes():
    weights = dataclasses.replace(step_weights(SPEC, DType.FP32, CPU), num_bytes=100)
    assert prefill_floor(1000, weights, num_steps=2, flops_per_s=10.0, bytes_per_s=1000.0) == 100.0
    assert prefill_floor(1000, weights, num_steps=2, flops_per_s=10.0, bytes_per_s=1.0) == 200.0


def test_link_bytes_are_queries_answers_and_moves():
    spec = dataclasses.replace(SPEC, num_layers=3, num_q_heads=2, head_dim=8)
    row = 2 * (8 * 2 + 4 * 9)
    assert link_bytes(spec, batch=5, kv_in_dram=1, moved=7, number_bytes=2) == 5 * 3 * row + 7
    assert link_bytes(spec, batch=5, kv_in_dram=0, moved=7, number_bytes=2) == 7


class _NoAttention:
    """Attention without products: what it costs is counted apart."""

    def attend(self, layer_idx, q, k, v, *, angles=None):
        del layer_idx, k, v, angles
        return q


def _attention(spec: ModelSpec, num_tokens: int) -> int:
    return spec.num_layers * 4 * spec.num_q_heads * spec.head_dim * num_tokens * (num_tokens + 1) // 2

"""Steps and prompts predicted, held against numbers worked out by hand."""

import dataclasses

import pytest

from ambidex.core.dtypes import DType
from ambidex.core.errors import InternalError
from ambidex.core.model_spec import Activation, ModelSpec
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.cost import terms
from ambidex.cost.prefill import predict_prefill
from ambidex.cost.step import predict_step
from ambidex.cost.units import Coefficients, make_units
from ambidex.cost.weights import PLAIN, Matrices, WeightGroup, count_weights
from ambidex.cost.workload import KVShares, Workload
from ambidex.hw.profile import CpuRates, Curve, GpuRates, HardwareProfile, LinkRates, Products

SPEC = ModelSpec(
    architecture="llama", num_layers=2, hidden_size=1024, intermediate_size=2048, num_q_heads=8, num_kv_heads=8,
    head_dim=128, vocab_size=1000, max_context_len=4096, norm_eps=1e-5, activation=Activation.SILU, rope=None,
    windows=(None, 1024), tie_embeddings=False, dtype=DType.BF16,
)  # fmt: skip
PROFILE = HardwareProfile(
    machine=None, date="", source="by hand",
    gpu=GpuRates(name="g", memory_bytes=1 << 30, read_bytes_per_s=1e12, attention_bytes_per_s=5e11, layer_s=1e-5,
                 launch_s=1e-6, products=Products({"bf16": Curve(((1, 1e12), (4096, 1e12)))})),
    cpu=CpuRates(name="c", num_threads=4, read_bytes_per_s=Curve(((4, 5e10),)),
                 products=Products({"bf16": Curve(((1, 4e10), (8, 4e10)))}), attention_bytes_per_s={"bf16": 5e10},
                 layer_s=1e-5, step_s=1e-4, request_s=1e-5),
    link=LinkRates(name="l", to_gpu_bytes_per_s=2e10, from_gpu_bytes_per_s=1e10, beside_bytes_per_s=6e10,
                   handover_s=5e-5),
)  # fmt: skip
WEIGHTS = count_weights(SPEC, residence=PLAIN)
ATTENTION, MLP, HEAD = 4 * 1024 * 1024 * 2, 3 * 1024 * 2048 * 2, 1000 * 1024 * 2  # bytes
KV = 2 * 8 * 128 * 2  # bytes of a token and layer
FIXED = 1e-4 + 1e-5 + 2 * 1e-5


def units(batch: int = 1, coefficients: Coefficients | None = None):
    return make_units(
        SPEC, WEIGHTS, PROFILE, Workload(batch=batch, context=2048), dtype=DType.BF16, coefficients=coefficients
    )


def test_a_step_on_the_gpu_alone_is_its_bytes_over_rates() -> None:
    step = predict_step(units(), Placement.all_on_gpu(2), KVShares())
    weights = (2 * (ATTENTION + MLP) + HEAD) / 1e12
    assert step.step_s == pytest.approx(FIXED + weights + (2048 + 1024) * KV / 5e11)
    assert (step.cpu_s, step.link_s, step.binds) == (0.0, 0.0, "GPU")


def test_phases_wait_for_the_slower_side_and_pay_the_handover() -> None:
    half = WeightSplit(on_gpu=0.5, on_cpu=0.5)
    placement = Placement(layers=(LayerPlacement(mlp=half), LayerPlacement()))
    step = predict_step(units(), placement, KVShares())
    handover = 5e-5 + 1024 * 2 / 1e10 + 1024 * 4 / 2e10
    gpu = (2 * ATTENTION + MLP + HEAD) / 1e12 + (2048 + 1024) * KV / 5e11
    assert step.path_s == pytest.approx(FIXED + gpu + MLP / 2 / 4e10 + handover)
    assert step.cpu_s == pytest.approx(MLP / 2 / 4e10)
    assert step.binds == "CPU"


def test_what_travels_bounds_a_step_from_below() -> None:
    streamed = WeightSplit(on_gpu=0.0, streamed=1.0)
    placement = Placement(layers=(LayerPlacement(attention=streamed, mlp=streamed),) * 2)
    step = predict_step(units(), placement, KVShares())
    assert step.link_s == pytest.approx(2 * (ATTENTION + MLP) / 2e10)
    assert (step.step_s, step.binds) == (step.link_s, "link")


def test_dram_serves_the_cpu_and_copies_together() -> None:
    kv = KVShares(on_gpu=0.25, on_cpu=0.5, streamed=0.25)
    step = predict_step(units(64), Placement.all_on_gpu(2), kv)
    away = 0.75 * 64 * (2048 + 1024) * KV
    handover = 5e-5 + 64 * (1024 * 2 / 1e10 + (1024 + 8) * 4 / 2e10)
    idle = 1e-4 + 64e-5 + 2e-5 + (2 * (ATTENTION + MLP) + HEAD) / 1e12 + 2 * handover
    assert step.dram_s == pytest.approx(idle * (1 - 2e10 / 6e10) + away / 6e10)
    assert step.step_s == max(step.path_s, step.link_s, step.dram_s)


def test_coefficients_scale_their_terms() -> None:
    kv = KVShares(on_gpu=0.5, on_cpu=0.5)
    one, slow = (
        dict(predict_step(units(1, found), Placement.all_on_gpu(2), kv).terms)
        for found in (None, Coefficients(cpu_attention=3.0, gpu_weights=2.0))
    )
    assert slow["CPU: attention"] == pytest.approx(3 * one["CPU: attention"])
    assert slow["GPU: MLP's weights"] == pytest.approx(2 * one["GPU: MLP's weights"])
    assert slow["GPU: attention"] == one["GPU: attention"]


def test_placements_that_cannot_be_are_our_mistake() -> None:
    with pytest.raises(InternalError, match="3 layers for a model of 2"):
        predict_step(units(), Placement.all_on_gpu(3), KVShares())
    alone = dataclasses.replace(units(), has_link=False)
    with pytest.raises(InternalError, match="no other place"):
        predict_step(alone, Placement.all_on_gpu(2), KVShares(on_gpu=0.5, on_cpu=0.5))


def test_products_are_read_or_computed_whichever_takes_longer() -> None:
    group = WeightGroup((Matrices("bf16", 10, 20),))
    products = Products({"bf16": Curve(((1, 10.0), (4, 10.0), (8, 5.0)))})
    assert [terms.product_s(group, products, num_tokens=n) for n in (1, 4, 8, 16)] == [2.0, 2.0, 4.0, 8.0]


def test_weights_in_dram_travel_for_each_chunk_of_a_prompt() -> None:
    cpu = WeightSplit(on_gpu=0.0, on_cpu=1.0)
    placement = Placement(layers=(LayerPlacement(mlp=cpu), LayerPlacement()))
    workload = Workload(prompt=1024, chunk=256, context=1024)
    whole, split = (
        predict_prefill(SPEC, WEIGHTS, PROFILE, workload, where, KVShares(), dtype=DType.BF16)
        for where in (Placement.all_on_gpu(2), placement)
    )
    assert split.how == "the GPU, over the link"
    assert split.seconds >= 4 * MLP / 2e10
    assert whole.seconds < split.seconds
    small = predict_prefill(
        SPEC, WEIGHTS, PROFILE, Workload(prompt=8, chunk=8, context=8), placement, KVShares(), dtype=DType.BF16
    )
    assert small.how == "the CPU"


def test_where_the_host_is_slow_a_prompt_waits_for_its_launches() -> None:
    workload = Workload(prompt=1024, chunk=256, context=1024)
    assert PROFILE.gpu is not None
    slow = dataclasses.replace(PROFILE, gpu=dataclasses.replace(PROFILE.gpu, launch_s=1.0))
    for kv, times in ((KVShares(), 1.0), (KVShares(on_gpu=0.5, on_cpu=0.5), 2.0)):
        found = predict_prefill(SPEC, WEIGHTS, slow, workload, Placement.all_on_gpu(2), kv, dtype=DType.BF16)
        assert found.seconds == pytest.approx(4 * (2 * times + 1e-4))
        assert found.binds == "the host's launches"


def test_keys_for_dram_are_written_over_the_link() -> None:
    workload = Workload(prompt=256, chunk=256, context=256)
    near, away = (
        predict_prefill(SPEC, WEIGHTS, PROFILE, workload, Placement.all_on_gpu(2), kv, dtype=DType.BF16).seconds
        for kv in (KVShares(), KVShares(on_gpu=0.0, on_cpu=1.0))
    )
    assert away - near == pytest.approx(256 * 2 * KV / 1e10)


def test_visible_tokens_end_at_the_window() -> None:
    assert [terms.visible_tokens(100, window) for window in (None, 30, 300)] == [100, 30, 100]

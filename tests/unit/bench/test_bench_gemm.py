"""Which matrix product the floor of prefill is taken from."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from ambidex.bench import prefill
from ambidex.bench.figures import Quantiles
from ambidex.bench.prefill import gemm_rate
from ambidex.core.dtypes import DType
from ambidex.core.ledger import MemoryLedger
from ambidex.core.model_spec import Activation, ModelSpec
from ambidex.engine.report import EngineFigures

SPEC = ModelSpec(
    architecture="llama", num_layers=1, hidden_size=64, intermediate_size=96, num_q_heads=4, num_kv_heads=2,
    head_dim=16, vocab_size=100, max_context_len=512, norm_eps=1e-5, activation=Activation.SILU, rope=None,
    windows=(None,), tie_embeddings=False,
    quantized=(("blk.0.attn_q.weight", "Q4_1"), ("blk.0.attn_k.weight", "Q4_1"), ("output.weight", "Q8_0")),
)  # fmt: skip
BUILT = EngineFigures(
    spec=SPEC, device="cpu", dtype=DType.FP16, keeps_quantized=True, num_threads=1, kv={}, num_blocks={},
    ledger=MemoryLedger({}),
)  # fmt: skip


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The results' shapes of all products that are measured; each counts as faster than the ones before."""
    found: list[torch.Size] = []

    def measure(_built: object, product: Callable[[], object], *_: object) -> Quantiles:
        result = product()
        found.append((result[0] if isinstance(result, tuple) else result).shape)
        return Quantiles.of([float(len(found))])

    monkeypatch.setattr(prefill, "_measure", measure)
    return found


def test_kept_quantised_weights_have_their_native_product_measured(shapes: list[torch.Size]) -> None:
    assert gemm_rate(BUILT, num_tokens=3).record()["dtype"] == "Q4_1"
    assert shapes == [(3, 96)] * 3  # fp16, fp32, Q4_1


def test_dequantised_weights_have_torchs_products_measured(shapes: list[torch.Size]) -> None:
    assert gemm_rate(dataclasses.replace(BUILT, keeps_quantized=False), num_tokens=3).record()["dtype"] == "fp32"
    assert len(shapes) == 2


def test_the_native_product_of_one_cpu_is_measured_in_operations_a_second() -> None:
    assert gemm_rate(BUILT, num_tokens=3).flops_per_s.median > 0

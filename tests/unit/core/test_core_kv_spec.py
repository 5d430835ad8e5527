from dataclasses import replace

import pytest

from ambidex.core.dtypes import DType
from ambidex.core.kv_spec import KVSpec
from ambidex.core.model_spec import Activation, ModelSpec

LLAMA_8B = KVSpec(num_layers=32, num_kv_heads=8, head_dim=128, dtype=DType.BF16, block_size=64)


def test_kv_spec_of_llama_8b_counts_128_kib_a_token() -> None:
    assert LLAMA_8B.bytes_per_token_layer == 4096
    assert LLAMA_8B.bytes_per_token == 131_072
    assert LLAMA_8B.bytes_per_block == 8_388_608


def test_kv_spec_in_fp32_counts_twice_the_bytes() -> None:
    assert replace(LLAMA_8B, dtype=DType.FP32).bytes_per_token == 2 * LLAMA_8B.bytes_per_token


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2)])
def test_num_blocks_rounds_up(num_tokens: int, num_blocks: int) -> None:
    assert LLAMA_8B.num_blocks(num_tokens) == num_blocks


def test_kv_spec_of_model_takes_its_kv_heads() -> None:
    model = ModelSpec(
        architecture="llama", num_layers=3, hidden_size=48, intermediate_size=96, num_q_heads=6, num_kv_heads=2,
        head_dim=8, vocab_size=32, max_context_len=64, norm_eps=1e-5, activation=Activation.SILU, rope=None,
        windows=(None,) * 3, tie_embeddings=True,
    )  # fmt: skip
    assert KVSpec.of(model, dtype=DType.FP16, block_size=4) == KVSpec(
        num_layers=3, num_kv_heads=2, head_dim=8, dtype=DType.FP16, block_size=4
    )
    assert model.group_size == 3

from dataclasses import replace

import pytest

from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError
from ambidex.core.ids import KVPart
from ambidex.core.kv_spec import KVOrder, KVSpec
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


@pytest.mark.parametrize(
    ("k", "v", "row_bytes", "words"),
    [
        (DType.INT8, DType.INT8, (128, 128), (1, 1)),
        (DType.INT4, DType.INT4, (64, 64), (5, 5)),
        (DType.INT8, DType.INT4, (128, 64), (1, 5)),
    ],
)
def test_kv_spec_of_integers_counts_each_part_with_its_scales(
    k: DType, v: DType, row_bytes: tuple[int, int], words: tuple[int, int]
) -> None:
    spec = replace(LLAMA_8B, dtype=k, v_dtype=v, order=KVOrder.TILES)
    assert tuple(spec.row_bytes(part) for part in KVPart) == row_bytes
    assert tuple(spec.num_scale_words(part) for part in KVPart) == words
    assert spec.bytes_per_token_layer == 8 * (sum(row_bytes) + 4 * sum(words))
    assert spec.scale_bytes_per_block == 32 * 8 * 64 * 4 * sum(words)


def test_kv_spec_of_one_format_is_the_same_however_it_is_said() -> None:
    assert replace(LLAMA_8B, v_dtype=DType.BF16) == LLAMA_8B


def test_kv_spec_of_formats_that_do_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="k=bf16,v=int4"):
        replace(LLAMA_8B, v_dtype=DType.INT4)

"""Counted weights are those of the model that would be built, in every family."""

from pathlib import Path

import pytest
import torch

from ambidex.core.dtypes import WEIGHT_BLOCKS, DType, weight_bytes
from ambidex.core.errors import ConfigError
from ambidex.cost.weights import count_weights
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec
from ambidex.kernels.cpu.quantized import BLOCKS
from ambidex.layers.linear import Linear
from ambidex.models.quantized import count_weights_bytes, find_kept
from ambidex.models.registry import build_model
from tiny_models import ALIBI_VARIANTS, VARIANTS, save_tiny_model


@pytest.mark.parametrize("variant", [*VARIANTS, *ALIBI_VARIANTS])
def test_counts_equal_the_built_model(tmp_path: Path, variant: str) -> None:
    spec = read_spec(find_model(str(save_tiny_model(variant, tmp_path)[0])))
    model = build_model(spec, device=torch.device("meta"), dtype=torch.bfloat16)
    weights = count_weights(spec, dtype=DType.BF16)
    assert weights.num_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    in_layers = [
        m for name, m in model.named_modules() if isinstance(m, Linear) and (".layers." in name or ".h." in name)
    ]
    assert weights.num_layer_numbers == sum(m.weight.numel() for m in in_layers if isinstance(m, Linear))


def test_a_quantised_file_is_counted_as_it_is_kept() -> None:
    spec = read_spec(find_model("smollm2"))
    model = build_model(spec, device=torch.device("meta"), dtype=torch.float16, activation_dtype=torch.float16)
    kept = sum(count_weights_bytes(model, find_kept(spec)).values())
    assert count_weights(spec, dtype=DType.FP16).num_bytes == kept


def test_a_named_format_counts_for_layers_and_head() -> None:
    spec = read_spec(find_model("smollm2"))
    weights = count_weights(spec, dtype=DType.FP16, kind="Q4_0")
    assert {part.kind for layer in weights.layers for part in layer.mlp.parts} == {"Q4_0"}
    assert weights.layers[0].mlp.num_bytes == 3 * 576 * 1536 * 18 // 32
    with pytest.raises(ConfigError, match="no whole blocks of Q4_K"):
        count_weights(spec, kind="Q4_K")


def test_formats_are_those_of_the_native_products() -> None:
    assert {kind: block for kind, block in WEIGHT_BLOCKS.items() if kind in BLOCKS} == dict(BLOCKS)
    assert weight_bytes("Q4_0", 33) == 36

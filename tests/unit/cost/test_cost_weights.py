"""Counted weights are those of the model that would be built, in every family."""

from pathlib import Path

import pytest
import torch

from ambidex.core.dtypes import GPU_WEIGHT_KINDS, PACKED_ROWS, WEIGHT_BLOCKS, DType, matrix_bytes, weight_bytes
from ambidex.core.errors import ConfigError
from ambidex.core.model_spec import ModelSpec
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.cost.weights import DIVIDED_ON_CPU, DIVIDED_ON_GPU, PLAIN, WHOLE_ON_CPU, Residence, count_weights
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec
from ambidex.kernels.cpu.quantized import BLOCKS, GROUP_ROWS
from ambidex.kernels.linear import LinearContext
from ambidex.kernels.reference.quantized import RECORD_BYTES
from ambidex.layers.linear import Linear
from ambidex.models.base import CausalLM
from ambidex.models.divided import DividedWeights
from ambidex.models.quantized import count_weights_bytes, find_kept
from ambidex.models.registry import build_model
from ambidex.models.site_plans import RingSizes, measure_weights, plan_sites
from quantized_files import MIXED, make_file
from tiny_models import ALIBI_VARIANTS, VARIANTS, save_tiny_model

META = torch.device("meta")


@pytest.mark.parametrize("variant", [*VARIANTS, *ALIBI_VARIANTS])
def test_counts_equal_the_built_model(tmp_path: Path, variant: str) -> None:
    spec = read_spec(find_model(str(save_tiny_model(variant, tmp_path)[0])))
    model = build_model(spec, device=torch.device("meta"), dtype=torch.bfloat16)
    weights = count_weights(spec, residence=PLAIN, dtype=DType.BF16)
    assert weights.num_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    in_layers = [
        m for name, m in model.named_modules() if isinstance(m, Linear) and (".layers." in name or ".h." in name)
    ]
    assert weights.num_layer_numbers == sum(m.weight.numel() for m in in_layers if isinstance(m, Linear))


def test_a_quantised_file_is_counted_as_it_is_kept() -> None:
    spec = read_spec(find_model("smollm2"))
    model = build_model(spec, device=torch.device("meta"), dtype=torch.float16, activation_dtype=torch.float16)
    kept = sum(count_weights_bytes(model, find_kept(spec)).values())
    assert count_weights(spec, residence=WHOLE_ON_CPU, dtype=DType.FP16).num_bytes == kept


def allocate(spec: ModelSpec, kinds: dict[str, str], split: WeightSplit, dtype: torch.dtype) -> tuple[int, CausalLM]:
    """Bytes that the loader takes for divided matrices of a model, and the model."""
    model = build_model(spec, device=META, dtype=dtype, activation_dtype=dtype, matrix_device=META)
    placement = Placement(layers=(LayerPlacement(attention=split, mlp=split),) * spec.num_layers, head=split)
    divided = DividedWeights(
        model,
        plan_sites(model, placement, chunk_bytes=2**15, number_bytes=2, kinds=kinds),
        sizes=RingSizes(chunk_bytes=2**15),
        device=torch.device("cpu"),
        dtype=dtype,
        linear=LinearContext(),
        host_linear=LinearContext(),
    )
    return sum(divided.num_bytes), model


@pytest.mark.parametrize("residence", [DIVIDED_ON_GPU, DIVIDED_ON_CPU])
@pytest.mark.parametrize(
    ("kinds", "default"),
    [({}, kind) for kind in BLOCKS] + [(MIXED, "Q4_K"), ({"attn_v": "Q8_0"}, "Q4_0"), ({"ffn_down": "Q4_1"}, "Q4_0")],
)
def test_counts_of_a_quantised_file_are_what_the_loader_of_divided_weights_allocates(
    tmp_path: Path, residence: Residence, kinds: dict[str, str], default: str
) -> None:
    spec = make_file(tmp_path / "m.gguf", kinds, default)
    kept = {name: kind for name, kind in find_kept(spec).items() if kind in residence.kinds}
    num_bytes, model = allocate(spec, kept, WeightSplit(on_gpu=0.5, on_cpu=0.25, streamed=0.25), torch.float16)
    counted = count_weights(spec, residence=residence, dtype=DType.FP16)
    divided = sum(layer.num_bytes for layer in counted.layers) + counted.head.num_bytes
    assert num_bytes == pytest.approx(divided, rel=0.03)
    whole = measure_weights(model, 2, kinds=kept, whole_kinds=kept if residence.keeps_table else {}).whole
    assert whole == counted.other_bytes
    sizes = measure_weights(
        build_model(spec, device=META, dtype=torch.float16, activation_dtype=torch.float16), 2, kinds=kept,
        whole_kinds=kept if residence.keeps_table else {},
    )  # fmt: skip
    assert [layer.attention.num_bytes for layer in counted.layers] == list(sizes.attention)
    assert [layer.mlp.num_bytes for layer in counted.layers] == list(sizes.mlp)
    assert (counted.head.num_bytes, counted.num_bytes) == (sizes.head, sizes.total)


def test_a_type_without_a_product_on_a_gpu_counts_as_plain_numbers(tmp_path: Path) -> None:
    spec = make_file(tmp_path / "m.gguf", {"ffn": "Q4_0"}, "Q4_K")
    weights = count_weights(spec, residence=DIVIDED_ON_GPU, dtype=DType.FP16)
    assert {part.kind for layer in weights.layers for part in layer.mlp.parts} == {"Q4_0"}
    assert {part.kind for layer in weights.layers for part in layer.attention.parts} == {"fp16"}
    assert weights.bytes_by_kind["Q4_0"] == 2 * matrix_bytes("Q4_0", 3 * 512, 256)
    assert set(GPU_WEIGHT_KINDS) == set(RECORD_BYTES)
    assert PACKED_ROWS == GROUP_ROWS


def test_a_named_format_counts_for_layers_and_head() -> None:
    spec = read_spec(find_model("smollm2"))
    weights = count_weights(spec, residence=WHOLE_ON_CPU, dtype=DType.FP16, kind="Q4_0")
    assert {part.kind for layer in weights.layers for part in layer.mlp.parts} == {"Q4_0"}
    assert weights.layers[0].mlp.num_bytes == 3 * 576 * 1536 * 18 // 32
    with pytest.raises(ConfigError, match="no whole blocks of Q4_K"):
        count_weights(spec, residence=WHOLE_ON_CPU, kind="Q4_K")


def test_formats_are_those_of_the_native_products() -> None:
    assert {kind: block for kind, block in WEIGHT_BLOCKS.items() if kind in BLOCKS} == dict(BLOCKS)
    assert weight_bytes("Q4_0", 33) == 36

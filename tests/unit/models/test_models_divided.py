"""Divided weights: the loader fills every piece, and what was counted is what is allocated."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ambidex.core.errors import ConfigError, InternalError, ShapeError
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.formats.hf_config import spec_from_hf
from ambidex.formats.locate import find_model
from ambidex.kernels.linear import LinearContext
from ambidex.layers.split_matrix import Piece, SplitMatrix
from ambidex.models.base import CausalLM
from ambidex.models.divided import DividedWeights
from ambidex.models.registry import build_model
from ambidex.models.site_plans import RingSizes, count_bytes, measure_weights, plan_sites
from ambidex.models.weights import load_weights, make_dummy_weights
from small_checkpoints import CONFIG, CPU, FALCON_40B, TIED, make_checkpoint

SPREAD = WeightSplit(on_gpu=0.4, on_cpu=0.3, streamed=0.3)
RING = RingSizes(chunk_bytes=4096, num_slots=3)


def placement_of(split: WeightSplit, *, head: WeightSplit | None = None) -> Placement:
    return Placement(layers=(LayerPlacement(attention=split, mlp=split),) * 2, head=head or split)


def divide(config: dict[str, object], placement: Placement) -> tuple[CausalLM, DividedWeights]:
    model = build_model(spec_from_hf(config), device=CPU, dtype=torch.float32, matrix_device=torch.device("meta"))
    linear = LinearContext()
    divided = DividedWeights(
        model,
        plan_sites(model, placement, chunk_bytes=RING.chunk_bytes, number_bytes=4),
        sizes=RING,
        device=CPU,
        dtype=torch.float32,
        linear=linear,
        host_linear=linear,
    )
    return model, divided


@pytest.mark.parametrize("config", [CONFIG, FALCON_40B], ids=["llama", "falcon"])
def test_every_piece_holds_what_the_file_holds(config: dict[str, object], tmp_path: Path) -> None:
    checkpoint = make_checkpoint(config)
    save_file(checkpoint, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, divided = divide(config, placement_of(SPREAD))
    source = find_model(str(tmp_path))
    load_weights(model, spec_from_hf(config), source, device=CPU, dtype=torch.float32, divided=divided.matrices)
    assert len(divided.matrices) > 8
    assert divided.matrices.keys() | dict(model.named_parameters()).keys() == checkpoint.keys()
    for name, matrix in divided.matrices.items():
        assert torch.equal(matrix.dense(), checkpoint[name]), name
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, checkpoint[name]), name


@pytest.mark.parametrize("config", [CONFIG, FALCON_40B], ids=["llama", "falcon"])
@pytest.mark.parametrize(
    "split",
    [SPREAD, WeightSplit(), WeightSplit(on_gpu=0.0, on_cpu=1.0), WeightSplit(on_gpu=0.0, streamed=1.0)],
    ids=["spread", "gpu", "cpu", "streamed"],
)
def test_counted_bytes_are_what_is_allocated(split: WeightSplit, config: dict[str, object]) -> None:
    skeleton = build_model(spec_from_hf(config), device=torch.device("meta"), dtype=torch.float32)
    plans = plan_sites(skeleton, placement_of(split), chunk_bytes=RING.chunk_bytes, number_bytes=4)
    counted = count_bytes(plans, RING, 4)
    _, divided = divide(config, placement_of(split))
    assert divided.num_bytes == (counted.on_gpu, counted.on_cpu + counted.streamed)
    assert sum(slot.nbytes for slot in divided.ring.slots) == counted.ring
    sizes = measure_weights(skeleton, 4)
    assert sizes.total == sum(parameter.nbytes for parameter in skeleton.parameters())
    pieces = sum(piece.data.nbytes for matrix in divided.matrices.values() for piece in matrix.pieces)
    assert pieces == sizes.total - sizes.whole
    assert (
        0
        <= counted.on_gpu + counted.on_cpu + counted.streamed - pieces
        < 512 * sum(1 + len(plan.cuts.on_cpu) + len(plan.cuts.streamed) for plan in plans)
    )


def test_dummy_weights_of_divided_matrices_are_random_everywhere() -> None:
    model, divided = divide(CONFIG, placement_of(SPREAD))
    make_dummy_weights(model, spec_from_hf(CONFIG), seed=0, device=CPU, dtype=torch.float32, divided=divided.matrices)
    for name, matrix in divided.matrices.items():
        for piece in matrix.pieces:
            assert 0.005 < piece.data.std() < 0.04, name


def test_a_table_that_is_shared_is_not_divided() -> None:
    model, divided = divide(TIED, placement_of(SPREAD, head=WeightSplit()))
    assert "lm_head.weight" not in divided.matrices
    assert isinstance(model.lm_head.weight, torch.nn.Parameter)
    with pytest.raises(ConfigError, match="divides the last projection"):
        divide(TIED, placement_of(SPREAD))


def test_a_placement_for_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 1 layers: the model has 2"):
        divide(CONFIG, Placement(layers=(LayerPlacement(mlp=SPREAD),)))


def test_a_layer_whose_group_computes_does_not_answer_alone() -> None:
    model, _ = divide(CONFIG, placement_of(SPREAD))
    with pytest.raises(InternalError, match="without its group"):
        model.get_submodule("model.layers.0.self_attn.q_proj")(torch.zeros(1, 32))


def test_pieces_that_are_not_the_whole_are_refused() -> None:
    piece = Piece(0, torch.zeros(3, 4))
    with pytest.raises(ShapeError, match="end at 3"):
        SplitMatrix((5, 4), [piece], axis=0)
    with pytest.raises(ShapeError, match="does not continue at 3"):
        SplitMatrix((5, 4), [piece, Piece(4, torch.zeros(1, 4))], axis=0)

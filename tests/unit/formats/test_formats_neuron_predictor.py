"""Trained predictors in GGUF and safetensors files: what is read was written, and what does not fit is named."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from ambidex.core.errors import ModelFileError
from ambidex.core.model_spec import ModelSpec
from ambidex.formats.neuron_predictor import THRESHOLD_KEY, PredictorFile
from gguf_writer import make_gguf, quantize
from unit_specs import make_spec

SPEC = dataclasses.replace(make_spec(), num_layers=2, hidden_size=64, intermediate_size=96)
RANK = 32
Matrices = dict[str, NDArray[np.float32]]


def matrices(spec: ModelSpec = SPEC) -> Matrices:
    drawn = np.random.default_rng(0)
    found = {}
    for layer in range(spec.num_layers):
        found[f"blk.{layer}.fc1.weight"] = drawn.normal(size=(RANK, spec.hidden_size)).astype(np.float32)
        found[f"blk.{layer}.fc2.weight"] = drawn.normal(size=(spec.intermediate_size, RANK)).astype(np.float32)
    return found


def write_gguf(folder: Path, tensors: Mapping[str, NDArray[np.float32]], kind: str = "F32", **metadata: object) -> Path:
    path = folder / "predictor.gguf"
    path.write_bytes(
        make_gguf(
            {"general.architecture": "llama", **metadata}, {name: quantize(v, kind) for name, v in tensors.items()}
        )
    )
    return path


def write_safetensors(folder: Path, tensors: Mapping[str, NDArray[np.float32]], dtype: torch.dtype) -> Path:
    path = folder / "predictor.safetensors"
    save_file({name: torch.from_numpy(values).to(dtype).contiguous() for name, values in tensors.items()}, path)
    return path


def assert_read(file: PredictorFile, wanted: Matrices, tolerance: float) -> None:
    assert file.ranks == (RANK, RANK)
    for layer in range(SPEC.num_layers):
        for found, place in zip(file.matrices(layer), (1, 2), strict=True):
            assert found.dtype == np.float32
            assert found.flags.writeable
            np.testing.assert_allclose(found, wanted[f"blk.{layer}.fc{place}.weight"], atol=tolerance, rtol=0)


@pytest.mark.parametrize(("kind", "tolerance"), [("F32", 0.0), ("F16", 2e-3), ("Q8_0", 3e-2)])
def test_gguf_gives_what_was_written(kind: str, tolerance: float, tmp_path: Path) -> None:
    wanted = matrices()
    assert_read(PredictorFile(write_gguf(tmp_path, wanted, kind), SPEC), wanted, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.0), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_safetensors_give_what_was_written(dtype: torch.dtype, tolerance: float, tmp_path: Path) -> None:
    wanted = matrices()
    file = PredictorFile(write_safetensors(tmp_path, wanted, dtype), SPEC)
    assert_read(file, wanted, tolerance)
    assert file.threshold == 0.0


def test_a_file_may_say_its_threshold_and_be_the_whole_model(tmp_path: Path) -> None:
    wanted = matrices()
    model = {"token_embd.weight": np.ones((4, 64), dtype=np.float32), **wanted}
    file = PredictorFile(write_gguf(tmp_path, model, **{THRESHOLD_KEY: 0.25}), SPEC)
    assert file.threshold == 0.25
    assert_read(file, wanted, 0.0)


def changed(**changes: NDArray[np.float32] | None) -> Matrices:
    all_matrices = matrices() | {name.replace("_", "."): values for name, values in changes.items()}
    return {name: values for name, values in all_matrices.items() if values is not None}


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (changed(blk_1_fc2_weight=None), "lacks blk.1.fc2.weight: a predictor has two matrices in every layer"),
        ({}, "lacks blk.0.fc1.weight, blk.0.fc2.weight, blk.1.fc1.weight, blk.1.fc2.weight"),
        (changed(blk_7_fc1_weight=np.ones((4, 64), np.float32)), "layers 7: the model has the layers 0 to 1"),
        (
            changed(blk_0_fc1_weight=np.ones((RANK, 65), np.float32)),
            "blk.0.fc1.weight has the shape [32, 65]: for this model fc1 must be [r, 64] and fc2 [96, r]",
        ),
        (changed(blk_0_fc2_weight=np.ones((96, 31), np.float32)), "blk.0.fc2.weight has the shape [96, 31]"),
        (changed(blk_0_fc1_weight=np.ones(64, np.float32)), "blk.0.fc1.weight has the shape [64]"),
        (changed(other_weight=np.ones(4, np.float32)), "holds other.weight: predictors are blk.N.fc1.weight"),
    ],
)
def test_what_does_not_fit_the_model_is_named(tensors: Matrices, said: str, tmp_path: Path) -> None:
    for path in (write_safetensors(tmp_path, tensors, torch.float32), write_gguf(tmp_path, tensors)):
        with pytest.raises(ModelFileError) as caught:
            PredictorFile(path, SPEC)
        assert said in str(caught.value)
        assert str(path) in str(caught.value)


def test_integers_and_what_is_no_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "predictor.safetensors"
    save_file({name: torch.ones(v.shape, dtype=torch.int8) for name, v in matrices().items()}, path)
    with pytest.raises(ModelFileError, match="has the dtype I8: must be one of F32, F16, BF16"):
        PredictorFile(path, SPEC)
    with pytest.raises(ModelFileError):
        PredictorFile(tmp_path / "none.gguf", SPEC)
    with pytest.raises(ModelFileError, match="must be a number"):
        PredictorFile(write_gguf(tmp_path, matrices(), **{THRESHOLD_KEY: "much"}), SPEC)

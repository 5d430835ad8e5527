"""Filling a model from GGUF and keeping its matrices quantised: they mean what dequantised ones do."""

import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch import nn

from ambidex.core.errors import WeightsError
from ambidex.core.model_spec import ModelSpec
from ambidex.formats.gguf import GGUFFile
from ambidex.formats.locate import find_model
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.quantized import BLOCKS, QuantizedMatrix
from ambidex.kernels.linear import LinearContext
from ambidex.models import weights
from ambidex.models.base import CausalLM
from ambidex.models.quantized import count_weights_bytes, describe_kept, find_kept
from ambidex.models.registry import build_model
from ambidex.models.weights import load_weights
from dense_attention import DenseAttention
from gguf_writer import Tensor as GGUFTensor
from gguf_writer import make_gguf
from quantized_files import MIXED, VOCAB, WIDTH, make_file
from small_checkpoints import CPU

META = torch.device("meta")
MIB = 2**20
Q_PROJ, EMBEDDING, HEAD = "model.layers.0.self_attn.q_proj", "model.embed_tokens", "lm_head"


def load(path: Path, spec: ModelSpec, *, keeps: bool, dtype: torch.dtype = torch.float32) -> CausalLM:
    model = build_model(
        spec,
        device=CPU,
        dtype=dtype,
        activation_dtype=torch.float32,
        linear=LinearContext(native.ThreadPool(2)) if keeps else None,
        matrix_device=META if keeps else None,
    )
    load_weights(model, spec, find_model(str(path)), device=CPU, dtype=dtype, keeps_quantized=keeps)
    return model


def weight_of(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name).weight


def run(model: CausalLM, spec: ModelSpec) -> torch.Tensor:
    attention = DenseAttention(spec)
    attention.begin([9])
    return model.logits(model(torch.arange(9) * 5 % VOCAB, torch.arange(9), attention))


@pytest.mark.parametrize(
    ("kinds", "default"), [({}, kind) for kind in BLOCKS] + [(MIXED, "Q4_K"), ({"attn_q": "BF16"}, "Q4_0")]
)
def test_a_model_that_keeps_them_computes_as_one_with_dequantised_weights(
    tmp_path: Path, kinds: Mapping[str, str], default: str
) -> None:
    path = tmp_path / "m.gguf"
    spec = make_file(path, kinds, default)
    kept, dense = load(path, spec, keeps=True), load(path, spec, keeps=False)
    expected = run(dense, spec)
    assert (run(kept, spec) - expected).abs().max() < 1e-3 * expected.abs().max()
    names = find_kept(spec)
    assert names
    for name, parameter in dense.named_parameters():
        weight = weight_of(kept, name.removesuffix(".weight"))
        assert isinstance(weight, QuantizedMatrix) == (name in names)
        values = weight.dense() if isinstance(weight, QuantizedMatrix) else weight
        assert torch.equal(values, parameter), name


@pytest.mark.parametrize("default", ["Q8_0", "Q4_K"])
def test_kept_bytes_are_those_that_are_counted(tmp_path: Path, default: str) -> None:
    path = tmp_path / "m.gguf"
    spec = make_file(path, {"attn_q": "BF16", "token_embd": "Q8_0"}, default)
    model = load(path, spec, keeps=True, dtype=torch.float16)
    skeleton = build_model(spec, device=META, dtype=torch.float16, activation_dtype=torch.float32)
    found = {
        id(weight): weight for module in model.modules() if (weight := getattr(module, "weight", None)) is not None
    }
    num_bytes = sum(getattr(weight, "data", weight).nbytes for weight in found.values())
    assert sum(count_weights_bytes(skeleton, find_kept(spec)).values()) == num_bytes
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("is_stored_twice", [False, True])
def test_a_tied_table_is_one_matrix(tmp_path: Path, is_stored_twice: bool) -> None:
    path = tmp_path / "m.gguf"
    spec = make_file(path, {}, "Q4_1", tied=True)
    assert spec.tie_embeddings
    if is_stored_twice:
        content = GGUFFile(path)
        tensors = {
            name: GGUFTensor(info.shape[::-1], int(GGMLQuantizationType[info.dtype]), bytes(content.read(name)))
            for name, info in content.tensors.items()
        }
        tensors["output.weight"] = tensors["token_embd.weight"]
        path.write_bytes(make_gguf(content.metadata, tensors))
    model = load(path, spec, keeps=True)
    assert weight_of(model, HEAD) is weight_of(model, EMBEDDING)
    assert isinstance(weight_of(model, HEAD), QuantizedMatrix)
    assert torch.equal(run(model, spec), run(model, spec))


def test_a_tied_table_that_differs_from_the_head_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    make_file(path, {}, "Q4_1")
    tied = make_file(tmp_path / "tied.gguf", {}, "Q4_1", tied=True)
    with pytest.raises(WeightsError, match="differs from"):
        load(path, tied, keeps=True)


def test_large_matrices_are_packed_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    spec = make_file(path, {}, "Q4_1")
    whole = weight_of(load(path, spec, keeps=True), Q_PROJ)
    monkeypatch.setattr(weights, "_CHUNK_BYTES", 4 * WIDTH * 7)  # seven rows: no whole groups
    tracemalloc.start()
    model = load(path, spec, keeps=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(weight_of(model, Q_PROJ).data, whole.data)
    assert peak < MIB


def test_what_is_kept_and_what_is_not_are_said(tmp_path: Path) -> None:
    spec = make_file(tmp_path / "m.gguf", MIXED, "Q4_K")
    assert describe_kept(spec) == ("Q4_K, Q5_K, Q6_K and Q8_0", "")
    other = replace(spec, quantized=(("blk.0.attn_q.weight", "Q3_K"),))
    assert describe_kept(other) == ("", "Q3_K")
    assert find_kept(other) == {}

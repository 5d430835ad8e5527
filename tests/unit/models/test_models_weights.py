"""Filling a model from safetensors, and with random numbers."""

import json
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ambidex.core.errors import InternalError, ModelFileError, UnsupportedModelError, WeightsError
from ambidex.formats.hf_config import spec_from_hf
from ambidex.formats.locate import find_model
from ambidex.models.base import CausalLM
from ambidex.models.registry import build_model
from ambidex.models.weights import load_weights, make_dummy_weights
from small_checkpoints import (
    CONFIG,
    CPU,
    FALCON,
    FALCON_40B,
    Q_PROJ,
    TIED,
    OneMatrix,
    assert_same,
    make_checkpoint,
    make_model,
)

MIB = 2**20
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def save(
    folder: Path, checkpoint: Mapping[str, Tensor], config: Mapping[str, Any] = CONFIG, name: str = "model"
) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(checkpoint), folder / f"{name}.safetensors")


def load(
    folder: Path, config: Mapping[str, Any] = CONFIG, dtype: torch.dtype = torch.float32, **options: Any
) -> CausalLM:
    spec = spec_from_hf(config)
    model = make_model(spec, dtype)
    load_weights(model, spec, find_model(str(folder)), device=CPU, dtype=dtype, **options)
    return model


def test_load_when_one_file_fills_every_parameter(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(CONFIG)
    save(tmp_path, checkpoint)
    assert_same(load(tmp_path), checkpoint)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_load_when_formats_differ_converts(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    checkpoint = make_checkpoint(CONFIG, stored)
    save(tmp_path, checkpoint)
    assert_same(load(tmp_path, dtype=wanted), {name: values.to(wanted) for name, values in checkpoint.items()})


def cut(checkpoint: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    names = sorted(checkpoint)
    return {name: checkpoint[name] for name in names[::2]}, {name: checkpoint[name] for name in names[1::2]}


def test_load_when_sharded_with_index_reads_all_shards(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(CONFIG)
    for number, shard in enumerate(cut(checkpoint)):
        save(tmp_path, shard, name=f"part-{number}")
    save(tmp_path, {"stray": torch.ones(1)}, name="not-in-the-index")
    shards = {name: f"part-{number}.safetensors" for number, shard in enumerate(cut(checkpoint)) for name in shard}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert_same(load(tmp_path), checkpoint)


def test_load_when_several_files_without_index_joins_them(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(CONFIG)
    for number, shard in enumerate(cut(checkpoint)):
        save(tmp_path, shard, name=f"part-{number}")
    assert_same(load(tmp_path), checkpoint)


def test_load_when_two_files_hold_same_tensor_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(CONFIG)
    save(tmp_path, checkpoint, name="a")
    save(tmp_path, {Q_PROJ: checkpoint[Q_PROJ]}, name="b")
    with pytest.raises(WeightsError, match=rf"b\.safetensors: tensor '{Q_PROJ}' is there a second time"):
        load(tmp_path)


def test_load_when_shard_is_missing_names_it(tmp_path: Path) -> None:
    save(tmp_path, make_checkpoint(CONFIG), name="part-0")
    index = {"weight_map": {"a": "part-0.safetensors", "b": "part-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=r"part-1\.safetensors cannot be read: No such file"):
        load(tmp_path)


def test_load_when_there_are_no_files_points_to_dummy_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match=r"no \.safetensors files .*`load_format` dummy"):
        load(tmp_path)


def test_load_when_tensors_do_not_fit_names_all_three_kinds(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(CONFIG)
    del checkpoint[Q_PROJ]
    checkpoint["model.norm.weight"] = torch.ones(31)
    checkpoint["model.extra"] = torch.ones(1)
    save(tmp_path, checkpoint)
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    assert f"1 missing ({Q_PROJ})" in str(caught.value)
    assert "1 unexpected ('model.extra')" in str(caught.value)
    assert "1 mis-shaped (model.norm.weight [31] instead of [32])" in str(caught.value)


def test_load_when_many_are_missing_names_eight_and_counts_all(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(CONFIG)
    save(tmp_path, {EMBEDDING: checkpoint[EMBEDDING]})
    with pytest.raises(WeightsError) as caught:
        load(tmp_path)
    message = str(caught.value)
    assert f"{len(checkpoint) - 1} missing (" in message
    assert message.count(".weight") == 8
    assert f"and {len(checkpoint) - 9} more" in message


def test_load_when_tensors_do_not_fit_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, {**make_checkpoint(CONFIG), "extra": torch.ones(1)})
    spec = spec_from_hf(CONFIG)
    model = make_model(spec)
    with pytest.raises(WeightsError):
        load_weights(model, spec, find_model(str(tmp_path)), device=CPU, dtype=torch.float32)
    assert all(bool((parameter == -777).all()) for parameter in model.parameters())


def test_load_when_constants_are_stored_ignores_them(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(CONFIG)
    constants = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "transformer.h.0.attn.masked_bias": torch.ones(()),
    }
    save(tmp_path, {**checkpoint, **constants})
    assert_same(load(tmp_path), checkpoint)


@pytest.mark.parametrize(("config", "prefix"), [(CONFIG, "model."), (FALCON, "transformer.")])
def test_load_when_base_model_was_saved_finds_names_without_prefix(
    tmp_path: Path, config: dict[str, Any], prefix: str
) -> None:
    checkpoint = make_checkpoint(config)
    save(tmp_path, {name.removeprefix(prefix): values for name, values in checkpoint.items()}, config)
    assert_same(load(tmp_path, config), checkpoint)


def test_load_when_numbers_are_integers_names_tensor_and_format(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(CONFIG)
    checkpoint[Q_PROJ] = checkpoint[Q_PROJ].to(torch.int8)
    save(tmp_path, checkpoint)
    with pytest.raises(UnsupportedModelError, match=rf"'{Q_PROJ}' has the dtype I8: supported are F32, F16, BF16"):
        load(tmp_path)


def test_load_when_progress_is_wanted_counts_bytes_up_to_all(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(CONFIG, torch.float16)
    save(tmp_path, checkpoint)
    calls: list[tuple[int, int]] = []
    load(tmp_path, progress=lambda done, total: calls.append((done, total)))
    total = sum(values.nbytes for values in checkpoint.values())
    assert [total for _, total in calls] == [total] * len(checkpoint)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert calls[-1] == (total, total)


def test_load_when_tensor_is_large_reads_it_in_pieces(tmp_path: Path) -> None:
    values = torch.arange(5000 * 4096, dtype=torch.float32).view(5000, 4096)  # 78 MiB
    save(tmp_path, {"weight": values})
    model = OneMatrix(5000, 4096)
    source, spec = find_model(str(tmp_path)), spec_from_hf(CONFIG)
    tracemalloc.start()
    load_weights(model, spec, source, device=CPU, dtype=torch.float32)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(model.weight, values)
    assert peak < 33 * MIB


def test_load_when_tied_and_head_is_absent_shares_storage(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(TIED)
    assert HEAD not in checkpoint
    save(tmp_path, checkpoint, TIED)
    model = load(tmp_path, TIED)
    assert model.get_parameter(HEAD).data_ptr() == model.get_parameter(EMBEDDING).data_ptr()
    assert torch.equal(model.get_parameter(HEAD), checkpoint[EMBEDDING])


def test_load_when_tied_and_head_alone_is_there_takes_it(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(TIED)
    checkpoint[HEAD] = checkpoint.pop(EMBEDDING)
    save(tmp_path, checkpoint, TIED)
    assert torch.equal(load(tmp_path, TIED).get_parameter(EMBEDDING), checkpoint[HEAD])


def test_load_when_tied_and_both_are_equal_accepts_them(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(TIED)
    save(tmp_path, {**checkpoint, HEAD: checkpoint[EMBEDDING].clone()}, TIED)
    assert_same(load(tmp_path, TIED), checkpoint)


def test_load_when_tied_and_both_differ_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(TIED)
    save(tmp_path, {**checkpoint, HEAD: checkpoint[EMBEDDING] + 1}, TIED)
    with pytest.raises(WeightsError, match=r"differs from .* set tie_word_embeddings to false"):
        load(tmp_path, TIED)


def test_load_when_not_tied_and_head_is_absent_names_it(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(CONFIG)
    del checkpoint[HEAD]
    save(tmp_path, checkpoint)
    with pytest.raises(WeightsError, match=rf"1 missing \({HEAD}\)"):
        load(tmp_path)


class Tied(nn.Module):
    """Two names of one parameter, as a model makes them, on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5, bias=False, device="meta"), nn.Linear(3, 5, bias=False, device="meta")
        self.second.weight = self.first.weight


def test_load_when_parameters_are_meta_makes_them_and_keeps_ties(tmp_path: Path) -> None:
    values = torch.randn(5, 3)
    save(tmp_path, {"first.weight": values})
    model = Tied()
    load_weights(model, spec_from_hf(CONFIG), find_model(str(tmp_path)), device=CPU, dtype=torch.bfloat16)
    assert model.second.weight is model.first.weight
    assert torch.equal(model.first.weight, values.bfloat16())


def test_load_when_buffer_is_meta_refuses_to_leave_it(tmp_path: Path) -> None:
    save(tmp_path, {"first.weight": torch.randn(5, 3)})
    model = Tied()
    model.register_buffer("table", torch.empty(2, device="meta"))
    with pytest.raises(InternalError, match="table"):
        load_weights(model, spec_from_hf(CONFIG), find_model(str(tmp_path)), device=CPU, dtype=torch.float32)


def make_dummy(seed: int, config: Mapping[str, Any] = CONFIG) -> CausalLM:
    spec = replace(spec_from_hf(config), qkv_bias=True)
    model = make_model(spec)
    make_dummy_weights(model, spec, seed=seed, device=CPU, dtype=torch.float32)
    return model


def test_dummy_when_seed_is_same_gives_same_numbers() -> None:
    assert_same(make_dummy(7), dict(make_dummy(7).named_parameters()))


def test_dummy_when_seed_differs_gives_other_numbers() -> None:
    assert not torch.equal(make_dummy(7).get_parameter(Q_PROJ), make_dummy(8).get_parameter(Q_PROJ))


def test_dummy_when_made_has_the_stated_spread_and_norms_of_one() -> None:
    for name, parameter in make_dummy(7, FALCON_40B).named_parameters():
        if "ln_" in name:
            assert torch.equal(parameter, torch.full_like(parameter, 0.0 if name.endswith("bias") else 1.0)), name
        elif parameter.numel() > 500:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.2), name


def test_dummy_scores_spread_as_stated_and_heads_of_a_group_agree_by_half() -> None:
    wide = {**CONFIG, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    model = make_dummy(7, wide)
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))  # rms 1, as behind a norm
    q = (x @ model.get_parameter(Q_PROJ).T).view(64, 4, 2, 64).permute(1, 2, 0, 3)  # [Hkv, G, T, D]
    k = (x @ model.get_parameter(Q_PROJ.replace("q_proj", "k_proj")).T).view(64, 4, 64).transpose(0, 1)
    scores = q @ k.transpose(1, 2)[:, None] / 64**0.5
    assert scores.std().item() == pytest.approx(4.5, rel=0.1)
    first, second = (scores[:, head].flatten() for head in (0, 1))
    assert torch.corrcoef(torch.stack((first, second)))[0, 1].item() == pytest.approx(0.5, abs=0.1)
    across = torch.corrcoef(torch.stack((scores[0, 0].flatten(), scores[1, 0].flatten())))[0, 1].item()
    assert abs(across) < 0.1


def test_dummy_when_parameters_are_meta_makes_them() -> None:
    model = Tied()
    make_dummy_weights(model, spec_from_hf(CONFIG), seed=0, device=CPU, dtype=torch.float16)
    assert model.second.weight is model.first.weight
    assert (model.first.weight.device, model.first.weight.dtype) == (CPU, torch.float16)


def test_load_when_a_number_does_not_fit_into_fp16_names_the_tensor(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(CONFIG)
    checkpoint[Q_PROJ][1, 2] = -7e4
    save(tmp_path, checkpoint)
    with pytest.raises(WeightsError, match=rf"{Q_PROJ} holds 70000, beyond the 65504 of fp16: use `dtype` bf16"):
        load(tmp_path, dtype=torch.float16)


def test_load_when_vectors_have_a_format_of_their_own_keeps_them_in_it(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(CONFIG)
    save(tmp_path, checkpoint)
    spec = spec_from_hf(CONFIG)
    model = build_model(spec, device=CPU, dtype=torch.bfloat16, activation_dtype=torch.float32)
    load_weights(model, spec, find_model(str(tmp_path)), device=CPU, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.bfloat16 if parameter.dim() == 2 else torch.float32)
        assert torch.equal(parameter, checkpoint[name].to(parameter.dtype))

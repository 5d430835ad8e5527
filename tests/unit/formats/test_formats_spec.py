"""From the files of a model to its ModelSpec."""

import json
from pathlib import Path

import pytest

from ambidex.core.errors import ModelFileError
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 8, "vocab_size": 131, "max_position_embeddings": 512, "eos_token_id": 2,
}  # fmt: skip


def write_folder(tmp_path: Path, generation: object = None) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return str(tmp_path)


def test_read_spec_when_folder_reads_its_config(tmp_path: Path) -> None:
    spec = read_spec(find_model(write_folder(tmp_path)))
    assert (spec.hidden_size, spec.eos_ids) == (64, (2,))


@pytest.mark.parametrize(("eos", "expected"), [([9, 2], (2, 9)), (9, (2, 9)), (None, (2,))])
def test_read_spec_when_generation_config_has_eos_merges_them(
    tmp_path: Path, eos: object, expected: tuple[int, ...]
) -> None:
    assert read_spec(find_model(write_folder(tmp_path, {"eos_token_id": eos}))).eos_ids == expected


def test_read_spec_when_generation_config_is_corrupt_names_it(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"generation_config\.json: eos_token_id is 'x'"):
        read_spec(find_model(write_folder(tmp_path, {"eos_token_id": "x"})))


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"a": 1, "a": 2}', b"\xff", b"[" * 100_000])
def test_read_spec_when_config_is_no_object_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_spec(find_model(str(tmp_path)))


def test_read_spec_when_smollm2_reads_the_real_file() -> None:
    spec = read_spec(find_model("smollm2"))
    assert (spec.architecture, spec.num_layers, spec.hidden_size, spec.intermediate_size) == ("llama", 30, 576, 1536)
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (9, 3, 64, 49152)
    assert (spec.max_context_len, spec.tie_embeddings, spec.bos_id, spec.eos_ids) == (8192, True, 1, (2,))
    assert spec.rope is not None
    assert (spec.rope.theta, spec.rope.dim) == (100000.0, 64)


def test_read_spec_when_generation_config_is_a_folder_says_so(tmp_path: Path) -> None:
    # Bug: whatever was no regular file counted as absent, and the end of turn was lost.
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(ModelFileError, match=r"generation_config\.json is a folder: it must be a file"):
        read_spec(find_model(write_folder(tmp_path)))

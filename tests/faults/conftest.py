"""One tiny model for all fault tests."""

from pathlib import Path

import pytest

from tiny_engine import make_engine_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("faults"))

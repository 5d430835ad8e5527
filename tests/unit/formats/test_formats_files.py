"""What has the name of a model's file without being one."""

import os
from pathlib import Path

import pytest

from ambidex.core.errors import ModelFileError
from ambidex.formats.files import has_file


def test_has_file_when_nothing_is_there_is_false(tmp_path: Path) -> None:
    assert not has_file(tmp_path / "x.json")


def test_has_file_when_link_leads_to_a_file_is_true(tmp_path: Path) -> None:
    (tmp_path / "blob").touch()
    (tmp_path / "x.json").symlink_to("blob")
    assert has_file(tmp_path / "x.json")


def test_has_file_when_folder_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is a folder: it must be a file"):
        has_file(tmp_path)


def test_has_file_when_pipe_says_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(ModelFileError, match=r"x\.json is a pipe, socket or device"):
        has_file(tmp_path / "x.json")


def test_has_file_when_link_leads_nowhere_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.json").symlink_to("blob")
    with pytest.raises(ModelFileError, match=r"x\.json is a symbolic link that leads nowhere"):
        has_file(tmp_path / "x.json")


def test_has_file_when_link_leads_to_itself_says_so(tmp_path: Path) -> None:
    (tmp_path / "x.json").symlink_to("x.json")
    with pytest.raises(ModelFileError, match=r"x\.json cannot be read: Too many levels of symbolic links"):
        has_file(tmp_path / "x.json")

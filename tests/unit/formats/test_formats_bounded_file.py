"""Files without an end are refused, not read until no memory is left."""

import io
import os
from pathlib import Path

import pytest

from ambidex.cli.config_file import read_config_file
from ambidex.cli.source import read_prompt_file
from ambidex.core.errors import ConfigError, ModelFileError, RequestError
from ambidex.eval.items import read_items
from ambidex.eval.run import read_text
from ambidex.formats import json_file
from ambidex.formats.bounded_file import MAX_TEXT_BYTES, read_file, read_stream, read_text_file

ENDLESS = Path("/dev/zero")


def test_a_file_of_just_the_limit_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"four")
    assert read_file(path, max_bytes=4) == b"four"
    with pytest.raises(OSError, match="more than 3 B"):
        read_file(path, max_bytes=3)


def test_a_stream_is_read_one_byte_past_the_limit_at_most() -> None:
    stream = io.BytesIO(b"0123456789")
    with pytest.raises(OSError, match="more than 4 B"):
        read_stream(stream, max_bytes=4)
    assert stream.tell() == 5


def test_an_endless_configuration_file_is_the_users_mistake() -> None:
    """It was read until the system killed the process."""
    with pytest.raises(ConfigError, match=r"configuration file /dev/zero cannot be read: .*more than 16.0 MiB"):
        read_config_file(ENDLESS)


def test_an_endless_prompt_file_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ambidex.cli.source._MAX_PROMPT_BYTES", 1000)
    with pytest.raises(RequestError, match=r"--file /dev/zero cannot be read: it has more than 1000 B"):
        read_prompt_file(ENDLESS)


def test_an_endless_file_in_a_models_folder_is_a_bad_model_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device says that it has 0 bytes."""
    monkeypatch.setattr(json_file, "_MAX_BYTES", 1000)
    path = tmp_path / "config.json"
    path.symlink_to(ENDLESS)
    with pytest.raises(ModelFileError, match="more than 1000 B"):
        json_file.read_json_object(path)


def test_an_endless_text_to_measure_with_is_the_users_mistake(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a\r\nb\rc\n")
    assert read_text_file(path) == "a\nb\nc\n"
    os.truncate(path, MAX_TEXT_BYTES + 1)  # a hole: nothing of it is read
    for read in (read_text, read_items):
        with pytest.raises(ConfigError, match=r"text cannot be read as UTF-8 text: .*more than 256.0 MiB"):
            read(path)

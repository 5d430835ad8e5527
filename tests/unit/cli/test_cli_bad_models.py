"""A wrong model or too little memory, against the real engine; no weights are read."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from ambidex.cli.main import AmbidexCommand
from ambidex.formats.locate import find_model


def refuse(*args: str) -> str:
    """The error line of a `generate` that is the user's mistake."""
    result = CliRunner().invoke(AmbidexCommand(), ["generate", *args])
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr
    assert result.stderr.startswith("error: ")
    return result.stderr


def test_model_that_is_not_there_is_refused() -> None:
    assert "/no/such/model" in refuse("/no/such/model", "p")


@pytest.mark.parametrize("name", ["notes.txt", "notes.gguf"])
def test_file_that_is_no_model_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text("These are my notes. " * 100)
    assert str(file) in refuse(str(file), "p")


def test_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    assert "config.json" in refuse(str(tmp_path), "p")


@pytest.mark.parametrize("size", [0, 3, 100, 1 << 20, 50 << 20])
def test_truncated_gguf_is_refused(tmp_path: Path, size: int) -> None:
    file = tmp_path / "short.gguf"
    with find_model("smollm2").files[0].open("rb") as whole:
        file.write_bytes(whole.read(size))
    assert str(file) in refuse(str(file), "p")


def test_budget_too_small_for_the_model_says_what_is_needed() -> None:
    error = refuse("smollm2", "p", "--device", "cpu", "--gpu-memory", "1MiB")
    assert "--gpu-memory 1.0 MiB is too small" in error
    assert "give at least" in error


def test_context_limit_above_the_models_is_refused() -> None:
    error = refuse("smollm2", "p", "--device", "cpu", "--max-context-len", "100000")
    assert "--max-context-len is 100000" in error

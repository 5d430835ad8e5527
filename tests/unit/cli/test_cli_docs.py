from pathlib import Path

import pytest

from ambidex.cli.main import AmbidexCommand
from ambidex.cli.reference import fill_tables, main

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"


def test_page_has_the_present_settings(tmp_path: Path) -> None:
    copy = tmp_path / "cli.md"
    copy.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    main(str(copy))
    assert copy.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8"), (
        "run: python -m ambidex.cli.reference docs/cli.md"
    )


def test_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has no line <!-- engine settings"):
        fill_tables("# Another page")


def test_page_names_every_verb() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert [verb for verb in AmbidexCommand().commands if f"`ambidex {verb}" not in text] == []

"""Writes the tables of `docs/cli.md` from the settings themselves: `python -m ambidex.cli.reference docs/cli.md`."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ambidex.cli.settings import FLAG_SETTINGS, Owner, Setting
from ambidex.core.config import flag_name

START: Final = "<!-- {owner} settings: written by python -m ambidex.cli.reference docs/cli.md -->"
END: Final = "<!-- end of {owner} settings -->"


def fill_tables(text: str) -> str:
    """Put the present tables between the marks of a page.

    Raises:
        ValueError: a mark is missing.
    """
    for owner in Owner:
        start, end = START.format(owner=owner), END.format(owner=owner)
        before, _, rest = _split(text, start)
        _, _, after = _split(rest, end)
        rows = "\n".join(_table(setting for setting in FLAG_SETTINGS if setting.owner is owner))
        text = f"{before}{start}\n{rows}\n{end}{after}"
    return text


def _split(text: str, mark: str) -> tuple[str, str, str]:
    if mark not in text:
        raise ValueError(f"the page has no line {mark}")
    return text.partition(mark)


def _table(settings: Iterable[Setting]) -> Iterable[str]:
    yield "| flag | value | default | meaning |"
    yield "| --- | --- | --- | --- |"
    for setting in settings:
        value = "" if setting.is_switch else f"`{setting.metavar}`".replace("|", r"\|")
        flag = flag_name(setting.name)
        shown = f"`{flag}`, `--no-{flag[2:]}`" if setting.is_switch else f"`{flag}`"
        yield f"| {shown} | {value} | {setting.default_text} | {setting.help} |"


def main(path: str) -> None:
    """Write the tables into a page."""
    page = Path(path)
    page.write_text(fill_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])

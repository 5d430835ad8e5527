"""Lists of numbers on the command line."""

from typing import Any, Final

import click

from ambidex.core.errors import ConfigError
from ambidex.core.units import parse_size

MAX_COUNT: Final = 1 << 40
"""Of tokens, requests and steps: far above any machine, far below what a number of 64 bits holds."""


class CountList(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """`512,2K`: numbers of at least 1, K and M for 1024 and 1024²."""

    name = "list"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Read the numbers; each counts once, in the given order.

        Raises:
            click.UsageError: a word is no such number.
        """
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(dict.fromkeys(parse_size(word) for word in value.split(",")))
        except ConfigError:
            counts = ()
        if not counts or not 1 <= min(counts) <= max(counts) <= MAX_COUNT:
            self.fail(f"{value[:60]!r} is no list of numbers from 1, such as 512,2K", param, ctx)
        return counts


class BudgetList(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """`all,4K`: numbers of tokens, or what the engine chooses."""

    name = "list"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int | None, ...]:  # fmt: skip
        """Read the words; each counts once.

        Raises:
            click.UsageError: one is neither a number nor `all`.
        """
        if isinstance(value, tuple):
            return value
        try:
            return tuple(dict.fromkeys(None if word == "all" else parse_size(word) for word in value.split(",")))
        except ConfigError:
            self.fail(f"{value[:60]!r} is no list of numbers of tokens or `all`, such as all,4K", param, ctx)

"""How one value of a setting is read, wherever it is written: as text (flag, variable), in TOML (file) or in JSONL.

A reader takes what was written and raises ValueError with the words that follow "… is <value>: ".
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, Final

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from ambidex.cli.source import parse_json, quote
from ambidex.core.errors import ConfigError, RequestError
from ambidex.core.units import parse_size

Reader = Callable[[object], Any]

CONFIG_FILE = "ambidex.config_file"
"""Key of `click.Context.meta` under which the name of the configuration file is kept."""

_INT_LIMIT: Final = 2**63
"""Whole numbers end up as 64-bit integers with a sign, in tensors and in the native module."""


def read_text(value: object) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError("it must be a text")
    return value


def read_int(value: object) -> int:
    """A whole number of 64 bits; nothing is rounded."""
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if isinstance(number, bool) or not isinstance(number, int):
        raise ValueError("it must be a whole number")
    if not -_INT_LIMIT <= number < _INT_LIMIT:
        raise ValueError("it must lie in [-2^63, 2^63)")
    return number


def read_float(value: object) -> float:
    """A number."""
    try:
        if isinstance(value, str):
            return float(value)
    except ValueError:
        pass
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError("it is too large for a number of 64 bits") from None


def read_switch(value: object) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("it must be true or false")
    return value


def read_size(value: object) -> int:
    """Bytes: a number, or a text with a unit."""
    if not isinstance(value, str):
        return read_int(value)
    try:
        return parse_size(value)
    except ConfigError:
        raise ValueError("write it like 8GiB, 512MiB or 2GB, at most 2^63 - 1 bytes") from None


def read_bias(value: object) -> tuple[int, float]:
    """`ID=BIAS`, or a pair of both."""
    pair = value.split("=") if isinstance(value, str) else value
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise ValueError("write it like 42=-100 (token id = bias)")
    return read_int(pair[0]), read_float(pair[1])


def check_ids(pairs: Iterable[tuple[int, float]]) -> None:
    """An id has one bias.

    Raises:
        ValueError: it has two.
    """
    seen: set[int] = set()
    for token_id, _ in pairs:
        if token_id in seen:
            raise ValueError(f"id {token_id} comes twice: leave one out")
        seen.add(token_id)


def choice_reader(choices: type[StrEnum]) -> Reader:
    """A reader of one of a closed set of words."""

    def read(value: object) -> StrEnum:
        if not isinstance(value, str) or value not in list(choices):
            raise ValueError(f"it must be one of {', '.join(choices)}")
        return choices(value)

    return read


def optional_reader(read: Reader) -> Reader:
    """A reader that also takes `none` (null in JSON)."""
    return lambda value: None if value is None or value == "none" else read(value)


class ValueType(click.ParamType[Any]):
    """A reader as a type of click; a wrong value is a `ConfigError` that names the flag or variable it came from."""

    def __init__(self, name: str, read: Reader, choices: tuple[str, ...] = ()) -> None:
        self.name = name
        self.read = read
        self.choices = choices

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read one value of a flag, a variable or the file."""
        try:
            return self.read(value)
        except ValueError as error:
            where = source_of(ctx, param) if ctx is not None and param is not None else self.name
            raise ConfigError(f"{where} is {quote(value)}: {error}") from None

    def split_envvar_value(self, rv: str) -> list[Any]:
        """A variable of a repeatable setting holds a JSON array, or an object where values belong to ids.

        Raises:
            ValueError: it does not.
        """
        try:
            return items_of(parse_json(rv))
        except RequestError as error:
            raise ValueError(str(error)) from None

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Complete a choice."""
        del ctx, param
        return [CompletionItem(name) for name in self.choices if name.startswith(incomplete)]


def items_of(value: object) -> list[Any]:
    """The values of a repeatable setting in TOML or JSON: a list, or a table of id and value.

    Raises:
        ValueError: it is neither.
    """
    if isinstance(value, dict):
        return list(value.items())
    if not isinstance(value, list):
        raise ValueError("it must be a list")
    return value


def is_given(ctx: click.Context, param: click.Parameter) -> bool:
    """The value comes from a flag, a variable or the file, not from the default."""
    return ctx.get_parameter_source(param.name or "") is not ParameterSource.DEFAULT


def source_of(ctx: click.Context, param: click.Parameter) -> str:
    """Where a value comes from: `--block-size`, `AMBIDEX_BLOCK_SIZE`, `block_size in my.toml` or `default`."""
    match ctx.get_parameter_source(param.name or ""):
        case ParameterSource.ENVIRONMENT:
            return str(param.envvar)
        case ParameterSource.DEFAULT_MAP:
            return f"{param.name} in {ctx.meta[CONFIG_FILE]}"
        case ParameterSource.DEFAULT:
            return "default"
        case _:
            return param.opts[0]

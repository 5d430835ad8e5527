"""The configuration file: TOML with one key for each setting, spelled like its field.

model = "smollm2"
kv_gpu_tokens = 1024
gpu_memory = "6GiB"
stop = ["\\n\\n"]
"""

import tomllib
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

import click

from ambidex.cli.settings import FLAG_SETTINGS
from ambidex.cli.source import quote
from ambidex.cli.values import CONFIG_FILE, Reader, read_text
from ambidex.core.errors import ConfigError
from ambidex.core.units import MIB
from ambidex.formats.bounded_file import read_file

_MAX_BYTES: Final = 16 * MIB

_READERS: Final[Mapping[str, Reader]] = {
    "model": read_text,
    "system": read_text,
    **{setting.name: setting.read for setting in FLAG_SETTINGS},
}


def read_config_file(path: Path) -> dict[str, Any]:
    """Read and check all settings of a file.

    Raises:
        ConfigError: no TOML, an unknown key or a value of the wrong type; names the file and the key.
    """
    try:
        table = tomllib.loads(read_file(path, max_bytes=_MAX_BYTES).decode("utf-8"))
    except RecursionError:
        raise ConfigError(f"configuration file {path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, no TOML, or a number of too many digits
        raise ConfigError(f"configuration file {path} cannot be read: {error}") from error
    return {key: _read_value(path, key, value) for key, value in table.items()}


def use_config_file(ctx: click.Context, param: click.Parameter, value: Path | None) -> None:
    """Callback of `--config`: the file's values rank below flags and variables, above defaults."""
    del param
    if value is None or ctx.resilient_parsing:
        return
    ctx.default_map = read_config_file(value)
    ctx.meta[CONFIG_FILE] = str(value)


def closest(name: str, known: Iterable[str]) -> str:
    """` (did you mean x?)` for a name that is nearly one of `known`, else nothing."""
    matches = get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]}?)" if matches else ""


def _read_value(path: Path, key: str, value: object) -> Any:
    if key not in _READERS:
        raise ConfigError(f"{path}: unknown setting {key}{closest(key, _READERS)}: see ambidex generate --help")
    try:
        return _READERS[key](value)
    except ValueError as error:
        raise ConfigError(f"{path}: {key} is {quote(value)}: {error}") from None

"""Quantities with units: bytes and seconds, how they are parsed and how they are shown."""

import re
from decimal import Decimal
from typing import Final

from ambidex.core.errors import ConfigError

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
TIB: Final = 1024**4

MAX_SIZE: Final = 2**63 - 1
_UNITS: Final = {
    "": 1, "b": 1,
    "k": KIB, "kb": 1000, "kib": KIB,
    "m": MIB, "mb": 1000**2, "mib": MIB,
    "g": GIB, "gb": 1000**3, "gib": GIB,
    "t": TIB, "tb": 1000**4, "tib": TIB,
}  # fmt: skip
_SIZE: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str) -> int:
    """Read a size such as `8GiB`, `512M` or `1.5gb` as bytes.

    `K`, `M`, `G`, `T` alone and with `iB` are powers of 1024; with `B` alone powers of 1000.

    Raises:
        ConfigError: the text is no size.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"size {text!r} is not a number with a unit: write it like 8GiB, 512MiB or 2GB")
    size = Decimal(match[1]) * unit
    if size > MAX_SIZE:
        raise ConfigError(f"size {text[:40]!r} is larger than any memory: at most {MAX_SIZE} bytes")
    return int(size)


def format_count(count: int) -> str:
    """Show a number that may have thousands of digits."""
    return str(count) if abs(count) < 10**20 else f"a number of {count.bit_length()} bits"


def format_size(num_bytes: int) -> str:
    """Show bytes with a binary unit and at most one decimal, e.g. `1.5 GiB`."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} B"

"""`Fields`: typed, bounded reading of a model file's settings; what is wrong is named with its value and its limit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ambidex.core.errors import ModelFileError, UnsupportedModelError
from ambidex.formats.json_file import show

# Far above any model, far below what would exhaust memory or overflow a product of sizes.
MAX_WIDTH: Final = 2**24
MAX_LAYERS: Final = 4096
MAX_HEADS: Final = 2**16
MAX_VOCAB: Final = 2**24
MAX_CONTEXT: Final = 2**30
MAX_TOKEN_ID: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Fields:
    """The settings in one file, `where` (named in errors); a null counts as absent.

    Every method raises ModelFileError when the field has another type or lies outside its limits, or when it is
    absent and there is no default.
    """

    values: Mapping[str, object]
    where: str

    def has(self, name: str) -> bool:
        """The field is there and not null."""
        return self.values.get(name) is not None

    def first_of(self, *names: str) -> str:
        """The first of several spellings of a field that is there; if none is, the first of all."""
        return next((name for name in names if self.has(name)), names[0])

    def integer(self, name: str, *, high: int, low: int = 1, default: int | None = None) -> int:
        """A whole number from `low` to `high`."""
        value = default if not self.has(name) else self.values[name]
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, *, low: float, high: float, default: float | None = None) -> float:
        """A number from `low` to `high`."""
        value = default if not self.has(name) else self.values[name]
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = default if not self.has(name) else self.values[name]
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def text(self, name: str, *, default: str | None = None) -> str:
        """A string."""
        value = default if not self.has(name) else self.values[name]
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings; empty if absent."""
        value = self.values[name] if self.has(name) else []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "a list of strings")
        return value

    def group(self, name: str) -> "Fields":
        """An object within the object; empty if absent."""
        value = self.values[name] if self.has(name) else {}
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, f"{self.where}: {name}")

    def token_id(self, name: str) -> int | None:
        """A token id, or None if absent."""
        return self.integer(name, low=0, high=MAX_TOKEN_ID) if self.has(name) else None

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty if absent."""
        value = self.values[name] if self.has(name) else []
        ids = value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item <= MAX_TOKEN_ID for item in ids):
            raise self.error(name, f"a token id or a list of them, each from 0 to {MAX_TOKEN_ID}")
        return tuple(dict.fromkeys(ids))

    def error(self, name: str, limit: str) -> ModelFileError:
        """What is wrong with a field's value, to be raised."""
        found = f"is {show(self.values[name])}" if self.has(name) else "is missing"
        return ModelFileError(f"{self.where}: {name} {found}: it must be {limit}")

    def refusal(self, what: str, supported: str) -> UnsupportedModelError:
        """Why a model that is well formed is not run here, to be raised."""
        return UnsupportedModelError(f"{self.where}: {what} is not supported: supported is {supported}")

    def divide(self, name: str, value: int, by: int) -> int:
        """`value / by`, where `value` is that of the field `name` and must be a multiple."""
        if value % by:
            raise ModelFileError(f"{self.where}: {name} is {value}: it must be a multiple of {by}")
        return value // by

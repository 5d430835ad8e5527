"""`KVDTypes`: the number formats of K and V in host memory, and the text that asks for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ambidex.core.dtypes import DType
from ambidex.core.errors import ConfigError
from ambidex.core.ids import KVPart

AUTO: Final = "auto"
FORMS: Final = f"{AUTO}, {', '.join(DType)}, or k=FORMAT,v=FORMAT such as k=int8,v=int4"
"""What `parse_kv_dtypes` reads."""


@dataclass(frozen=True, slots=True)
class KVDTypes:
    """Formats of K and of V: the same, or one of int8 and int4 for each.

    Raises:
        ConfigError: they do not go together: one op reads both, in integers or in one floating format.
    """

    k: DType
    v: DType

    def __post_init__(self) -> None:
        if self.k is not self.v and not (self.k.has_scales and self.v.has_scales):
            raise ConfigError(
                f"`kv_dtype` {self}: K and V may differ as int8 and int4 do, other formats are for both: use one "
                f"format, or k=int8,v=int4"
            )

    @classmethod
    def both(cls, dtype: DType) -> "KVDTypes":
        """One format for K and V."""
        return cls(dtype, dtype)

    def of(self, part: KVPart) -> DType:
        """That of K or of V."""
        return self.k if part is KVPart.K else self.v

    def __str__(self) -> str:
        return self.k.value if self.k is self.v else f"k={self.k},v={self.v}"


def parse_kv_dtypes(text: str) -> KVDTypes | None:
    """Read `kv_dtype`; None: auto, the format of the weights.

    Raises:
        ConfigError: it names no formats.
    """
    if text == AUTO:
        return None
    if "=" not in text:
        return KVDTypes.both(_parse(text, text))
    named: dict[str, DType] = {}
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name in ("gpu", "dram", "cxl"):
            raise ConfigError(
                f"`kv_dtype` is {text!r}: it is for all tiers in host memory; the accelerator's keeps the format of "
                f"activations: leave out {name}="
            )
        if name not in list(KVPart) or name in named:
            raise _wrong(text)
        named[name] = _parse(text, value)
    if len(named) < len(KVPart):
        raise _wrong(text)
    return KVDTypes(named[KVPart.K], named[KVPart.V])


def _parse(text: str, value: str) -> DType:
    known: Sequence[str] = list(DType)
    if value not in known:
        raise _wrong(text)
    return DType(value)


def _wrong(text: str) -> ConfigError:
    return ConfigError(f"`kv_dtype` is {text!r}: it must be {FORMS}")

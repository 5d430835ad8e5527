"""What pools ask of the operating system and the driver for their host memory; either may refuse."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from ambidex.storage.huge_pages import advise_huge_pages
from ambidex.storage.pinned import register_pinned


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Two requests, each answered by None or by the reason of the refusal; a test hands in one that refuses.

    `pin` lets the copy engine reach a tensor for as long as an owner lives, `advise` asks for huge pages.
    """

    pin: Callable[[Tensor, object], str | None] = register_pinned
    advise: Callable[[Tensor], str | None] = advise_huge_pages


HOST_MEMORY: Final = HostMemory()
"""The system's and the driver's own answers."""

"""What a peer is to the benchmarks: a loaded model that answers a prompt greedily and says when each token came."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Final, Protocol

CHUNK_LEN: Final = 512
"""Tokens of a prompt computed at once: llama.cpp's default and ours."""


class CacheKind(StrEnum):
    """Which cache of transformers is used: growing on the device, in DRAM and copied layer by layer, or in 4 bits."""

    DYNAMIC = "dynamic"
    OFFLOADED = "offloaded"
    QUANTIZED = "quantized"


@dataclass(slots=True)
class Generation:
    """One answer: when it began, and each of its tokens with the moment at which the caller had it (seconds).

    `lane_bytes` are bytes of K and V that each attention lane read in the decode steps, where the engine counts them.
    """

    start: float
    token_ids: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    lane_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def prefill_s(self) -> float:
        """Seconds to the first token."""
        return self.moments[0] - self.start

    @property
    def step_s(self) -> list[float]:
        """Seconds between tokens: one decode step each."""
        return [later - sooner for sooner, later in pairwise(self.moments)]


class DecodeEngine(Protocol):
    """A loaded model."""

    def about(self) -> dict[str, object]:
        """What a reader of the record should know of this build."""
        ...

    def generate(self, token_ids: Sequence[int], num_tokens: int) -> Generation:
        """Answer a prompt with exactly `num_tokens` greedy tokens."""
        ...

"""Identities and small closed sets that every layer shares."""

from enum import StrEnum
from typing import NewType

RequestId = NewType("RequestId", str)
BlockId = NewType("BlockId", int)
"""Identity of a block inside the pool of one tier."""
MoveId = NewType("MoveId", int)


class Tier(StrEnum):
    """Where bytes live, fastest first. `GPU` is the accelerator's memory, also when the accelerator is the CPU."""

    GPU = "gpu"
    DRAM = "dram"
    CXL = "cxl"
    DISK = "disk"


class KVPart(StrEnum):
    """The two halves of a KV block; they may live in different tiers."""

    K = "k"
    V = "v"


class Lane(StrEnum):
    """Who attends over a part of the keys: the accelerator over its own, the CPU over those in DRAM, or the accelerator
    over keys in DRAM that it reads over the link."""

    GPU = "gpu"
    CPU = "cpu"
    STREAM = "stream"

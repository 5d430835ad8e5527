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


class Fallback(StrEnum):
    """What an engine does without, on the next path: each is said once as a warning, shown in the report, and counted.

    Counted are: buffers in memory that could not be pinned; CXL tiers that could not be had, or less of one than was
    asked for; pools without huge pages; threads without a processor of
    their own; engines whose native ops have no AVX2; engines without native ops; ops without their kernel for this
    device; captures of graphs that failed; chunks of prompts that had to be smaller; engines whose policy wants a link
    to a GPU that there is not; requests whose policy reads K and V from blocks, since there was no memory for rows.
    """

    PAGEABLE_MEMORY = "pageable_memory"
    SMALL_PAGES = "small_pages"
    NO_CXL = "no_cxl"
    UNPINNED_THREADS = "unpinned_threads"
    NO_AVX2 = "no_avx2"
    NO_NATIVE_OPS = "no_native_ops"
    PLAIN_KERNELS = "plain_kernels"
    NO_GRAPHS = "no_graphs"
    SMALLER_CHUNKS = "smaller_chunks"
    NO_LINK = "no_link"
    NO_ROWS = "no_rows"


class Lane(StrEnum):
    """Who attends over a part of the keys: the accelerator over its own, the CPU over those in DRAM, or the accelerator
    over keys in DRAM that it reads over the link."""

    GPU = "gpu"
    CPU = "cpu"
    STREAM = "stream"

"""`Fallbacks`: what an engine does without on this machine. Each kind is said once as a warning, shown, and counted."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ambidex.core.ids import Fallback, Tier
from ambidex.core.policy import LANE_PRESETS, PolicyName
from ambidex.engine.report import ReportRow
from ambidex.hw.topology import read_topology

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Fallbacks:
    """Gathered while an engine is built; those of later steps are counted in `EngineStats.fallbacks` alone."""

    counts: Counter[Fallback] = field(default_factory=Counter)
    rows: list[ReportRow] = field(default_factory=list)

    def note(self, kind: Fallback, count: int, what: str) -> None:
        """Note a kind, once; nothing if `count` is 0.

        Args:
            what: what is missing, what that costs, and why it is so.
        """
        if count == 0:
            return
        logger.warning("%s", what)
        self.counts[kind] = count
        self.rows.append(ReportRow(section="fallbacks", name=kind, value=str(count), why=what))


def note_native(found: Fallbacks, isa: str | None, why_none: str) -> None:
    """Native ops that do not run, or run without vectors.

    Args:
        isa: their instruction set; None: there are no native ops, for the reason of `why_none`.
    """
    if isa is None:
        found.note(Fallback.NO_NATIVE_OPS, 1, f"torch computes on the CPU, several times slower: {why_none}")
    elif isa == "generic":
        why = "the processor has none, or AMBIDEX_MAX_ISA says so"
        found.note(Fallback.NO_AVX2, 1, f"native ops run without AVX2, several times slower: {why}")


def note_threads(found: Fallbacks, num_threads: int, num_unpinned: int) -> None:
    """Threads without a processor of their own."""
    found.note(
        Fallback.UNPINNED_THREADS, num_unpinned,
        f"{num_unpinned} of {num_threads} CPU threads have no processor of their own, steps take longer: this process "
        f"may use {read_topology().num_usable_cores} processors, or may not pin threads",
    )  # fmt: skip


def note_kernels(found: Fallbacks, reasons: Mapping[str, str]) -> None:
    """Ops whose kernel does not run on the GPU, with the reasons."""
    found.note(
        Fallback.PLAIN_KERNELS, len(reasons),
        f"torch stands in for {len(reasons)} kernels on the GPU ({', '.join(reasons)}), steps take longer: "
        f"{next(iter(reasons.values()), '')}",
    )  # fmt: skip


def note_memory(found: Fallbacks, pin_refusals: Sequence[str], page_refusals: Mapping[Tier, str]) -> None:
    """Buffers that are not pinned, and tiers that have no huge pages, with the reasons."""
    found.note(
        Fallback.PAGEABLE_MEMORY, len(pin_refusals),
        f"{len(pin_refusals)} buffers of KV in host memory are not pinned, copies are slower: "
        f"{next(iter(pin_refusals), '')}",
    )  # fmt: skip
    found.note(
        Fallback.SMALL_PAGES, len(page_refusals),
        f"KV on {' and '.join(page_refusals)} has no huge pages, random reads are slower: "
        f"{next(iter(page_refusals.values()), '')}",
    )  # fmt: skip


def note_cxl(found: Fallbacks, refusals: Sequence[str]) -> None:
    """A CXL tier that was asked for and could not be had, or not all of it, with the reasons."""
    found.note(
        Fallback.NO_CXL, len(refusals),
        f"K and V for which the CXL tier has no room lie in DRAM, as far as its budget goes: {'; '.join(refusals)}",
    )  # fmt: skip


def note_no_link(found: Fallbacks, policy: PolicyName) -> None:
    """A policy reads keys in DRAM over the link to a GPU, and there is no GPU."""
    preset = LANE_PRESETS.get(policy)
    found.note(
        Fallback.NO_LINK, int(preset is not None and preset.stream_percent > 0),
        f"policy {policy} moves keys in DRAM to a GPU in every step, and there is no GPU: the CPU attends them where "
        f"they lie, so that speeds say nothing of the method",
    )  # fmt: skip

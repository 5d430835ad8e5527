"""`Fallbacks`: what an engine does without on this machine. Each kind is said once as a warning, shown, and counted."""

import logging
from collections import Counter
from dataclasses import dataclass, field

from ambidex.core.ids import Fallback
from ambidex.engine.report import ReportRow

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

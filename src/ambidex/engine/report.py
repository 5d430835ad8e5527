"""What the settings became: the effective configuration, with the reason of each choice."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ambidex.core.dtypes import DType
from ambidex.core.ids import Tier
from ambidex.core.kv_spec import KVSpec
from ambidex.core.ledger import MemoryLedger
from ambidex.core.model_spec import ModelSpec
from ambidex.engine.run_plan import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """One fact about a built engine."""

    section: str
    name: str
    value: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """All facts about a built engine, in the order in which they are shown.

    `plan` is what lies where and how long steps should take, None where all weights and keys lie on the accelerator.
    """

    facts: tuple[ReportRow, ...]
    plan: RunPlan | None = None

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(section, name, value, why) of each fact."""
        return [(fact.section, fact.name, fact.value, fact.why) for fact in self.facts]

    def as_json(self) -> list[dict[str, str]]:
        """The same for a script."""
        return [asdict(fact) for fact in self.facts]

    def value(self, section: str, name: str) -> str:
        """One fact.

        Raises:
            KeyError: there is none of that name.
        """
        return self._find(section, name).value

    def why(self, section: str, name: str) -> str:
        """The reason of one fact.

        Raises:
            KeyError: there is none of that name.
        """
        return self._find(section, name).why

    def _find(self, section: str, name: str) -> ReportRow:
        for fact in self.facts:
            if (fact.section, fact.name) == (section, name):
                return fact
        raise KeyError((section, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFigures:
    """What a built engine is, in numbers, for those that compute with them; the report says it to people.

    `device` is torch's name of the accelerator, `dtype` the format of weights (but of those that
    are kept quantised), `kv` the cache as each tier keeps it. `scans_keys`: the bounded policy has its native form.
    """

    spec: ModelSpec
    device: str
    dtype: DType
    keeps_quantized: bool
    num_threads: int
    kv: Mapping[Tier, KVSpec]
    num_blocks: Mapping[Tier, int]
    ledger: MemoryLedger
    scans_keys: bool = False

"""What the settings became: the effective configuration, with the reason of each choice."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """One fact about a built engine."""

    section: str
    name: str
    value: str
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """All facts about a built engine, in the order in which they are shown."""

    facts: tuple[ReportRow, ...]

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

"""Report rows on the policy that chooses keys."""

from collections.abc import Iterator

from ambidex.core.config import EngineConfig
from ambidex.core.policy import resolve_policy
from ambidex.engine.report import ReportRow


def policy_rows(config: EngineConfig) -> Iterator[ReportRow]:
    """Which keys decode steps attend, and what that costs."""
    settings = resolve_policy(config)
    yield ReportRow(
        section="compute",
        name="policy",
        value=", ".join(part for part in (settings.name.value, settings.words()) if part),
        why="decode steps attend all keys"
        if settings.is_exact
        else "decode steps take the ordinary path, in plain torch, and attend the keys that it chooses",
    )

"""Report rows on the policy that chooses keys."""

from collections.abc import Iterator

from ambidex.core.policy import PolicyName
from ambidex.engine.bounded_form import BoundedForm
from ambidex.engine.chosen_policy import ChosenPolicy
from ambidex.engine.report import ReportRow


def policy_rows(policy: ChosenPolicy, bounded: BoundedForm) -> Iterator[ReportRow]:
    """Which keys decode steps attend, and what that costs."""
    settings = policy.settings
    why = "decode steps take the ordinary path, in plain torch, and attend the keys that it chooses"
    if settings.is_exact:
        why = "decode steps attend all keys"
    elif settings.name is PolicyName.BOUNDED:
        why = bounded.why
    if policy.why:
        why = f"{why}; {policy.why}"
    yield ReportRow(
        section="compute",
        name="policy",
        value=", ".join(part for part in (settings.name.value, settings.words()) if part),
        why=why,
    )

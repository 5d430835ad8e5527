"""Report rows on the policy that chooses keys."""

from collections.abc import Iterator

from ambidex.core.policy import LANE_PRESETS, PolicyName
from ambidex.engine.bounded_form import BoundedForm
from ambidex.engine.chosen_policy import ChosenPolicy
from ambidex.engine.report import ReportRow


def policy_rows(policy: ChosenPolicy, bounded: BoundedForm) -> Iterator[ReportRow]:
    """Which keys decode steps attend, and what that costs."""
    settings = policy.settings
    why = "decode steps take the ordinary path, in plain torch, and attend the keys that it chooses"
    preset = LANE_PRESETS.get(settings.name)
    if preset is not None:
        lane = "over the link to the GPU" if preset.stream_percent else "by the CPU"
        why = f"decode steps attend all keys, those in DRAM {lane}; weights in DRAM travel in every step"
    elif settings.is_exact:
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

"""Report rows on the policy that chooses keys."""

from collections.abc import Iterator

from ambidex.core.kv_spec import PolicyState
from ambidex.core.policy import LANE_PRESETS, PolicyName
from ambidex.engine.bounded_form import BoundedForm
from ambidex.engine.chosen_policy import ChosenPolicy
from ambidex.engine.report import ReportRow


def policy_rows(
    policy: ChosenPolicy,
    bounded: BoundedForm,
    *,
    max_kept_rows: int | None,
    rows_why: str,
    state: PolicyState | None = None,
    max_state_tokens: int | None = None,
    is_fixed: bool = False,
    is_early: bool = False,
) -> Iterator[ReportRow]:
    """Which keys decode steps attend, and what that costs.

    Args:
        is_fixed: decode steps have a fixed form.
        is_early: decode steps of one token a request have the form of policies that look ahead.
        max_kept_rows: tokens of which the policy can keep rows beside the blocks; None: it keeps none; and why.
        state: what the policy keeps on the accelerator; None: nothing; `max_state_tokens`: of so many tokens.
    """
    settings = policy.settings
    why = "decode steps take the ordinary path, in plain torch, and attend the keys that it chooses"
    preset = LANE_PRESETS.get(settings.name)
    if preset is not None:
        lane = "over the link to the GPU" if preset.stream_percent else "by the CPU"
        why = f"decode steps attend all keys, those in DRAM {lane}; weights in DRAM travel in every step"
    elif settings.is_exact:
        why = "decode steps attend all keys"
    elif is_early:
        why = "decode steps attend near keys and the far ones that scores made a layer ahead put first"
    elif settings.name.adds_up and is_fixed:
        why = "decode steps attend the keys that it holds, and add up what they get, in kernels of one launch each"
    elif settings.name is PolicyName.QUEST and is_fixed:
        why = "decode steps attend the newest page and those with the largest bounds, chosen by kernels of their own"
    elif settings.name.has_lone_steps and is_fixed:
        why = "decode steps attend the first keys and the newest, in one kernel"
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
    if not settings.is_exact:
        yield ReportRow(
            section="compute",
            name="policy_rows",
            value="none" if max_kept_rows is None else f"of {max_kept_rows} tokens, in host memory",
            why=rows_why,
        )
    if state is not None:
        yield ReportRow(
            section="compute",
            name=f"policy_{state.owner}",
            value=f"of {max_state_tokens} tokens, on the accelerator",
            why=f"{state.what}, by which it chooses; requests start only if there is room for all their tokens",
        )

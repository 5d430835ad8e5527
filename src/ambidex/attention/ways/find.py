"""Which way a policy chooses keys by."""

import torch

from ambidex.attention.select.accumulated import BudgetPolicy
from ambidex.attention.select.policy import AheadPolicy, Policy
from ambidex.attention.select.quest import Quest
from ambidex.attention.select.streaming_llm import StreamingLLM
from ambidex.attention.ways.ahead import AheadWay
from ambidex.attention.ways.pages import PagesWay
from ambidex.attention.ways.sums import SumsWay
from ambidex.attention.ways.way import LookAhead, Way
from ambidex.attention.ways.windows import WindowsWay
from ambidex.core.errors import InternalError


def find_way(policy: Policy, look_ahead: LookAhead | None, device: torch.device) -> Way:
    """That of a policy whose decode steps can have a fixed form (`PolicyName.has_fixed_steps`).

    Args:
        look_ahead: makes early queries; None: the policy needs none.
        device: the accelerator.
    Raises:
        InternalError: it is another policy.
    """
    match policy:
        case AheadPolicy() if look_ahead is not None:
            return AheadWay(policy, look_ahead)
        case BudgetPolicy():
            return SumsWay(policy, device)
        case StreamingLLM():
            return WindowsWay(policy, device)
        case Quest():
            return PagesWay(policy, device)
        case _:
            raise InternalError(f"steps of policy {policy.settings.name} have no fixed form")

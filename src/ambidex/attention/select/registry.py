"""Policies by name, and which models each can serve."""

from typing import assert_never

from ambidex.attention.select.bounded import Bounded
from ambidex.attention.select.exact import Exact
from ambidex.attention.select.h2o import H2O
from ambidex.attention.select.hybridgen import HybridGen
from ambidex.attention.select.infinigen import InfiniGen
from ambidex.attention.select.keyformer import Keyformer
from ambidex.attention.select.policy import Policy
from ambidex.attention.select.qinfer_windows import QInferWindows
from ambidex.attention.select.quest import Quest
from ambidex.attention.select.streaming_llm import StreamingLLM
from ambidex.core.errors import UnsupportedModelError
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import PolicyName, PolicySettings


def make_policy(settings: PolicySettings, spec: ModelSpec) -> Policy:
    """The policy of an engine.

    Raises:
        UnsupportedModelError: it cannot serve the model.
    """
    windows = [window for window in spec.windows if window is not None]
    if windows and not settings.is_exact:
        raise UnsupportedModelError(
            f"`policy` {settings.name} cannot serve this {spec.architecture} model: {len(windows)} of its layers have "
            f"a sliding window of {max(windows)} tokens, which chooses keys already: use `policy` exact"
        )
    if spec.alibi_slopes is not None and not settings.is_exact:
        raise UnsupportedModelError(
            f"`policy` {settings.name} cannot serve this {spec.architecture} model: its positions are biases of scores "
            f"(alibi), which policies do not know: use `policy` exact"
        )
    match settings.name:
        case PolicyName.EXACT | PolicyName.FLEXGEN | PolicyName.MOE_LIGHTNING:
            return Exact(settings, spec)
        case PolicyName.BOUNDED:
            return Bounded(settings, spec)
        case PolicyName.STREAMING_LLM:
            return StreamingLLM(settings, spec)
        case PolicyName.H2O:
            return H2O(settings, spec)
        case PolicyName.KEYFORMER:
            return Keyformer(settings, spec)
        case PolicyName.QINFER_WINDOWS:
            return QInferWindows(settings, spec)
        case PolicyName.QUEST:
            return Quest(settings, spec)
        case PolicyName.INFINIGEN:
            return InfiniGen(settings, spec)
        case PolicyName.HYBRIDGEN:
            return HybridGen(settings, spec)
        case _:
            assert_never(settings.name)

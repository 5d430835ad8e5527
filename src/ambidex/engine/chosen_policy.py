"""Which policy an engine has, with what was measured of its model: HybridGen's K_min and first layers."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ambidex.core.config import EngineConfig, LoadFormat
from ambidex.core.errors import ConfigError
from ambidex.core.model_spec import ModelSpec
from ambidex.core.policy import HybridGenFeedback, PolicyName, PolicySettings, resolve_policy
from ambidex.formats.accuracy_profile import calibrate_command, default_accuracy_path, read_accuracy_profile
from ambidex.formats.locate import ModelSource
from ambidex.formats.neuron_profile import fingerprint


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPolicy:
    """The settings, and where those of HybridGen that are measured come from; `why` is empty for other policies."""

    settings: PolicySettings
    why: str = ""

    def check_floor(self, max_context_len: int) -> None:
        """See to it that feedback's floor can be met.

        Raises:
            ConfigError: it is above the context limit.
        """
        floor = self.settings.min_selected_tokens
        if floor is not None and floor > max_context_len:
            raise ConfigError(
                f"`min_selected_tokens` is {floor} ({self.why}): the context limit is {max_context_len}: lower it, or "
                f"raise `max_context_len`"
            )


def choose_policy(
    config: EngineConfig, source: ModelSource, spec: ModelSpec, *, environ: Mapping[str, str] = os.environ
) -> ChosenPolicy:
    """The policy of an engine; what the user sets goes before what was measured.

    Raises:
        ConfigError: the accuracy profile cannot be read or is another model's, or it says that no number of keys does
            and feedback is to change the number.
    """
    settings = resolve_policy(config)
    if settings.name is not PolicyName.HYBRIDGEN:
        return ChosenPolicy(settings=settings)
    if config.accuracy_profile is None and None not in (config.min_selected_tokens, config.exact_layers):
        return ChosenPolicy(settings=settings, why="`min_selected_tokens` and `exact_layers` are set")
    if config.accuracy_profile is not None:
        path = Path(config.accuracy_profile)
    elif config.load_format is LoadFormat.DUMMY:
        return ChosenPolicy(settings=settings, why="not calibrated: the weights are random")
    else:
        path = default_accuracy_path(environ, fingerprint(source, spec))
        if not path.is_file():
            return ChosenPolicy(settings=settings, why=f"not calibrated: {calibrate_command(config.model)}")
    profile = read_accuracy_profile(
        path, model=config.model, fingerprint=fingerprint(source, spec), num_layers=spec.num_layers
    )
    floor, exact_layers = config.min_selected_tokens, config.exact_layers
    if floor is None:
        floor = profile.min_selected_tokens
        if floor is None and settings.hybridgen_feedback not in (None, HybridGenFeedback.OFF):
            raise ConfigError(
                f"accuracy profile {path} found no number of keys and of exact layers at which {config.model} loses at "
                f"most {profile.max_drop:g}: give `min_selected_tokens` yourself, leave `hybridgen_feedback` off, or "
                f"measure more keys: {calibrate_command(config.model)}"
            )
    return ChosenPolicy(
        settings=replace(
            settings,
            min_selected_tokens=floor if floor is not None else settings.min_selected_tokens,
            exact_layers=exact_layers if exact_layers is not None else profile.exact_layers,
        ),
        why=f"K_min and first layers of {path}, measured {profile.date}",
    )

"""Which neurons of MLPs are left out: what is asked for, what the model allows, and what that needs."""

import os
from dataclasses import dataclass
from pathlib import Path

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.model_spec import ModelSpec
from ambidex.core.sparsity import ASSUMED_ACTIVE, MLPSparsity, SparsityKind, parse_sparsity
from ambidex.core.sparsity import NeuronCache as CacheChoice
from ambidex.engine.report import ReportRow
from ambidex.formats.locate import ModelSource
from ambidex.formats.neuron_predictor import PredictorFile
from ambidex.formats.neuron_profile import NeuronProfile, default_neuron_path, fingerprint, read_neuron_profile
from ambidex.mlp.neuron_cache import NeuronCache
from ambidex.mlp.sparse_costs import FormCosts, ScreenCosts
from ambidex.models.base import CausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class SparsityChoice:
    """`profile` None: none was measured, and an exact form needs none."""

    sparsity: MLPSparsity
    profile: NeuronProfile | None
    predictor: PredictorFile | None = None
    """Says which neurons the CPU computes; None: nothing was trained for that."""

    @property
    def is_exact(self) -> bool:
        """Whether nothing changes but roundings."""
        return self.sparsity.kind.is_exact and self.predictor is None

    @property
    def active_share(self) -> float:
        """Of the neurons that a token is expected to need."""
        if self.sparsity.share is not None:
            return 1.0 - self.sparsity.share
        return self.profile.active_share if self.profile is not None else ASSUMED_ACTIVE


def choose_sparsity(
    config: EngineConfig, spec: ModelSpec, source: ModelSource, skeleton: CausalLM
) -> SparsityChoice | None:
    """What the settings and the model make of it; None: nothing is left out.

    Raises:
        ConfigError: it is not for this model, or a profile is needed that is not there.
    """
    sparsity = parse_sparsity(config.mlp_sparsity)
    if sparsity is None:
        if config.neuron_profile is not None:
            raise ConfigError("`neuron_profile` is for `mlp_sparsity`, which is off: leave it out, or choose a form")
        if config.mlp_predictor is not None:
            raise ConfigError("`mlp_predictor` is for `mlp_sparsity` relu, which is off: leave it out, or choose that")
        return None
    is_gated = len(skeleton.layer_sites()[0].mlp.ins) > 1
    refusal = sparsity.refusal(spec.activation, is_gated=is_gated)
    if refusal is not None:
        raise ConfigError(refusal)
    if config.neuron_cache is CacheChoice.STATIC and not _has_profile(config, spec, source):
        raise ConfigError(
            "`neuron_cache` static puts the most active neurons of a profile on the accelerator, and there is none: "
            "measure it with `ambidex calibrate neurons MODEL --text FILE`, or use dynamic"
        )
    predictor = _read_predictor(config, spec, sparsity)
    model = fingerprint(source, spec)
    path = Path(config.neuron_profile) if config.neuron_profile is not None else default_neuron_path(os.environ, model)
    if config.neuron_profile is None and sparsity.kind.is_exact and not path.exists():
        return SparsityChoice(sparsity=sparsity, profile=None, predictor=predictor)
    return SparsityChoice(sparsity=sparsity, profile=read_neuron_profile(path, spec, model=model), predictor=predictor)


def _read_predictor(config: EngineConfig, spec: ModelSpec, sparsity: MLPSparsity) -> PredictorFile | None:
    """What was trained for the model's neurons, if a file is named.

    Raises:
        ConfigError: it is for another form. ModelFileError: the file cannot be used.
    """
    if config.mlp_predictor is None:
        return None
    if sparsity.kind is not SparsityKind.RELU:
        raise ConfigError(
            f"`mlp_predictor` says which neurons behind a ReLU are computed, and so does `mlp_sparsity` "
            f"{sparsity}: use relu, or leave out the predictor"
        )
    if config.neuron_cache is not CacheChoice.OFF:
        raise ConfigError(
            f"`neuron_cache` {config.neuron_cache} lets neurons change places, which `mlp_predictor` does not follow: "
            f"use off, or leave out the predictor"
        )
    return PredictorFile(Path(config.mlp_predictor), spec)


def _has_profile(config: EngineConfig, spec: ModelSpec, source: ModelSource) -> bool:
    return config.neuron_profile is not None or default_neuron_path(os.environ, fingerprint(source, spec)).exists()


def set_masks(model: CausalLM, choice: SparsityChoice) -> None:
    """Tell every MLP what it leaves out, wherever it is computed."""
    if choice.sparsity.kind.is_exact or choice.profile is None:
        return
    for sites, mask in zip(model.layer_sites(), choice.profile.masks(choice.sparsity), strict=True):
        sites.mlp.mask = mask


def sparsity_rows(
    choice: SparsityChoice | None, costs: FormCosts | None, screens: ScreenCosts | None, *, how: str
) -> list[ReportRow]:
    """What became of it, for people.

    Args:
        costs: of the forms on the CPU; None: it has no part of an MLP.
        screens: of looking at 8-bit copies first; None: there are none.
        how: they were got.
    """
    if choice is None:
        return [ReportRow(section="compute", name="mlp_sparsity", value="off", why="every neuron is computed")]
    effect = "exact" if choice.is_exact else "changes answers"
    profile = choice.profile
    known = (
        f"{100 * profile.active_share:.1f} % active on {profile.num_tokens} tokens of the profile"
        if profile is not None
        else f"{100 * ASSUMED_ACTIVE:.0f} % active assumed, no profile"
    )
    if costs is None:
        value = f"{choice.sparsity}, {effect}; nothing is skipped: the CPU has no part of an MLP"
        return [ReportRow(section="compute", name="mlp_sparsity", value=value, why=known)]
    crossed = ", ".join(f"{100 * share:.0f} % at {num}" for num, share in costs.crossovers().items())
    value = f"{choice.sparsity}, {effect}; the CPU reads columns of active neurons, the GPU all"
    why = f"{known}; {how}: dense above {crossed or 'nothing'} tokens"
    if choice.predictor is not None:
        value += f"; which rows in front of it are computed says {choice.predictor.path.name}"
    if screens is not None:
        shares = ", ".join(f"{100 * screens.most_candidates(num):.0f} % at {num}" for num in screens.plain)
        value += "; rows in front of it are screened by 8-bit copies"
        why += f"; screening pays below candidates of {shares} tokens"
    elif choice.sparsity.kind is SparsityKind.RELU_SCREENED:
        value += "; nothing is screened: rows are no whole blocks of an 8-bit copy"
    return [ReportRow(section="compute", name="mlp_sparsity", value=value, why=why)]


def cache_rows(config: EngineConfig, cache: NeuronCache | None, *, has_profile: bool) -> list[ReportRow]:
    """Which neurons lie on the accelerator, for people."""
    if config.neuron_cache is CacheChoice.OFF:
        return []
    if cache is None:
        value, why = f"{config.neuron_cache}, without effect", "no MLP has neurons on the accelerator and with the CPU"
    else:
        num_near = sum(layer.place.num_near for layer in cache.layers)
        num = num_near + sum(layer.place.num_far for layer in cache.layers)
        value = f"{config.neuron_cache}, {num_near} of {num} neurons of {len(cache.layers)} layers on the accelerator"
        why = "the most active of the profile first" if has_profile else "no profile: the first ones, to begin with"
    return [ReportRow(section="compute", name="neuron_cache", value=value, why=why)]

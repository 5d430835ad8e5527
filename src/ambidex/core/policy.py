"""Which keys a decode step attends: the policies by name, and what may be set for them, as plain values.

A budget counts the keys from before a step: the step's own key is attended besides. It is a number of tokens, or a
share of the prompt, which is how the papers give it; then it stays what it was after the prompt.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from ambidex.core.errors import ConfigError


class PolicyName(StrEnum):
    """A method of choosing keys (`attention/select/`, one file each). `exact`: all keys. `flexgen`, `moe_lightning`:
    all keys, too; what the method says is who reads them (`LANE_PRESETS`)."""

    EXACT = "exact"
    BOUNDED = "bounded"
    STREAMING_LLM = "streaming_llm"
    H2O = "h2o"
    KEYFORMER = "keyformer"
    QINFER_WINDOWS = "qinfer_windows"
    QUEST = "quest"
    INFINIGEN = "infinigen"
    HYBRIDGEN = "hybridgen"
    FLEXGEN = "flexgen"
    MOE_LIGHTNING = "moe_lightning"

    @property
    def attends_all(self) -> bool:
        """Every key is attended: answers are those of `exact` up to rounding, and caches may be shared."""
        return self in (PolicyName.EXACT, *LANE_PRESETS)

    @property
    def looks_ahead(self) -> bool:
        """Keys are chosen by queries made a layer early: decode steps have a form that is made for speed
        (`attention/early_decode.py`)."""
        return self in (PolicyName.INFINIGEN, PolicyName.HYBRIDGEN)

    @property
    def adds_up(self) -> bool:
        """What queries gave each key is added up, and the keys that have least are dropped."""
        return self in (PolicyName.H2O, PolicyName.KEYFORMER, PolicyName.QINFER_WINDOWS)

    @property
    def has_fixed_steps(self) -> bool:
        """Decode steps can have a fixed form of their own (`runner/policy_steps.py`)."""
        return self.looks_ahead or self.has_lone_steps

    @property
    def has_lone_steps(self) -> bool:
        """They can, and no other fast form beside it: in all layers that choose the accelerator does so on its own, and
        attends rows in host memory."""
        return self.adds_up or self in (PolicyName.STREAMING_LLM, PolicyName.QUEST)


class H2OForm(StrEnum):
    """Which of the authors' programs is followed. `auto`: flexgen."""

    AUTO = "auto"
    FLEXGEN = "flexgen"
    DROP = "drop"


class BoundedScores(StrEnum):
    """What rows to drop are chosen by. `scan`: the native op, scores over an 8-bit copy of K with their error.
    `exact`, `int8`: the reference form in fp64, all of K or an 8-bit copy. `auto`: scan if it can be had, else exact.
    """

    AUTO = "auto"
    SCAN = "scan"
    EXACT = "exact"
    INT8 = "int8"


class HybridGenMode(StrEnum):
    """How HybridGen finds the keys that it selects: after all scores, or by a light predictor. `auto`: post."""

    AUTO = "auto"
    POST = "post"
    PRE = "pre"


class HybridGenFeedback(StrEnum):
    """What HybridGen's feedback may change. `off`: nothing, the mode is fixed. `mode`: the mode alone. `full`: the
    number of selected keys, then the mode. `auto`: off."""

    AUTO = "auto"
    OFF = "off"
    MODE = "mode"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class LanePreset:
    """Who reads what lies in DRAM, where a method says so and nothing is measured for it.

    `stream_percent`: of the keys there, that a GPU reads over the link; the CPU attends the others. `keeps_keys`:
    `placement` auto may leave keys in GPU memory; else all whole blocks lie in DRAM. Weights in DRAM travel to the GPU
    in every step, once for all requests of it.
    """

    stream_percent: int
    keeps_keys: bool


LANE_PRESETS: Final[Mapping[PolicyName, LanePreset]] = {
    # all KV moved to the GPU in each layer and step (cpu_cache_compute off, FMInference/FlexLLMGen)
    PolicyName.FLEXGEN: LanePreset(stream_percent=100, keeps_keys=True),
    # decode attention on the CPU alone (cg = 0, cc = 1, caoshiyi/artifacts, asplos25)
    PolicyName.MOE_LIGHTNING: LanePreset(stream_percent=0, keeps_keys=False),
}
"""Methods that attend all keys and divide the work their own way. Their rules for batch and placement:
`solver/published.py`."""

MIN_BUDGET: Final = 2
"""Tokens: a budget that is cut in two has something in each half."""
MIN_PAGES: Final = 3
"""Pages that Quest attends at least, as in the authors' code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Keys from before a step that may be attended: a number, or a share of the prompt."""

    tokens: int | None = None
    percent: int | None = None

    def of(self, num_prompt_tokens: int) -> int:
        """Tokens for a prompt of that length, at least `MIN_BUDGET`."""
        if self.tokens is not None:
            return self.tokens
        return max(MIN_BUDGET, num_prompt_tokens * (self.percent or 0) // 100)

    def __str__(self) -> str:
        return f"{self.tokens} tokens" if self.tokens is not None else f"{self.percent} % of the prompt"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """A policy and all that is set for it, defaults filled in; what another policy has is None."""

    name: PolicyName
    budget: Budget | None = None
    recent_percent: int | None = None
    sink_tokens: int | None = None
    h2o_form: H2OForm | None = None
    tau_start: float | None = None
    tau_end: float | None = None
    page_tokens: int | None = None
    exact_layers: int | None = None
    alpha: float | None = None
    partial_percent: int | None = None
    hybridgen_mode: HybridGenMode | None = None
    hybridgen_feedback: HybridGenFeedback | None = None
    min_selected_tokens: int | None = None
    near_tokens: int | None = None
    accuracy_profile: str | None = None
    max_dropped_mass: float | None = None
    bounded_scores: BoundedScores | None = None
    hot_tokens: int | None = None
    seed: int = 0

    @property
    def is_exact(self) -> bool:
        """All keys are attended: nothing is chosen."""
        return self.name.attends_all

    def words(self) -> str:
        """The settings as a report shows them."""
        named = {name: getattr(self, name) for name in _OPTIONS if name not in _BUDGET_OPTIONS}
        parts = [f"budget {self.budget}"] if self.budget is not None else []
        parts += [f"{name} {value}" for name, value in named.items() if value is not None]
        return ", ".join(parts)


class PolicyOptions(Protocol):
    """The fields of `EngineConfig` that are a policy's."""

    @property
    def policy(self) -> PolicyName: ...
    @property
    def policy_tokens(self) -> int | None: ...
    @property
    def policy_percent(self) -> int | None: ...
    @property
    def recent_percent(self) -> int | None: ...
    @property
    def sink_tokens(self) -> int | None: ...
    @property
    def h2o_form(self) -> H2OForm: ...
    @property
    def tau_start(self) -> float | None: ...
    @property
    def tau_end(self) -> float | None: ...
    @property
    def page_tokens(self) -> int | None: ...
    @property
    def exact_layers(self) -> int | None: ...
    @property
    def alpha(self) -> float | None: ...
    @property
    def partial_percent(self) -> int | None: ...
    @property
    def hybridgen_mode(self) -> HybridGenMode: ...
    @property
    def hybridgen_feedback(self) -> HybridGenFeedback: ...
    @property
    def min_selected_tokens(self) -> int | None: ...
    @property
    def near_tokens(self) -> int | None: ...
    @property
    def accuracy_profile(self) -> str | None: ...
    @property
    def seed(self) -> int: ...
    @property
    def max_dropped_mass(self) -> float | None: ...
    @property
    def bounded_scores(self) -> BoundedScores: ...
    @property
    def hot_tokens(self) -> int | None: ...


Default = int | float | str | None

_BUDGET_OPTIONS: Final = ("policy_tokens", "policy_percent")
_OPTIONS: Final = (
    *_BUDGET_OPTIONS, "recent_percent", "sink_tokens", "h2o_form", "tau_start", "tau_end", "page_tokens",
    "exact_layers", "alpha", "partial_percent", "hybridgen_mode", "hybridgen_feedback", "min_selected_tokens",
    "near_tokens", "accuracy_profile", "max_dropped_mass", "bounded_scores",
    "hot_tokens",
)  # fmt: skip

DEFAULTS: Final[Mapping[PolicyName, Mapping[str, Default]]] = {
    PolicyName.EXACT: {},
    # design of this project: a dropped mass of 0.01 keeps about a sixth of the rows of a real model at 4K tokens
    PolicyName.BOUNDED: {"max_dropped_mass": 0.01, "bounded_scores": BoundedScores.AUTO, "hot_tokens": None},
    # the class's defaults, 4 + 512 (mit-han-lab/streaming-llm)
    PolicyName.STREAMING_LLM: {"policy_tokens": 516, "policy_percent": None, "sink_tokens": 4},
    # the paper's 20 %, half and half (arXiv:2306.14048, section 5)
    PolicyName.H2O: {
        "policy_tokens": None, "policy_percent": 20, "recent_percent": 50, "h2o_form": H2OForm.FLEXGEN
    },
    # the scripts' --kv_cache 60 --recent 30, temperature from 1 to 2 (d-matrix-ai/keyformer-llm)
    PolicyName.KEYFORMER: {
        "policy_tokens": None, "policy_percent": 60, "recent_percent": 30, "tau_start": 1.0, "tau_end": 2.0
    },
    # the test scripts' ratios 0.1 and 0.1 (PDS-Lab/Q-Infer, kv-cache)
    PolicyName.QINFER_WINDOWS: {"policy_tokens": None, "policy_percent": 20, "recent_percent": 50},
    # the scripts' --token_budget 1024 --chunk_size 16; two layers without (mit-han-lab/Quest)
    PolicyName.QUEST: {"policy_tokens": 1024, "policy_percent": None, "page_tokens": 16, "exact_layers": 2},
    # the scripts' α 4 (OPT; 5 for Llama 2), ratio 0.2, 400 keys of 2048 (snu-comparch/InfiniGen)
    PolicyName.INFINIGEN: {
        "policy_tokens": None, "policy_percent": 20, "alpha": 4.0, "partial_percent": 20, "exact_layers": 2
    },
    # not published: this project's (arXiv:2604.18529 gives no number of keys, window or predictor)
    PolicyName.HYBRIDGEN: {
        "policy_tokens": None, "policy_percent": 20, "near_tokens": 64, "partial_percent": 20, "exact_layers": 2,
        "hybridgen_mode": HybridGenMode.POST, "hybridgen_feedback": HybridGenFeedback.OFF, "min_selected_tokens": 64,
        "accuracy_profile": None,
    },
    PolicyName.FLEXGEN: {},
    PolicyName.MOE_LIGHTNING: {},
}  # fmt: skip
"""The options that each policy has, with their defaults as published."""


def resolve_policy(options: PolicyOptions) -> PolicySettings:
    """The policy and its settings.

    Raises:
        ConfigError: an option is another policy's, or its value is none that this one can have.
    """
    name = options.policy
    defaults = DEFAULTS[name]
    given = {option: value for option in _OPTIONS if not _is_left(value := getattr(options, option))}
    for option in given:
        if option not in defaults:
            owners = ", ".join(other for other, own in DEFAULTS.items() if option in own)
            raise ConfigError(f"{_named(option)} is an option of {owners}, not of `policy` {name}: leave it out")
    values = {**defaults, **given}
    budget = _budget(name, given, defaults)
    mass = values.get("max_dropped_mass")
    if isinstance(mass, int | float) and not 0 <= mass < 1:
        raise ConfigError(f"`max_dropped_mass` is {mass}: it must be at least 0 and below 1")
    sinks = values.get("sink_tokens")
    if isinstance(sinks, int) and budget is not None and budget.tokens is not None and sinks >= budget.tokens:
        raise ConfigError(
            f"`sink_tokens` is {sinks}: `policy_tokens` {budget.tokens} must be above it, to keep recent tokens"
        )
    page = values.get("page_tokens")
    if isinstance(page, int) and budget is not None and budget.tokens is not None and budget.tokens < MIN_PAGES * page:
        raise ConfigError(
            f"`policy_tokens` is {budget.tokens}: quest attends at least {MIN_PAGES} pages of `page_tokens` {page}: "
            f"give at least {MIN_PAGES * page}"
        )
    for temperature in ("tau_start", "tau_end"):
        if values.get(temperature) == 0:
            raise ConfigError(f"{_named(temperature)} is 0: it must be above 0")
    own = {option: value for option, value in values.items() if option not in _BUDGET_OPTIONS}
    return PolicySettings(name=name, budget=budget, seed=options.seed, **own)


def _budget(name: PolicyName, given: Mapping[str, Default], defaults: Mapping[str, Default]) -> Budget | None:
    if "policy_tokens" not in defaults:
        return None
    if "policy_tokens" in given and "policy_percent" in given:
        raise ConfigError("`policy_tokens` and `policy_percent` exclude each other: give one")
    chosen = {option: given[option] for option in _BUDGET_OPTIONS if option in given} or {
        option: value for option, value in defaults.items() if option in _BUDGET_OPTIONS and value is not None
    }
    tokens, percent = chosen.get("policy_tokens"), chosen.get("policy_percent")
    assert isinstance(tokens, int | None), "a number, by `check_settings`"
    assert isinstance(percent, int | None), "a number, by `check_settings`"
    if tokens is not None and tokens < MIN_BUDGET:
        raise ConfigError(f"`policy_tokens` is {tokens}: `policy` {name} needs at least {MIN_BUDGET}")
    return Budget(tokens=tokens, percent=percent)


def _is_left(value: Default) -> bool:
    """Nothing was set: None, or the member `auto` of a choice."""
    return value is None or (isinstance(value, StrEnum) and value == "auto")


def _named(option: str) -> str:
    """As errors name a setting (`core.config`)."""
    return f"`{option}`"

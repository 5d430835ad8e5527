"""Policies and their options: defaults as published, another policy's options refused by name."""

from typing import Any

import pytest

from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.core.policy import (
    DEFAULTS,
    BoundedScores,
    Budget,
    H2OForm,
    HybridGenFeedback,
    HybridGenMode,
    PolicyName,
    PolicySettings,
    resolve_policy,
)


def resolve(**settings: Any) -> PolicySettings:
    return resolve_policy(EngineConfig(model="m", **settings))


def test_without_a_policy_all_keys_are_attended() -> None:
    assert resolve() == PolicySettings(name=PolicyName.EXACT)
    assert resolve().is_exact


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("bounded", {"max_dropped_mass": 0.01, "bounded_scores": BoundedScores.AUTO, "hot_tokens": None}),
        ("streaming_llm", {"budget": Budget(tokens=516), "sink_tokens": 4}),
        ("h2o", {"budget": Budget(percent=20), "recent_percent": 50, "h2o_form": H2OForm.FLEXGEN}),
        ("keyformer", {"budget": Budget(percent=60), "recent_percent": 30, "tau_start": 1.0, "tau_end": 2.0}),
        ("qinfer_windows", {"budget": Budget(percent=20), "recent_percent": 50}),
        ("quest", {"budget": Budget(tokens=1024), "page_tokens": 16, "exact_layers": 2}),
        ("infinigen", {"budget": Budget(percent=20), "alpha": 4.0, "partial_percent": 20, "exact_layers": 2}),
        (
            "hybridgen",
            {
                "budget": Budget(percent=20),
                "near_tokens": 64,
                "partial_percent": 20,
                "exact_layers": 2,
                "hybridgen_mode": HybridGenMode.POST,
                "hybridgen_feedback": HybridGenFeedback.OFF,
                "min_selected_tokens": 64,
            },
        ),
    ],
)
def test_defaults_are_the_published_ones(name: str, wanted: dict[str, Any]) -> None:
    assert resolve(policy=name) == PolicySettings(name=PolicyName(name), **wanted)


@pytest.mark.parametrize(("tokens", "percent", "wanted"), [(7, None, 7), (None, 20, 19), (None, 1, 2)])
def test_budget_is_a_number_or_a_share_of_the_prompt(tokens: int | None, percent: int | None, wanted: int) -> None:
    assert Budget(tokens=tokens, percent=percent).of(99) == wanted


def test_given_tokens_replace_a_default_share_and_the_other_way_round() -> None:
    assert resolve(policy="h2o", policy_tokens=50).budget == Budget(tokens=50)
    assert resolve(policy="streaming_llm", policy_percent=30).budget == Budget(percent=30)


@pytest.mark.parametrize("name", PolicyName)
def test_options_of_another_policy_are_refused_by_name(name: PolicyName) -> None:
    values: dict[str, Any] = {
        "policy_tokens": 9, "policy_percent": 9, "recent_percent": 9, "sink_tokens": 9, "h2o_form": "drop",
        "max_dropped_mass": 0.5, "bounded_scores": "int8", "tau_start": 3.0, "tau_end": 3.0, "page_tokens": 2,
        "hot_tokens": 7,
        "exact_layers": 3, "alpha": 3.0, "partial_percent": 9, "hybridgen_mode": "pre", "hybridgen_feedback": "mode",
        "min_selected_tokens": 5, "near_tokens": 9, "accuracy_profile": "x.json",
    }  # fmt: skip
    assert set(values) == {option for own in DEFAULTS.values() for option in own}
    for option, value in values.items():
        if option in DEFAULTS[name]:
            continue
        flag = f"`{option}`"
        with pytest.raises(ConfigError, match=f"{flag} is an option of .*, not of `policy` {name}: leave it out"):
            EngineConfig(model="m", policy=name, **{option: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "h3o"}, "is 'h3o': it must be one of exact, bounded, "),
        (
            {"policy": "bounded", "max_dropped_mass": 1.0},
            r"`max_dropped_mass` is 1\.0: it must be at least 0 and below 1",
        ),
        ({"policy": "bounded", "max_dropped_mass": -0.1}, "is -0.1: it must be a number of at least 0"),
        ({"policy": "bounded", "max_dropped_mass": float("nan")}, "is nan: it must be a number of at least 0"),
        ({"policy": "bounded", "bounded_scores": "int3"}, "is 'int3': it must be one of auto, scan, exact, int8"),
        ({"policy": "h2o", "policy_tokens": 1}, "`policy_tokens` is 1: `policy` h2o needs at least 2"),
        ({"policy": "h2o", "policy_tokens": 8, "policy_percent": 8}, "exclude each other: give one"),
        ({"policy": "h2o", "policy_percent": 101}, "is 101: it must be at most 100"),
        (
            {"policy": "quest", "policy_tokens": 47},
            "`policy_tokens` is 47: quest attends at least 3 pages .* at least 48",
        ),
        ({"policy": "keyformer", "tau_end": 0.0}, "`tau_end` is 0: it must be above 0"),
        ({"policy": "infinigen", "alpha": -1.0}, r"is -1\.0: it must be a number of at least 0"),
        ({"policy": "infinigen", "alpha": 1e300}, r"is 1e\+300: it must be a number of at most 9223372036854775807"),
        ({"policy": "hybridgen", "hybridgen_mode": "full"}, "is 'full': it must be one of auto, post"),
        ({"policy": "streaming_llm", "policy_tokens": 4}, "`sink_tokens` is 4: `policy_tokens` 4 must be above it"),
    ],
)
def test_values_that_a_policy_cannot_have_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **settings)


def test_a_policy_has_no_prefix_cache() -> None:
    """A server with a policy kept prefixes by itself; the first that came back broke the step."""
    assert EngineConfig(model="m", policy="h2o").keeping_prefixes().prefix_cache_percent is None
    assert EngineConfig(model="m").keeping_prefixes().prefix_cache_percent == 100
    EngineConfig(model="m", policy="h2o", prefix_cache_percent=0)
    with pytest.raises(
        ConfigError, match="is 50: policy h2o must see every prompt as it is computed: use 0, or policy"
    ):
        EngineConfig(model="m", policy="h2o", prefix_cache_percent=50)


def test_words_name_what_is_set() -> None:
    assert resolve(policy="bounded").words() == "max_dropped_mass 0.01, bounded_scores auto"
    assert resolve(policy="h2o").words() == "budget 20 % of the prompt, recent_percent 50, h2o_form flexgen"

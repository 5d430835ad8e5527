import dataclasses

import pytest

from ambidex.core.config import EngineConfig, SettingKind, flag_name, variable_name, with_flags
from ambidex.core.errors import ConfigError


def test_config_with_only_a_model_is_valid() -> None:
    config = EngineConfig(model="smollm2")
    assert config.recent_window is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", 0),
        ("max_context_len", 1),
        ("kv_gpu_tokens", -1),
        ("num_sink_tokens", -1),
        ("recent_window", -1),
        ("max_tokens_per_step", 0),
        ("max_running_requests", 0),
        ("num_threads", 0),
        ("seed", -1),
    ],
)
def test_config_with_value_below_its_range_raises_naming_the_flag(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"`{name}` is {value}: it must be at least"):
        dataclasses.replace(EngineConfig(model="m"), **{name: value})


@pytest.mark.parametrize("name", ["gpu_memory", "dram_memory"])
def test_config_with_negative_budget_raises(name: str) -> None:
    with pytest.raises(ConfigError, match="must be at least 0"):
        dataclasses.replace(EngineConfig(model="m"), **{name: -1})


def test_config_with_huge_block_raises() -> None:
    assert EngineConfig(model="m", block_size=1024).block_size == 1024
    with pytest.raises(ConfigError, match="at most 1024"):
        EngineConfig(model="m", block_size=1024 + 1)


def test_config_without_model_raises() -> None:
    with pytest.raises(ConfigError, match="no model is named"):
        EngineConfig(model="")


def test_config_fields_have_kind_and_help() -> None:
    for item in dataclasses.fields(EngineConfig):
        if item.name != "model":
            assert isinstance(item.metadata["kind"], SettingKind)
            assert item.metadata["help"]


def test_names_of_flag_and_variable_follow_the_field() -> None:
    assert flag_name("kv_gpu_tokens") == "--kv-gpu-tokens"


def test_messages_name_settings_as_python_does_and_as_flags_at_a_terminal() -> None:
    text = "`kv_gpu_tokens` is -1: lower it, or `generate` with `ambidex doctor`"
    assert with_flags(text, {"kv_gpu_tokens"}) == "--kv-gpu-tokens is -1: lower it, or `generate` with `ambidex doctor`"
    assert variable_name("kv_gpu_tokens") == "AMBIDEX_KV_GPU_TOKENS"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": "64"}, "`block_size` is '64': it must be a whole number"),
        ({"block_size": 2.5}, "`block_size` is 2.5: it must be a whole number"),
        ({"num_threads": 10**30}, "`num_threads` is .*: it must be at most 4096"),
        ({"seed": 10**5000}, "`seed` is a number of .* bits: it must be at most"),
        ({"chat_template": 5}, "`chat_template` is 5: it must be text"),
        ({"device": "tpu"}, "`device` is 'tpu': it must be one of auto, cpu, cuda"),
    ],
)
def test_config_value_of_a_wrong_kind_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", **changes)  # type: ignore[arg-type]


def test_config_takes_sizes_and_choices_as_text() -> None:
    config = EngineConfig(model="m", gpu_memory="1GiB", dtype="fp32")  # type: ignore[arg-type]
    assert (config.gpu_memory, config.dtype.value) == (1 << 30, "fp32")


def test_unknown_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="'kv_gpu_token' is unknown: did you mean kv_gpu_tokens"):
        EngineConfig.of("m", {"kv_gpu_token": 3})

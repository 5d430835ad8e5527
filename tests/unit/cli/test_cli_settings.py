import dataclasses
from pathlib import Path

import pytest
from fake_llm import FakeLLM, run_ambidex

from ambidex.cli.settings import DEFAULT_OUTPUT_TOKENS, ENGINE_SETTINGS, FLAG_SETTINGS, SAMPLING_SETTINGS
from ambidex.core.config import DeviceKind, EngineConfig
from ambidex.core.request import SamplingParams


def choose(*args: str, env: dict[str, str] | None = None) -> tuple[EngineConfig, SamplingParams]:
    """What a run with these flags gives to the engine."""
    llm = FakeLLM()
    result = run_ambidex("generate", "m", "p", "--json", *args, llm=llm, env=env)
    assert result.exit_code == 0, result.stderr
    return llm.configs[0], llm.asked[0][1]


def refuse(*args: str, env: dict[str, str] | None = None) -> str:
    """The error line of a run that is the user's mistake."""
    result = run_ambidex("generate", "m", "p", *args, env=env)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    return result.stderr.removeprefix("error: ").strip()


def test_settings_cover_every_field() -> None:
    assert [setting.name for setting in ENGINE_SETTINGS] == [
        field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"
    ]
    assert [setting.name for setting in SAMPLING_SETTINGS] == [
        field.name for field in dataclasses.fields(SamplingParams)
    ]


def test_names_of_flags_do_not_clash() -> None:
    names = [setting.name for setting in FLAG_SETTINGS]
    assert len(names) == len(set(names))


def test_nothing_given_leaves_the_defaults_of_the_dataclasses() -> None:
    config, params = choose()
    assert config == EngineConfig(model="m")
    assert params == SamplingParams(max_output_tokens=DEFAULT_OUTPUT_TOKENS)


def test_help_shows_defaults_and_units() -> None:
    text = run_ambidex("generate", "--help").stdout
    assert "--block-size TOKENS             tokens of a KV block  [default: 64]" in text
    assert "--gpu-memory SIZE " in text
    assert "Sampling settings:" in text


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        (("--device", "cpu"), "device", DeviceKind.CPU),
        (("--block-size", "16"), "block_size", 16),
        (("--gpu-memory", "1.5GiB"), "gpu_memory", 3 << 29),
        (("--gpu-memory", "1000"), "gpu_memory", 1000),
        (("--kv-gpu-tokens", "none"), "kv_gpu_tokens", None),
        (("--seed", "7"), "seed", 7),
    ],
)
def test_engine_flag_is_read(args: tuple[str, ...], name: str, value: object) -> None:
    assert getattr(choose(*args)[0], name) == value


@pytest.mark.parametrize(
    ("args", "name", "value"),
    [
        (("--temperature", "0"), "temperature", 0.0),
        (("--max-output-tokens", "none"), "max_output_tokens", None),
        (("--stop", "a b", "--stop", "\n"), "stop", ("a b", "\n")),
        (("--stop-token-ids", "3"), "stop_token_ids", (3,)),
        (("--include-stop",), "include_stop", True),
        (("--logit-bias", "3=-100", "--logit-bias", "4=.5"), "logit_bias", ((3, -100.0), (4, 0.5))),
        (("--logprobs", "0"), "logprobs", 0),
    ],
)
def test_sampling_flag_is_read(args: tuple[str, ...], name: str, value: object) -> None:
    assert getattr(choose(*args)[1], name) == value


@pytest.mark.parametrize(
    ("variable", "text", "name", "value"),
    [
        ("AMBIDEX_TEMPERATURE", "0.5", "temperature", 0.5),
        ("AMBIDEX_STOP", '["a b", "c"]', "stop", ("a b", "c")),
        ("AMBIDEX_LOGIT_BIAS", '{"3": -1}', "logit_bias", ((3, -1.0),)),
        ("AMBIDEX_LOGIT_BIAS", '["3=-1"]', "logit_bias", ((3, -1.0),)),
        ("AMBIDEX_IGNORE_EOS", "1", "ignore_eos", True),
        ("AMBIDEX_TEMPERATURE", "", "temperature", 1.0),
    ],
)
def test_sampling_variable_is_read(variable: str, text: str, name: str, value: object) -> None:
    assert getattr(choose(env={variable: text})[1], name) == value


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("block_size = 8\nnum_sink_tokens = 8\nrecent_window = 8\n")
    env = {"AMBIDEX_BLOCK_SIZE": "16", "AMBIDEX_NUM_SINK_TOKENS": "16"}
    config, _ = choose("--config", str(file), "--block-size", "32", env=env)
    assert (config.block_size, config.num_sink_tokens, config.recent_window) == (32, 16, 8)
    assert config.max_tokens_per_step == EngineConfig(model="m").max_tokens_per_step


def test_switch_can_be_turned_off_again_by_its_flag() -> None:
    assert not choose("--no-ignore-eos", env={"AMBIDEX_IGNORE_EOS": "1"})[1].ignore_eos


@pytest.mark.parametrize(
    ("args", "env", "line"),
    [
        (("--block-size", "6.5"), {}, "--block-size is '6.5': it must be a whole number"),
        ((), {"AMBIDEX_BLOCK_SIZE": "x"}, "AMBIDEX_BLOCK_SIZE is 'x': it must be a whole number"),
        (("--block-size", "0"), {}, "--block-size is 0: it must be at least 1"),
        (("--gpu-memory", "8 apples"), {},
         "--gpu-memory is '8 apples': write it like 8GiB, 512MiB or 2GB, at most 2^63 - 1 bytes"),
        (("--device", "tpu"), {}, "--device is 'tpu': it must be one of auto, cpu, cuda"),
        (("--temperature", "hot"), {}, "--temperature is 'hot': it must be a number"),
        (("--temperature", "nan"), {}, "temperature is nan: it must be finite"),
        (("--top-p", "2"), {}, "top_p is 2.0: it must be in [0, 1]"),
        (("--logit-bias", "3"), {}, "--logit-bias is '3': write it like 42=-100 (token id = bias)"),
        ((), {"AMBIDEX_STOP": "a"},
         'AMBIDEX_STOP must hold a JSON array, such as ["a", "b"]: no JSON: Expecting value: line 1 column 1 (char 0)'),
        ((), {"AMBIDEX_STOP": "3"}, 'AMBIDEX_STOP must hold a JSON array, such as ["a", "b"]: it must be a list'),
        ((), {"AMBIDEX_STOP": "[3]"}, "AMBIDEX_STOP is 3: it must be a text"),
    ],
)  # fmt: skip
def test_wrong_value_is_refused_with_where_it_came_from(args: tuple[str, ...], env: dict[str, str], line: str) -> None:
    assert refuse(*args, env=env) == line


def test_variable_nested_too_deeply_is_refused_without_recursion_error() -> None:
    assert refuse(env={"AMBIDEX_STOP": "[" * 30_000}).endswith("no JSON: it is nested too deeply")


@pytest.mark.parametrize(
    ("name", "text"),
    [("top_k", "9" * 19), ("top_k", "-" + "9" * 19), ("stop_token_ids", f"[{10**400}]"), ("seed", str(10**400))],
)
def test_whole_number_too_large_for_a_long_is_refused_before_it_overflows(name: str, text: str) -> None:
    error = refuse(env={f"AMBIDEX_{name.upper()}": text})
    assert error.startswith(f"AMBIDEX_{name.upper()} is ")
    assert error.endswith(": it must lie in [-2^63, 2^63)")
    assert len(error) < 200


def test_bias_too_large_for_a_float_in_a_variable_is_refused_without_overflow_error() -> None:
    error = refuse(env={"AMBIDEX_LOGIT_BIAS": f"[[3, {10**400}]]"})
    assert error.startswith("AMBIDEX_LOGIT_BIAS is [3, 1000")
    assert error.endswith("…: it is too large for a number of 64 bits")


def test_size_too_large_for_a_float_is_refused_without_overflow_error() -> None:
    assert refuse("--gpu-memory", "9" * 400 + "GiB").endswith("at most 2^63 - 1 bytes")


@pytest.mark.parametrize(
    ("args", "env", "line"),
    [
        (("--logit-bias", "3=1", "--logit-bias", "3=2"), {}, "--logit-bias: id 3 comes twice: leave one out"),
        ((), {"AMBIDEX_LOGIT_BIAS": '{"3": 1, "03": 2}'}, "AMBIDEX_LOGIT_BIAS: id 3 comes twice: leave one out"),
        ((), {"AMBIDEX_LOGIT_BIAS": '{"3": 1, "3": 2}'},
         """AMBIDEX_LOGIT_BIAS must hold a JSON array, such as ["a", "b"]: key '3' comes twice: leave one out"""),
    ],
)  # fmt: skip
def test_id_with_two_biases_is_refused_not_taken_from_the_last(
    args: tuple[str, ...], env: dict[str, str], line: str
) -> None:
    assert refuse(*args, env=env) == line


def test_verbose_reports_each_setting_its_source_and_what_the_engine_made_of_it(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text('gpu_memory = "1GiB"\n')
    result = run_ambidex("generate", "m", "p", "-v", "--config", str(file), "--seed", "3", env={"AMBIDEX_TOP_K": "5"})
    rows = [" ".join(line.split()) for line in result.stderr.splitlines()]
    assert "model model m MODEL" in rows
    assert "engine seed 3 --seed" in rows
    assert "engine block_size 64 default" in rows
    assert "engine kv_gpu_tokens auto default" in rows
    assert f"engine gpu_memory 1.0 GiB gpu_memory in {file}" in rows
    assert "sampling top_k 5 AMBIDEX_TOP_K" in rows
    assert "kv gpu blocks 7 what fits" in rows
    assert "KV read by cpu lane 4.0 KiB" in rows

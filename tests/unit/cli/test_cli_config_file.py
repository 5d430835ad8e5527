from pathlib import Path

import pytest
from fake_llm import FakeLLM, run_ambidex


def run_with_file(path: Path, text: str | bytes, **env: str) -> tuple[FakeLLM, int, str]:
    """Run with a configuration file; gives the engine, the exit code and stderr."""
    file = path / "my.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    llm = FakeLLM()
    result = run_ambidex("generate", "--config", str(file), "p", llm=llm, env=env)
    return llm, result.exit_code, result.stderr.replace(str(file), "my.toml")


def test_file_sets_model_engine_and_sampling(tmp_path: Path) -> None:
    text = 'model = "m"\nblock_size = 8\ngpu_memory = 4096\nstop = ["a"]\nignore_eos = true\nlogit_bias = {3 = -1}\n'
    llm, code, _ = run_with_file(tmp_path, text)
    assert code == 0
    assert (llm.configs[0].model, llm.configs[0].block_size, llm.configs[0].gpu_memory) == ("m", 8, 4096)
    params = llm.asked[0][1]
    assert (params.stop, params.ignore_eos, params.logit_bias) == (("a",), True, ((3, -1.0),))


def test_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "my.toml"
    file.write_text("block_size = 8")
    llm = FakeLLM()
    assert run_ambidex("generate", "m", "p", llm=llm, env={"AMBIDEX_CONFIG": str(file)}).exit_code == 0
    assert llm.configs[0].block_size == 8


def test_file_may_hold_settings_of_other_verbs(tmp_path: Path) -> None:
    assert run_with_file(tmp_path, 'model = "m"\nsystem = "Be brief."')[1] == 0


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("block-size = 8", "my.toml: unknown setting block-size (did you mean block_size?): see ambidex"),
        ("block_size = 8.0", "my.toml: block_size is 8.0: it must be a whole number"),
        ("block_size = true", "my.toml: block_size is True: it must be a whole number"),
        ("block_size = [8]", "my.toml: block_size is [8]: it must be a whole number"),
        ('temperature = [1]', "my.toml: temperature is [1]: it must be a number"),
        ('stop = "a"', "my.toml: stop is 'a': it must be a list"),
        ("ignore_eos = 1", "my.toml: ignore_eos is 1: it must be true or false"),
        ("model = 3", "my.toml: model is 3: it must be a text"),
        ("logit_bias = [[1, 2, 3]]", "my.toml: logit_bias is [[1, 2, 3]]: write it like 42=-100 (token id = bias)"),
        ("block_size = ", "configuration file my.toml cannot be read: Invalid value (at end of document)"),
        (f"temperature = {10**400}", "my.toml: temperature is 1000"),
        (f"top_k = {10**400}", "my.toml: top_k is 1000"),
        (f"block_size = 0x{'f' * 5000}", "my.toml: block_size is too long to show: it must lie in [-2^63, 2^63)"),
        (f"block_size = {'9' * 5001}", "configuration file my.toml cannot be read: Exceeds the limit"),
        (f"stop = {'[' * 5000}", "configuration file my.toml cannot be read: it is nested too deeply"),
        ("logit_bias = [[3, 1], [3, 2]]", "my.toml: logit_bias is [[3, 1], [3, 2]]: id 3 comes twice: leave one out"),
        (b"# \xff", "configuration file my.toml cannot be read: 'utf-8' codec can't decode byte 0xff"),
    ],
)  # fmt: skip
def test_wrong_file_is_refused_with_the_key(tmp_path: Path, text: str | bytes, line: str) -> None:
    _, code, error = run_with_file(tmp_path, text)
    assert (code, error.count("\n")) == (2, 1)
    assert error.startswith(f"error: {line}")


def test_missing_file_is_refused() -> None:
    result = run_ambidex("generate", "--config", "/no/such.toml", "m", "p")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: configuration file /no/such.toml cannot be read")

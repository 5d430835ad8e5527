import json
from pathlib import Path

import pytest
from fake_llm import FakeLLM, run_ambidex

ANSWER = "Hello wörld!\n"


def test_generate_streams_the_answer_to_stdout() -> None:
    llm = FakeLLM()
    result = run_ambidex("generate", "m", "Say hello", llm=llm)
    assert (result.exit_code, result.stdout, result.stderr) == (0, ANSWER, "")
    assert (llm.asked[0][0], llm.is_closed) == ("Say hello", True)


@pytest.mark.parametrize(
    ("args", "env"),
    [
        (("m", "p"), {}),
        (("-m", "m", "p"), {}),
        (("p",), {"AMBIDEX_MODEL": "m"}),
        (("m", "p"), {"AMBIDEX_MODEL": "other"}),
        (("m",), {}),
        (("m", "-"), {}),
        (("-m", "m"), {}),
        ((), {"AMBIDEX_MODEL": "m"}),
    ],
)
def test_model_and_prompt_are_told_apart(args: tuple[str, ...], env: dict[str, str]) -> None:
    llm = FakeLLM()
    result = run_ambidex("generate", *args, llm=llm, env=env, stdin="p\n")
    assert result.exit_code == 0, result.stderr
    assert (llm.configs[0].model, llm.asked[0][0]) == ("m", "p")


@pytest.mark.parametrize("args", [("m", "two", "words"), ("-m", "m", "two", "words"), ("-m", "m", "p", "--file", "f")])
def test_too_many_words_are_refused(args: tuple[str, ...]) -> None:
    result = run_ambidex("generate", *args)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: unexpected argument")


def test_no_model_is_refused() -> None:
    result = run_ambidex("generate", stdin="p")
    assert (result.exit_code, result.stderr) == (
        2, "error: no model is named: give a folder, a .gguf file, a Hub id, or smollm2\n",
    )  # fmt: skip


def test_prompt_is_read_from_a_file_without_its_final_newline(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("Zwölf\n\n".encode())
    llm = FakeLLM()
    assert run_ambidex("generate", "m", "--file", str(file), llm=llm).exit_code == 0
    assert llm.asked[0][0] == "Zwölf\n"


@pytest.mark.parametrize("text", ["", "\n", "\r\n"])
def test_empty_stdin_is_refused(text: str) -> None:
    result = run_ambidex("generate", "m", stdin=text)
    assert (result.exit_code, result.stderr) == (2, "error: the prompt is empty: give at least one character\n")


def test_empty_prompt_is_refused_before_a_model_is_loaded() -> None:
    llm = FakeLLM()
    result = run_ambidex("generate", "m", "", llm=llm)
    assert (result.exit_code, llm.configs) == (2, [])
    assert result.stderr == "error: the prompt is empty: give at least one character\n"


def test_invalid_utf8_on_stdin_is_refused_with_its_offset() -> None:
    result = run_ambidex("generate", "m", "-", stdin=b"abc\xff\n")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith("error: stdin is not valid UTF-8: byte 0xff at offset 3")


def test_invalid_utf8_in_a_file_is_refused_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xc3")
    result = run_ambidex("generate", "m", "--file", str(file))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {file} is not valid UTF-8: byte 0xc3 at offset 0")


def test_half_a_character_in_an_argument_is_refused() -> None:
    result = run_ambidex("generate", "m", "a\udcff")
    assert (result.exit_code, result.stderr) == (
        2, "error: PROMPT is not valid Unicode: half a character at offset 1\n",
    )  # fmt: skip


def test_missing_prompt_file_is_refused() -> None:
    result = run_ambidex("generate", "m", "--file", "/no/such.txt")
    assert (result.exit_code, result.stderr) == (
        2, "error: --file /no/such.txt cannot be read: No such file or directory\n",
    )  # fmt: skip


def test_prompt_longer_than_the_limit_is_refused_with_both_counts() -> None:
    llm = FakeLLM(context_limit=3)
    result = run_ambidex("generate", "m", "one two three four", llm=llm)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "prompt of 4 tokens does not fit into the context limit of 3 tokens" in result.stderr
    assert llm.is_closed


def test_request_that_fails_in_the_engine_is_exit_1() -> None:
    result = run_ambidex("generate", "m", "NAN")
    assert (result.exit_code, result.stderr) == (1, "error: logits are not numbers\n")


def test_answer_that_was_cut_is_explained() -> None:
    result = run_ambidex("generate", "m", "p", "--max-output-tokens", "2")
    assert (result.exit_code, result.stdout) == (0, "Hello wörld\n")
    assert result.stderr == "note: the answer ends after 2 tokens (--max-output-tokens)\n"


def test_json_is_one_object_with_counts_and_statistics() -> None:
    result = run_ambidex("generate", "m", "a prompt", "--json", "--logprobs", "1")
    answer = json.loads(result.stdout)
    assert (answer["model"], answer["text"], answer["finish_reason"]) == ("m", "Hello wörld!", "stop")
    assert (answer["num_prompt_tokens"], answer["num_output_tokens"], answer["token_ids"]) == (2, 3, [0, 1, 2])
    assert answer["logprobs"][0] == {
        "token_id": 5, "token": "<5>", "logprob": -0.5,
        "top_logprobs": [{"token_id": 5, "token": "<5>", "logprob": -0.5}],
    }  # fmt: skip
    assert (answer["stats"]["kv_bytes"], answer["stats"]["lane_bytes"]) == ({"gpu": 2048, "dram": 0}, {"cpu": 4096})


def test_json_of_a_failed_request_is_an_error() -> None:
    result = run_ambidex("generate", "m", "NAN", "--json")
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "error: logits are not numbers\n")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (("--logprobs", "1"), "error: --logprobs shows itself only with --json or --jsonl"),
        (("--file", "a", "--jsonl", "b"), "error: --file and --jsonl exclude each other"),
        (("--jsonl", "b"), "error: --jsonl IN and --output OUT belong together"),
        (("--output", "b"), "error: --jsonl IN and --output OUT belong together"),
        (("--jsonl", "a", "--output", "b", "--json"), "error: --json and --jsonl exclude each other"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(args: tuple[str, ...], line: str) -> None:
    result = run_ambidex("generate", "m", *args)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(line)

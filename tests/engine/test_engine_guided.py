"""Answers held to a JSON schema, a regular expression or a grammar."""

import json
import re
from collections.abc import Iterator

import pytest

from ambidex import LLM, FinishReason, RequestError, SamplingParams
from tiny_engine import ids_of, make_engine_folder

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(str(make_engine_folder(tmp_path_factory.mktemp("guided"))), block_size=8, kv_gpu_tokens=64) as llm:
        yield llm


@pytest.mark.parametrize("seed", range(5))
def test_answer_fits_its_json_schema(llm: LLM, seed: int) -> None:
    no_space = tuple((ids_of(space)[0], -100.0) for space in " \n\r\t")
    params = SamplingParams(json_schema=json.dumps(SCHEMA), max_output_tokens=100, seed=seed, logit_bias=no_space)
    output = llm.generate("x", params)[0]
    assert output.finish_reason is FinishReason.STOP
    answer = json.loads(output.text)
    assert answer["name"] in ("ann", "bob")
    assert 0 <= answer["age"] <= 99


@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_answer_matches_its_regex_and_ends_by_itself(llm: LLM, temperature: float) -> None:
    params = SamplingParams(regex="(ab|cd){3}[0-9]{2}", max_output_tokens=50, temperature=temperature, seed=1)
    output = llm.generate("hello", params)[0]
    assert re.fullmatch("(ab|cd){3}[0-9]{2}", output.text)
    assert output.finish_reason is FinishReason.STOP


def test_answer_fits_its_grammar(llm: LLM) -> None:
    toward_x = ((ids_of("x")[0], 2.0),)
    params = SamplingParams(grammar='start: "(" start ")" | "x"', max_output_tokens=100, seed=3, logit_bias=toward_x)
    text = llm.generate("hello", params)[0].text
    depth = text.index("x")
    assert text == "(" * depth + "x" + ")" * depth


def test_guided_and_free_requests_side_by_side_get_what_they_get_alone(llm: LLM) -> None:
    guided = SamplingParams(regex="[a-c]{12}", max_output_tokens=30, temperature=0.0)
    free = SamplingParams(max_output_tokens=20, temperature=0.0, ignore_eos=True)
    prompts = ["hello", "world, a longer one"] * 3
    params = [guided, free] * 3
    alone = [llm.generate(prompt, own)[0].token_ids for prompt, own in zip(prompts, params, strict=True)]
    together = llm.generate(prompts, params)
    assert [output.token_ids for output in together] == alone
    assert re.fullmatch("[a-c]{12}", together[0].text)


def test_length_limit_cuts_a_guided_answer_and_says_so(llm: LLM) -> None:
    output = llm.generate("x", SamplingParams(regex="a{30}", max_output_tokens=10))[0]
    assert (output.text, output.finish_reason) == ("a" * 10, FinishReason.LENGTH)


def test_guide_and_logit_bias_work_together(llm: LLM) -> None:
    bias = ((3 + ord("b"), 100.0),)
    output = llm.generate("x", SamplingParams(regex="[abc]{5}", logit_bias=bias, temperature=0.0))[0]
    assert output.text == "bbbbb"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"regex": "(a"}, "regex cannot be used"),
        ({"regex": "(?=a)b"}, "regex cannot be used"),
        ({"json_schema": "{"}, "json_schema"),
        ({"json_schema": "false"}, "json_schema is not valid"),
        ({"json_schema": '{"type": "array", "uniqueItems": true}'}, 'Unimplemented keys: \\["uniqueItems"\\]'),
        ({"json_schema": '{"$ref": "http://127.0.0.1:1/x"}'}, "json_schema cannot be used"),
        ({"json_schema": '{"$ref": "#"}'}, "it refers to itself without an end: give what refers to itself a branch"),
        ({"json_schema": '{"oneOf": [{"$ref": "#"}]}'}, "it refers to itself without an end"),
        ({"json_schema": '{"allOf": ' * 500}, "json_schema"),
        ({"grammar": "start: missing"}, 'unknown name: "missing"'),
        ({"grammar": ""}, "grammar is ''"),
        ({"regex": "a" * 70_000}, "regex has 70000 bytes: at most 65536"),
        ({"regex": "a", "grammar": 'start: "a"'}, "regex and grammar exclude each other"),
        ({"regex": "a", "ignore_eos": True}, "ends with an end-of-text token"),
    ],
)
def test_wrong_guide_is_refused_and_the_engine_goes_on(llm: LLM, wrong: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate("x", SamplingParams(**wrong))  # type: ignore[arg-type]
    assert llm.generate("x", SamplingParams(regex="ok"))[0].text == "ok"


def test_guide_that_a_minimum_length_contradicts_fails_its_request_alone(llm: LLM) -> None:
    params = [SamplingParams(regex="ab", min_output_tokens=5), SamplingParams(regex="cd")]
    bad, good = llm.generate(["x", "x"], params)
    assert bad.finish_reason is FinishReason.ERROR
    assert "every token is forbidden" in (bad.error or "")
    assert good.text == "cd"

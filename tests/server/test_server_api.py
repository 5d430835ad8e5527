"""Routes and fields of the OpenAI API, with OpenAI's own client and without."""

import contextlib
import json
from pathlib import Path

import openai
import pytest

from ambidex import LLM, SamplingParams
from live_server import LiveServer, maker

GREEDY = SamplingParams(max_output_tokens=16, temperature=0.0)


def test_completion_equals_the_offline_answer(server: LiveServer, offline: LLM) -> None:
    wanted = offline.generate("hello world", GREEDY)[0]
    answer = server.openai.completions.create(model="tiny", prompt="hello world", temperature=0)
    assert answer.choices[0].text == wanted.text
    assert answer.choices[0].finish_reason == wanted.finish_reason
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, len(wanted.token_ids))


def test_completion_of_several_prompts_and_token_ids(server: LiveServer, offline: LLM) -> None:
    prompts = ["hello", "world!"]
    wanted = [output.text for output in offline.generate(list(prompts), GREEDY)]
    answer = server.openai.completions.create(model="tiny", prompt=prompts, temperature=0, n=2)
    assert [choice.text for choice in answer.choices] == [wanted[0], wanted[0], wanted[1], wanted[1]]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    ids = [[3 + ord(char) for char in prompt] for prompt in prompts]
    answer = server.openai.completions.create(model="tiny", prompt=ids, temperature=0)
    assert [choice.text for choice in answer.choices] == wanted


def test_chat_equals_the_offline_answer_and_its_stream(server: LiveServer, offline: LLM) -> None:
    messages = [{"role": "user", "content": "hi there"}]
    wanted = offline.chat(messages, SamplingParams(max_output_tokens=20, temperature=0.0))
    create = server.openai.chat.completions.create
    whole = create(model="tiny", messages=messages, temperature=0, max_completion_tokens=20)
    chunks = list(
        create(
            model="tiny",
            messages=messages,
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert whole.choices[0].message.content == wanted.text
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == wanted.text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == wanted.finish_reason
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    assert usage.model_copy(update={"prompt_tokens_details": whole.usage.prompt_tokens_details}) == whole.usage
    assert all(c.usage is None for c in chunks[:-1])


def test_stream_without_usage_has_none(server: LiveServer) -> None:
    with server.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 2}) as stream:
        lines = [line for line in stream.iter_lines() if line]
        assert stream.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    assert all("usage" not in json.loads(line[6:]) for line in lines[:-1])


def test_content_of_parts_and_system_messages(server: LiveServer, offline: LLM) -> None:
    wanted = offline.chat([{"role": "system", "content": "be"}, {"role": "user", "content": "abc"}], GREEDY).text
    answer = server.openai.chat.completions.create(
        model="tiny",
        temperature=0,
        max_tokens=16,
        messages=[
            {"role": "system", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]},
        ],
    )
    assert answer.choices[0].message.content == wanted


def test_stop_string_is_not_shown_nor_a_part_of_it(server: LiveServer, offline: LLM) -> None:
    text = offline.generate("hello", SamplingParams(max_output_tokens=40, temperature=0.0, ignore_eos=True))[0].text
    stop = text[10:13]
    wanted = text[: text.index(stop)]
    answer = server.complete("hello", max_tokens=40, stop=[stop], ignore_eos=True).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (wanted, "stop")
    chunks = server.openai.completions.create(
        model="tiny", prompt="hello", max_tokens=40, stop=stop, temperature=0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks) == wanted


def test_seeds_give_the_same_answer_again_and_choices_differ(server: LiveServer) -> None:
    def texts(seed: int) -> list[str]:
        answer = server.complete("hello", temperature=1.5, n=3, seed=seed, max_tokens=20, ignore_eos=True)
        return [choice["text"] for choice in answer.json()["choices"]]

    first = texts(7)
    assert texts(7) == first
    assert texts(8) != first
    assert len(set(first)) == 3


def test_logprobs_of_completions_and_chat(server: LiveServer, offline: LLM) -> None:
    params = SamplingParams(max_output_tokens=5, temperature=0.0, logprobs=3, ignore_eos=True)
    wanted = offline.generate("hello", params)[0].logprobs
    assert wanted is not None
    body = server.complete("hello", max_tokens=5, logprobs=3, ignore_eos=True).json()["choices"][0]["logprobs"]
    assert body["token_logprobs"] == pytest.approx([token.logprob for token in wanted], abs=1e-4)
    assert [len(top) for top in body["top_logprobs"]] == [3] * 5
    assert body["text_offset"][:2] == [0, len(body["tokens"][0])]
    ids = [{"role": "user", "content": "q"}]
    chunks = list(
        server.openai.chat.completions.create(
            model="tiny", messages=ids, logprobs=True, top_logprobs=2, max_tokens=4, temperature=0, stream=True,
            extra_body={"ignore_eos": True},
        )
    )  # fmt: skip
    shown = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    tokens = [token for logprobs in shown for token in logprobs.content or ()]
    assert len(tokens) == 4
    for token in tokens:
        assert len(token.top_logprobs) == 2
        assert token.logprob == pytest.approx(token.top_logprobs[0].logprob)
        assert bytes(token.bytes or ()).decode() == token.token


def test_bias_penalties_and_filters_reach_the_sampler(server: LiveServer) -> None:
    bias = {str(3 + ord("z")): 100}
    assert server.complete("x", max_tokens=4, logit_bias=bias).json()["choices"][0]["text"] == "zzzz"
    fields = {"frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 50, "logit_bias": bias}
    text = server.complete("x", max_tokens=8, ignore_eos=True, **fields).json()["choices"][0]["text"]
    assert text.count("z") < 8
    greedy = server.complete("x", max_tokens=8, ignore_eos=True).json()["choices"][0]["text"]
    for filters in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        answer = server.complete("x", max_tokens=8, ignore_eos=True, **{"temperature": 5, **filters})
        assert answer.json()["choices"][0]["text"] == greedy


def test_model_routes(server: LiveServer) -> None:
    assert [model.id for model in server.openai.models.list()] == ["tiny"]
    assert server.openai.models.retrieve("tiny").model_dump()["max_model_len"] == 128
    with pytest.raises(openai.NotFoundError) as caught:
        server.openai.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        server.openai.completions.create(model="gpt-4o", prompt="x")


def test_tokenize_and_detokenize(server: LiveServer) -> None:
    body = server.http.post("/tokenize", json={"prompt": "abc"}).json()
    assert body == {"count": 3, "max_model_len": 128, "tokens": [100, 101, 102]}
    assert server.http.post("/detokenize", json={"tokens": body["tokens"]}).json() == {"prompt": "abc"}
    chat = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert server.http.post("/detokenize", json={"tokens": chat["tokens"]}).json() == {"prompt": "<s>u:x;a:"}
    assert server.http.post("/tokenize", json={}).status_code == 400


def test_detokenize_of_an_id_that_the_model_has_not_is_refused(server: LiveServer) -> None:
    """Bug: such ids were dropped in silence."""
    answer = server.http.post("/detokenize", json={"tokens": [100, 99_999_999]})
    assert answer.status_code == 400
    assert "99999999 is no token id of this model" in answer.json()["error"]["message"]


def test_embeddings_are_refused_with_a_reason(server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError, match="has no embeddings") as caught:
        server.openai.embeddings.create(model="tiny", input="x")
    assert caught.value.code == "unsupported_model"


CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("route", "body", "param", "message"),
    [
        ("completions", {}, "prompt", "prompt is missing"),
        ("completions", {"prompt": ""}, "prompt", "empty"),
        ("completions", {"prompt": []}, "prompt", "empty list"),
        ("completions", {"prompt": [[]]}, "prompt", "empty"),
        ("completions", {"prompt": None}, "prompt", "prompt is None"),
        ("completions", {"prompt": [5, "x"]}, "prompt", "prompt"),
        ("completions", {"prompt": [131]}, "prompt", "131 is no token id"),
        ("completions", {"prompt": [2**40]}, "prompt", "less than or equal"),
        ("completions", {"prompt": [-1]}, "prompt", "greater than or equal"),
        ("completions", {"prompt": "x", "echo": True}, "echo", "echo is True"),
        ("completions", {"prompt": "x", "best_of": 5}, "best_of", "best_of is 5"),
        ("completions", {"prompt": "x", "suffix": "y"}, "suffix", "suffix"),
        ("completions", {"prompt": "x", "logprobs": 21}, "logprobs", "logprobs is 21"),
        ("completions", {"prompt": "x", "logprobs": -1}, "logprobs", "logprobs is -1"),
        ("completions", {"prompt": "x", "n": 0}, "n", "n is 0"),
        ("completions", {"prompt": "x", "n": 10**9}, "n", "n is 1000000000"),
        ("completions", {"prompt": ["x"] * 33}, "n", "33 answers are asked for"),
        ("completions", {"prompt": "x", "temperature": -1}, "temperature", "temperature is -1"),
        ("completions", {"prompt": "x", "temperature": "hot"}, "temperature", "temperature is 'hot'"),
        ("completions", {"prompt": "x", "top_p": 0}, "top_p", "top_p is 0"),
        ("completions", {"prompt": "x", "top_p": 2}, "top_p", "top_p is 2"),
        ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ("completions", {"prompt": "x", "max_tokens": True}, "max_tokens", "max_tokens is True"),
        ("completions", {"prompt": "x", "max_tokens": 1.5}, "max_tokens", "max_tokens is 1.5"),
        ("completions", {"prompt": "x", "presence_penalty": 3}, "presence_penalty", "presence_penalty is 3"),
        ("completions", {"prompt": "x", "stop": [""]}, "stop", "stop[0] is ''"),
        ("completions", {"prompt": "x", "stop": ["a"] * 17}, "stop", "stop"),
        ("completions", {"prompt": "x", "stop_token_ids": [500]}, "stop_token_ids", "500 is no token id"),
        ("completions", {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias", "names 'x'"),
        ("completions", {"prompt": "x", "logit_bias": {"500": 1}}, "logit_bias", "500 is no token id"),
        ("completions", {"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias", "must lie in"),
        ("completions", {"prompt": "x", "min_tokens": 9, "max_tokens": 5}, "min_tokens", "above"),
        ("completions", {"prompt": "x", "seed": "a"}, "seed", "seed is 'a'"),
        ("completions", {"prompt": "x", "priority": 101}, "priority", "priority is 101"),
        ("completions", {"prompt": "x", "priority": 0.5}, "priority", "priority is 0.5"),
        ("completions", {"prompt": "x", "stream_options": {}}, "stream_options", "stream is not true"),
        ("completions", {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs", "unknown field: prompt_logprobs"),
        ("completions", {"prompt": "x", "a": 1, "b": 2}, "a", "unknown fields: a, b"),
        ("chat/completions", {}, "messages", "messages is missing"),
        ("chat/completions", {"messages": []}, "messages", "messages is []"),
        ("chat/completions", {"messages": "hi"}, "messages", "messages is 'hi'"),
        ("chat/completions", {"messages": [{}]}, "messages[0].role", "role is missing"),
        (
            "chat/completions",
            {"messages": [CHAT["messages"][0], {"role": "wizard", "content": "x"}]},
            "messages[1].role",
            "messages[1].role is 'wizard'",
        ),
        ("chat/completions", {**CHAT, "max_tokens": 500}, "max_tokens", "500 in the completion"),
        ("chat/completions", {**CHAT, "max_completion_tokens": 500}, "max_completion_tokens", "500 in the completion"),
        ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content", "content is missing"),
        ("chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs", "logprobs is not true"),
        ("chat/completions", {**CHAT, "max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens", "differ"),
        ("chat/completions", {**CHAT, "reasoning_effort": "low"}, "reasoning_effort", "unknown field"),
        ("chat/completions", {**CHAT, "tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            "chat/completions",
            {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools",
            "shows no way to call tools",
        ),
        ("chat/completions", {**CHAT, "response_format": {"type": "xml"}}, "response_format", "response_format"),
        (
            "chat/completions",
            {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"if": 1}}}},
            "response_format",
            "json_schema cannot be used",
        ),
        ("chat/completions", {**CHAT, "structured_outputs": {"regex": "("}}, "structured_outputs", "cannot be used"),
        ("chat/completions", {**CHAT, "structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ],
)  # fmt: skip
def test_wrong_request_is_a_400_that_names_the_field(
    server: LiveServer, route: str, body: dict[str, object], param: str | None, message: str
) -> None:
    response = server.http.post(f"/v1/{route}", json=body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert message in error["message"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"null", b"5", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"prompt": NaN}',
     b'{"prompt": "x", "temperature": 1e999}', b'{"prompt": "x", "temperature": NaN}', b'{"n": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_body_that_is_no_request_is_a_400(server: LiveServer, data: bytes) -> None:
    response = server.http.post("/v1/completions", content=data, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_long_prompt_is_refused_with_both_counts(server: LiveServer) -> None:
    response = server.complete("x" * 200)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert (error["num_prompt_tokens"], error["max_context_len"]) == (200, 128)
    assert "maximum context length is 128 tokens" in error["message"]
    assert "200 in the prompt" in error["message"]


def test_prompt_and_answer_beyond_the_context_are_refused(server: LiveServer) -> None:
    assert server.complete("x" * 100, max_tokens=28).status_code == 200
    error = server.complete("x" * 100, max_tokens=29).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "max_tokens"
    assert "100 in the prompt, 29 in the completion" in error["message"]


def test_developer_messages_are_system_messages(server: LiveServer) -> None:
    answers = [
        server.http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": role, "content": "be brief"}, *CHAT["messages"]], "temperature": 0},
        ).json()["choices"]
        for role in ("developer", "system")
    ]
    assert answers[0] == answers[1]


def test_chat_without_a_limit_ends_at_the_context_with_reason_length(server: LiveServer) -> None:
    body = {**CHAT, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 128


def test_json_schema_and_choice_hold_the_answer(server: LiveServer) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    answer = server.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}},
        logit_bias={str(3 + ord(space)): -100 for space in " \n\t\r"},
    )
    assert json.loads(answer.choices[0].message.content or "")["a"] in (1, 2)
    body = {**CHAT, "structured_outputs": {"choice": ["red", 'gr"een']}}
    answers = [server.http.post("/v1/chat/completions", json={**body, "seed": seed}).json() for seed in range(6)]
    texts = {answer["choices"][0]["message"]["content"] for answer in answers}
    assert texts <= {"red", 'gr"een'}


def test_unknown_route_and_method_answer_in_the_same_shape(server: LiveServer) -> None:
    for response in (server.http.get("/nothing"), server.http.get("/v1/completions"), server.http.post("/health")):
        assert response.status_code in (404, 405)
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_unknown_field_with_a_long_name_is_not_sent_back_whole(server: LiveServer) -> None:
    # Bug: a field's name of 1 MB came back twice, in the message and as param.
    error = server.http.post("/v1/completions", json={"prompt": "x", "z" * 1_000_000: 1}).json()["error"]
    assert error["code"] == "unknown_field"
    assert error["param"] == "z" * 199 + "…"
    assert len(error["message"]) < 300


def test_lenient_server_lists_what_it_left_out(folder: Path) -> None:
    with LiveServer(maker(folder), lenient=True) as server:
        body = {"prompt": "x", "temperature": 0, "max_tokens": 3, "frob": 1, "stream_options": {"x": 1}, "stream": True}
        plain = server.complete("x", max_tokens=3).json()
        answer = server.complete("x", max_tokens=3, frob=[1]).json()
        assert answer["warnings"] == ["frob is unknown and was left out"]
        assert answer["choices"] == plain["choices"]
        lines = server.http.post("/v1/completions", json=body).text.split("\n\n")
        assert sorted(json.loads(lines[0][6:])["warnings"]) == [
            "frob is unknown and was left out",
            "stream_options.x is unknown and was left out",
        ]
        assert server.complete("x", frob=1, temperature=-1).json()["error"]["param"] == "temperature"
        message = {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "x"}}]}
        chat = server.http.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 2}).json()
        assert chat["warnings"] == ["messages[0].content[0].cache_control is unknown and was left out"]


@pytest.mark.parametrize("is_lenient", [False, True])
@pytest.mark.parametrize(
    ("part", "what"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "an image"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "sound"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "a file"),
    ],
)
def test_parts_that_are_no_text_are_refused_by_what_they_are(
    folder: Path, server: LiveServer, part: dict[str, object], what: str, is_lenient: bool
) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, part]}]
    with contextlib.ExitStack() as stack:
        asked = stack.enter_context(LiveServer(maker(folder), lenient=True)) if is_lenient else server
        response = asked.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        400,
        "unsupported_content",
        "messages[0].content[1]",
    )
    assert f"messages[0].content[1] is {what} (type {part['type']})" in error["message"]
    assert "this engine runs text models" in error["message"]


def test_part_of_an_unknown_kind_is_named(server: LiveServer) -> None:
    messages = [{"role": "user", "content": [{"type": "smell", "text": "x"}]}]
    error = server.http.post("/v1/chat/completions", json={"messages": messages}).json()["error"]
    assert (error["code"], "messages[0].content" in error["message"]) == ("invalid_value", True)

"""Tool calls: grammar, reading, templates."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ambidex import LLM, SamplingParams
from ambidex.server.config import ToolFormat
from ambidex.server.protocol import Tool
from ambidex.server.tools import ToolCall, ToolReader, find_tool_format, make_grammar
from live_server import LiveServer, maker

HERMES = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }}{% endfor %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %};{% endfor %}a:"
)
LLAMA = (
    "{% if tools %}Environment: ipython {% for t in tools %}{{ t.function.name }}{% endfor %}"
    '{"name": , "parameters": }<|python_tag|>{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}a:'
)
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": 'odd "text" \\d+ {% raw %} </tool_call> %json',
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
PING = {
    "type": "function",
    "function": {"name": "ping", "parameters": {"type": "object", "additionalProperties": False}},
}
NO_SPACE = {str(3 + ord(space)): -100 for space in " \n\r\t"}
NAMES = frozenset({"add", "ping"})


@pytest.fixture(scope="module", params=["hermes", "llama"])
def tool_server(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveServer]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text({"hermes": HERMES, "llama": LLAMA}[request.param])
    with LiveServer(maker(folder, chat_template=str(template))) as server:
        yield server


def ask(server: LiveServer, **fields: object) -> dict[str, object]:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [PING], "logit_bias": NO_SPACE, **fields}
    response = server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, object] = response.json()["choices"][0]
    return choice


def test_named_tool_is_called(tool_server: LiveServer) -> None:
    choice = ask(tool_server, tool_choice={"type": "function", "function": {"name": "ping"}})
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert isinstance(message, dict)
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert (call["function"], call["type"]) == ({"name": "ping", "arguments": "{}"}, "function")


def test_required_call_comes_whole_in_a_stream(tool_server: LiveServer) -> None:
    chunks = list(
        tool_server.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], tools=[PING], tool_choice="required",  # type: ignore[list-item]
            parallel_tool_calls=False, logit_bias=NO_SPACE, stream=True,
        )
    )  # fmt: skip
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls if call.function] == [
        (0, "ping", "{}")
    ]
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_tool_choice_none_hides_the_tools(tool_server: LiveServer) -> None:
    plain = ask(tool_server, tools=None, temperature=0, max_tokens=10)
    assert ask(tool_server, tool_choice="none", temperature=0, max_tokens=10) == plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nope"}}}, "tool_choice names 'nope'"),
        ({"tools": [PING, PING]}, "two tools have the same name"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "exclude each other"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"if": 1}}}],
            },
            "Unimplemented keys",
        ),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)
def test_wrong_tools_are_a_400(tool_server: LiveServer, fields: dict[str, object], message: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [PING], **fields}
    response = tool_server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_earlier_calls_and_results_reach_the_template(folder: Path, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(HERMES)
    messages = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    with LiveServer(maker(folder, chat_template=str(template))) as server:
        ids = server.http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        assert server.http.post("/detokenize", json={"tokens": ids}).json()["prompt"] == 'u:hi;a:<f {"a": 1}>;t:2;a:'
        messages[1]["tool_calls"][0]["function"]["arguments"] = "{"  # type: ignore[index]
        response = server.http.post("/tokenize", json={"messages": messages})
        assert response.json()["error"]["param"] == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("kind", [ToolFormat.HERMES, ToolFormat.LLAMA])
@pytest.mark.parametrize("seed", range(3))
def test_grammar_of_calls_gives_calls_that_fit_the_schema(offline: LLM, kind: ToolFormat, seed: int) -> None:
    tools = [Tool.model_validate(ADD), Tool.model_validate(PING)]
    grammar = make_grammar(kind, tools, "required", parallel=False)
    bias = tuple((int(token_id), value) for token_id, value in NO_SPACE.items())
    params = SamplingParams(grammar=grammar, max_output_tokens=110, seed=seed, logit_bias=bias, temperature=2.0)
    output = offline.generate("x", params)[0]
    reader = ToolReader(kind, NAMES)
    text, calls = reader.push(output.text)
    more, late = reader.finish()
    (call,) = calls + late
    assert text + more == ""
    arguments = json.loads(call.arguments)
    assert (0 <= arguments["a"] <= 9) if call.name == "add" else arguments == {}


def test_strict_tool_leaves_text_free_until_a_call_begins(offline: LLM) -> None:
    strict = {"type": "function", "function": {**PING["function"], "strict": True}}  # type: ignore[dict-item]
    for kind in (ToolFormat.HERMES, ToolFormat.LLAMA):
        grammar = make_grammar(kind, [Tool.model_validate(strict)], "auto", parallel=True)
        for text in ("", "plain text"):
            params = SamplingParams(grammar=grammar, max_output_tokens=len(text) + 1, temperature=0.0, seed=1)
            assert offline.generate("x", params)[0].error is None


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("hermes", "just text", "just text", []),
        ("hermes", 'a<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>', "a", [("ping", "{}")]),
        (
            "hermes",
            '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>\n<tool_call>{"name":"ping","arguments":{}}</tool_call>',
            "",
            [("add", '{"a": 1}'), ("ping", "{}")],
        ),
        ("hermes", '<tool_call>{"name": "ping", "arguments": {}}', "", [("ping", "{}")]),
        ("hermes", "<tool_call>broken</tool_call>", "<tool_call>broken</tool_call>", []),
        ("hermes", '<tool_call>{"name": "unknown"}</tool_call>', '<tool_call>{"name": "unknown"}</tool_call>', []),
        ("hermes", "1 < 2 <tool", "1 < 2 <tool", []),
        ("llama", "just text {", "just text {", []),
        ("llama", '{"name": "add", "parameters": {"a": 2}}', "", [("add", '{"a": 2}')]),
        ("llama", ' <|python_tag|>{"name": "ping", "parameters": {}}', "", [("ping", "{}")]),
        (
            "llama",
            '{"name": "ping", "parameters": {}}; {"name": "add", "parameters": {"a": 3}}',
            "",
            [("ping", "{}"), ("add", '{"a": 3}')],
        ),
        ("llama", '{"answer": 42}', '{"answer": 42}', []),
        ("llama", '{"name": "ping"', '{"name": "ping"', []),
        ("llama", "", "", []),
    ],
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(cuts=st.data())
def test_reader_finds_calls_however_the_text_is_cut(
    kind: str, text: str, content: str, calls: list[tuple[str, str]], cuts: st.DataObject
) -> None:
    places = sorted(cuts.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    reader = ToolReader(ToolFormat(kind), NAMES)
    shown, found = "", []
    for start, end in zip([0, *places], [*places, len(text)], strict=True):
        more, new = reader.push(text[start:end])
        shown, found = shown + more, found + new
    more, new = reader.finish()
    assert (shown + more).strip() == content
    assert found + new == [ToolCall(*call) for call in calls]


def test_format_is_read_from_the_template() -> None:
    assert find_tool_format(HERMES) is ToolFormat.HERMES
    assert find_tool_format(LLAMA) is ToolFormat.LLAMA
    assert find_tool_format("{{ messages }}") is None
    assert find_tool_format(None) is None

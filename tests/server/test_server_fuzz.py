"""Requests made from our own OpenAPI file, and hostile ones: none is answered with a 500, and answers stay right."""

import json
import os
import random
import string
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode

from ambidex import LLM, SamplingParams
from live_server import LiveServer, wait_until

NUM_EXAMPLES = int(os.environ.get("AMBIDEX_TEST_FUZZ_EXAMPLES", "25"))
"""For each route and mode; more by hand: 10,000 requests are 1000 here."""
ROUTES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/abort", "/v1/embeddings")
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**200, 1.5, -0.0, 1e308, "", "x", "\x00", "\ud7ff",
    "😀" * 50, "../../etc/passwd", "{{ 7*7 }}", "%s%n", [], [[]], {}, {"": {}}, ["x", 1], "null", "a" * 2000,
]  # fmt: skip
FIELDS = (
    "prompt", "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "stream",
    "stream_options", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "user", "response_format", "top_k",
    "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos", "structured_outputs", "logprobs",
    "top_logprobs", "tools", "tool_choice", "echo", "best_of", "suffix", "tokens", "id", "add_special_tokens",
)  # fmt: skip


def check(response: httpx.Response) -> None:
    """An answer, or an error in the documented shape that is no fault of the server's."""
    assert response.status_code < 500, (response.status_code, response.text, response.request.content)
    if response.status_code >= 400:
        assert set(response.json()["error"]) >= {"message", "type", "param", "code"}
        assert response.json()["error"]["code"], "programs are told by it what went wrong"
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n"), (response.text, response.request.content)


@pytest.fixture(scope="module", autouse=True)
def _server_answers_right_after_it_all(server: LiveServer, offline: LLM) -> Any:
    wanted = offline.generate("afterwards", SamplingParams(max_output_tokens=16, temperature=0.0))[0].text
    yield
    wait_until(server.is_idle)
    assert server.complete("afterwards").json()["choices"][0]["text"] == wanted
    assert server.service.num_restarts == 0


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("route", [route for route in ROUTES if route != "/v1/embeddings"])  # that one has no body
def test_requests_made_from_the_schema(server: LiveServer, route: str, mode: GenerationMode) -> None:
    operation = schemathesis.openapi.from_dict(server.app.fastapi.openapi())[route]["POST"]

    @settings(
        max_examples=NUM_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate],
    )  # fmt: skip
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        try:
            data = json.dumps(case.body).encode()
        except (TypeError, ValueError):  # the strategy's mark of "no body"
            data = b""
        check(server.http.post(route, content=data, headers={"Content-Type": "application/json"}))

    run()


def test_requests_with_odd_values_in_every_field(server: LiveServer) -> None:
    rng = random.Random(11)
    valid: dict[str, Any] = {"/v1/completions": {"prompt": "x"}, "/tokenize": {"prompt": "x"}}
    valid["/v1/chat/completions"] = {"messages": [{"role": "user", "content": "x"}]}
    for _ in range(12 * NUM_EXAMPLES):
        route = rng.choice(ROUTES)
        body = {"max_tokens": 3, **valid.get(route, {})}
        if route not in ("/v1/completions", "/v1/chat/completions"):
            del body["max_tokens"]
        for name in rng.sample(FIELDS, rng.randint(1, 3)):
            body[name] = rng.choice(ODD)
        check(server.http.post(route, content=json.dumps(body).encode()))


def test_bytes_that_are_no_json(server: LiveServer) -> None:
    rng = random.Random(13)
    for _ in range(4 * NUM_EXAMPLES):
        data = bytes(rng.choices(string.printable.encode() + bytes(range(256)), k=rng.randint(0, 80)))
        check(server.http.post(rng.choice(ROUTES), content=data))


@pytest.mark.parametrize(
    "path", ["/v1/models/../../etc/passwd", "/v1/models/%00", "/v1/models/" + "a" * 5000, "/page.js/x", "/%ff"]
)
def test_odd_paths(server: LiveServer, path: str) -> None:
    response = server.http.get(path)
    assert response.status_code in (400, 404)
    assert "root:" not in response.text

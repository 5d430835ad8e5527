"""Who may come in, and how much they may bring."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from ambidex import ConfigError
from ambidex.server.config import ServerConfig
from live_server import LiveServer, maker

KEY = "a-key-of-the-test"
OPEN = ("/health", "/ready", "/", "/page.js", "/page.css")
CLOSED = (
    "/v1/models",
    "/v1/models/tiny",
    "/metrics",
    "/v1/ambidex/status",
    "/v1/ambidex/cache",
    "/openapi.json",
    "/nothing",
)
CLOSED_POSTS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/abort", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(
        maker(folder), api_keys=(KEY, "another-key"), max_body=4096, max_prompt_tokens=50, max_choices=4,
        allowed_hosts=("Llm.Example",), cors_origins=("https://chat.example",),
    ) as server:  # fmt: skip
        yield server


def test_every_route_but_health_and_page_needs_a_key(guarded: LiveServer) -> None:
    for path in OPEN:
        assert guarded.http.get(path).status_code == 200, path
    answers = [guarded.http.get(path) for path in CLOSED] + [guarded.http.post(path) for path in CLOSED_POSTS]
    routes = {route.path for route in guarded.app.fastapi.routes}  # type: ignore[attr-defined]
    assert routes - set(OPEN) - {"/v1/models/{name:path}"} <= {*CLOSED, *CLOSED_POSTS}, "a route is not tried"
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), answer.url


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer x", f"Basic {KEY}", f"Bearer {KEY}x", KEY, "Bearer née"])
def test_wrong_key_is_a_401(guarded: LiveServer, header: str) -> None:
    answer = guarded.http.get("/v1/models", headers={"Authorization": header.encode()})  # type: ignore[dict-item]
    assert answer.status_code == 401


@pytest.mark.parametrize("key", [KEY, "another-key"])
def test_each_key_opens(guarded: LiveServer, key: str) -> None:
    assert guarded.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_any_key_is_taken_where_none_is_set(server: LiveServer) -> None:
    assert server.http.get("/v1/models", headers={"Authorization": "Bearer EMPTY"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("localhost:99", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("llm.example", 200),
     ("evil.example", 403), ("127.0.0.1.evil.example", 403), ("", 403), ("localhost.evil", 403)],
)  # fmt: skip
def test_host_that_is_not_ours_is_refused(guarded: LiveServer, host: str, status: int) -> None:
    """DNS rebinding: a page of evil.example whose name now points to this machine."""
    assert guarded.http.get("/health", headers={"Host": host}).status_code == status


def test_pages_of_other_origins_are_refused_unless_named(guarded: LiveServer) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    evil = guarded.http.get("/v1/models", headers={**headers, "Origin": "https://evil.example"})
    assert (evil.status_code, evil.json()["error"]["code"]) == (403, "unknown_origin")
    assert "access-control-allow-origin" not in evil.headers
    named = guarded.http.get("/v1/models", headers={**headers, "Origin": "https://chat.example"})
    assert named.headers["access-control-allow-origin"] == "https://chat.example"
    assert "access-control-allow-credentials" not in named.headers
    own = guarded.http.get("/v1/models", headers={**headers, "Origin": guarded.url})
    assert own.status_code == 200
    asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    preflight = guarded.http.options("/v1/chat/completions", headers=asked)
    assert preflight.status_code == 204
    assert "Authorization" in preflight.headers["access-control-allow-headers"]


@pytest.mark.parametrize("is_chunked", [False, True])
def test_body_above_the_limit_is_a_413(guarded: LiveServer, is_chunked: bool) -> None:
    data = b'{"prompt": "' + b"x" * 5000 + b'"}'
    content = iter([data[:2500], data[2500:]]) if is_chunked else data
    answer = guarded.http.post("/v1/completions", content=content, headers={"Authorization": f"Bearer {KEY}"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_prompt_and_choices_above_their_limits_are_refused(guarded: LiveServer) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    answer = guarded.http.post("/v1/completions", json={"prompt": "x" * 51}, headers=headers)
    assert "51 tokens: at most 50" in answer.json()["error"]["message"]
    answer = guarded.http.post("/v1/completions", json={"prompt": "x", "n": 5}, headers=headers)
    assert "at most 4 (--max-choices)" in answer.json()["error"]["message"]


def test_answers_of_another_key_cannot_be_aborted(guarded: LiveServer) -> None:
    with guarded.http.stream(
        "POST", "/v1/completions", json={"prompt": "x", "max_tokens": 100, "stream": True, "ignore_eos": True},
        headers={"Authorization": f"Bearer {KEY}", "X-Request-Id": "mine"},
    ) as stream:  # fmt: skip
        other = {"Authorization": "Bearer another-key"}
        assert guarded.http.post("/v1/abort", json={"id": "mine"}, headers=other).status_code == 404
        assert stream.read().endswith(b"data: [DONE]\n\n")


def test_log_has_ids_and_counts_but_no_prompt(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="ambidex"):
        server.http.post(
            "/v1/completions", json={"prompt": "secret words", "max_tokens": 2, "user": "u-1"},
            headers={"X-Request-Id": "id-1"},
        ).raise_for_status()  # fmt: skip
        server.http.get("/v1/models", headers={"X-Request-Id": "bad id\twith space"})
    line = next(record.message for record in caplog.records if "id-1" in record.message)
    assert "prompt_tokens=12 output_tokens=2" in line
    assert "status=200" in line
    assert "user=u-1" in line
    assert "secret" not in caplog.text
    assert "bad id" not in caplog.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "llm.example"])
def test_other_than_loopback_needs_a_key_or_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match="lets other machines in, and there is no API key"):
        ServerConfig(host=host)
    assert ServerConfig(host=host, api_key="12345678").host == host
    assert ServerConfig(host=host, insecure=True).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.9.1"])
def test_loopback_needs_no_key(host: str) -> None:
    assert ServerConfig(host=host).is_loopback


@pytest.mark.parametrize("key", ["", "short", "with space inside", "schlüssel-lang", "line\nbreak-key"])
def test_weak_key_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(api_key=key)
    assert not key or key not in str(caught.value)


def test_keys_come_from_setting_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst-key-1\n\n second-key-2 \n")
    config = ServerConfig(api_key="zeroth-key", api_key_file=str(file))
    assert config.read_api_keys() == ("zeroth-key", "first-key-1", "second-key-2")
    file.write_text("#\n")
    with pytest.raises(ConfigError, match="holds no key"):
        config.read_api_keys()
    with pytest.raises(ConfigError, match="cannot be read"):
        ServerConfig(api_key_file=str(tmp_path / "none")).read_api_keys()
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="key 1 of"):
        config.read_api_keys()


def test_key_file_without_end_is_the_users_mistake() -> None:
    with pytest.raises(ConfigError, match=r"--api-key-file /dev/zero cannot be read: it has more than 1.0 MiB"):
        ServerConfig(api_key_file="/dev/zero").read_api_keys()

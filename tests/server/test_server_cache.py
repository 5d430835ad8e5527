"""The prefix cache as clients see it: counted, exact, never shared between keys, and droppable."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ambidex import LLM, SamplingParams
from ambidex.cli.main import AmbidexCommand
from ambidex.core.config import EngineConfig
from live_server import SMALL_POOL, LiveServer, maker

KEYS = ("first-client-key", "second-client-key")
PROMPT = "a beginning that many prompts have in common, "
GREEDY = SamplingParams(max_output_tokens=16, temperature=0.0)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[LiveServer]:
    with LiveServer(maker(folder, **SMALL_POOL), api_keys=KEYS) as server:
        yield server


def as_client(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def complete(server: LiveServer, key: str, prompt: str, **fields: object) -> httpx.Response:
    body = {"prompt": prompt, "temperature": 0, **fields}
    return server.http.post("/v1/completions", json=body, headers=as_client(key))


def cached_tokens(response: httpx.Response) -> int:
    count: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_second_prompt_counts_what_the_first_left_and_is_answered_alike(shared: LiveServer, offline: LLM) -> None:
    first = complete(shared, KEYS[0], PROMPT + "one")
    assert cached_tokens(first) == 0
    second = complete(shared, KEYS[0], PROMPT + "two")
    assert cached_tokens(second) == len(PROMPT) // 4 * 4
    assert second.json()["choices"][0]["text"] == offline.generate(PROMPT + "two", GREEDY)[0].text
    stats = shared.http.get("/v1/ambidex/cache", headers=as_client(KEYS[0])).json()
    assert stats["num_cached_tokens"] >= cached_tokens(second)
    assert sum(stats["cached_bytes"].values()) > 0
    metrics = shared.http.get("/metrics", headers=as_client(KEYS[0])).text
    assert 'ambidex_kv_cached_bytes{tier="gpu"}' in metrics
    assert f"ambidex_cached_tokens_total {stats['num_cached_tokens']:.1f}" in metrics


def test_two_keys_never_share_and_a_salt_divides_one(shared: LiveServer) -> None:
    prompt = "only mine: " + PROMPT
    assert cached_tokens(complete(shared, KEYS[0], prompt)) == 0
    assert cached_tokens(complete(shared, KEYS[0], prompt)) > 0
    assert cached_tokens(complete(shared, KEYS[1], prompt)) == 0
    assert cached_tokens(complete(shared, KEYS[0], prompt, cache_salt="user 7")) == 0
    assert cached_tokens(complete(shared, KEYS[0], prompt, cache_salt="user 7")) > 0
    assert cached_tokens(complete(shared, KEYS[0], prompt, cache_salt="user 8")) == 0


def test_usage_of_choices_and_streams_counts_each_prompt_once(shared: LiveServer) -> None:
    prompt = "several answers: " + PROMPT
    complete(shared, KEYS[0], prompt)
    body = {"prompt": [prompt, prompt], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    with shared.http.stream("POST", "/v1/completions", json=body, headers=as_client(KEYS[0])) as stream:
        text = stream.read().decode()
    assert f'"cached_tokens":{2 * ((len(prompt) - 1) // 4 * 4)}' in text


def test_drop_forgets_what_that_key_left_alone(shared: LiveServer) -> None:
    prompt = "to be forgotten: " + PROMPT
    for key in KEYS:
        complete(shared, key, prompt)
    dropped = shared.http.delete("/v1/ambidex/cache", headers=as_client(KEYS[0]))
    assert dropped.status_code == 200
    assert dropped.json()["num_dropped_blocks"] >= len(prompt) // 4
    assert cached_tokens(complete(shared, KEYS[0], prompt)) == 0
    assert cached_tokens(complete(shared, KEYS[1], prompt)) > 0
    assert shared.http.delete("/v1/ambidex/cache").status_code == 401


@pytest.mark.parametrize("salt", ["", "x" * 257, 7])
def test_wrong_salt_is_a_400_that_names_it(shared: LiveServer, salt: object) -> None:
    answer = complete(shared, KEYS[0], "hello", cache_salt=salt)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "cache_salt"


def test_server_keeps_prefixes_unless_told_otherwise_and_the_library_does_not() -> None:
    config = EngineConfig(model="m")
    assert (config.prefix_cache_percent, config.keeping_prefixes().prefix_cache_percent) == (None, 100)
    assert EngineConfig(model="m", prefix_cache_percent=0).keeping_prefixes().prefix_cache_percent == 0


def run_verb(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        AmbidexCommand().main(["cache", *args], prog_name="ambidex")
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


def test_verbs_list_and_drop_what_a_server_keeps(shared: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    complete(shared, KEYS[0], "for the verbs: " + PROMPT)
    address = ("--url", shared.url, "--api-key", KEYS[0])
    code, out, _ = run_verb(capsys, "ls", *address)
    assert (code, "gpu" in out, "tokens of prompts were found" in out) == (0, True, True)
    code, out, _ = run_verb(capsys, "rm", *address, "--json")
    assert (code, json.loads(out)["num_dropped_blocks"] > 0) == (0, True)
    assert run_verb(capsys, "rm", *address)[:2] == (0, "0 blocks were dropped\n")


def test_verbs_say_what_is_wrong_in_one_line(shared: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_verb(capsys, "ls", "--url", shared.url, "--api-key", "not-the-right-key")
    assert (code, out) == (2, "")
    assert "no valid API key" in err
    code, _, err = run_verb(capsys, "ls", "--url", "http://127.0.0.1:1")
    assert (code, "no ambidex server answers" in err, err.count("\n")) == (1, True, 1)
    assert run_verb(capsys, "rm", "--url", "file:///etc/passwd")[0] == 2

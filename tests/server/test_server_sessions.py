"""Sessions on disk as clients see them: found after a restart and after a kill, listed, and dropped."""

import json
import os
import signal
from pathlib import Path

import pytest
from test_server_cache import KEYS, as_client, cached_tokens, complete, run_verb

from ambidex import LLM, SamplingParams
from live_server import SMALL_POOL, START_S, LiveServer, in_worker, wait_until

PROMPT = "a session that goes on after the server has been started anew, "
GREEDY = SamplingParams(max_output_tokens=16, temperature=0.0)


def serving(folder: Path, saved: Path, **settings: object) -> LiveServer:
    make = in_worker(folder, **SMALL_POOL, session_dir=str(saved), **settings)
    return LiveServer(make, api_keys=KEYS)


def wait_saved(server: LiveServer, num_tokens: int) -> None:
    """The engine saves while it is idle."""
    wait_until(lambda: stats_of(server)["num_saved_blocks"] >= num_tokens // 4)


def stats_of(server: LiveServer) -> dict[str, int]:
    stats: dict[str, int] = server.http.get("/v1/ambidex/cache", headers=as_client(KEYS[0])).json()
    return stats


def test_session_goes_on_after_a_restart_and_after_a_kill(folder: Path, offline: LLM, tmp_path: Path) -> None:
    saved = tmp_path / "sessions"
    wanted = offline.generate(PROMPT + "one", GREEDY)[0].text
    with serving(folder, saved) as server:
        first = complete(server, KEYS[0], PROMPT + "one")
        assert (cached_tokens(first), first.json()["choices"][0]["text"]) == (0, wanted)
    with serving(folder, saved) as server:
        again = complete(server, KEYS[0], PROMPT + "one")
        assert (cached_tokens(again), again.json()["choices"][0]["text"]) == ((len(PROMPT) + 2) // 4 * 4, wanted)
        assert stats_of(server)["num_restored_tokens"] == cached_tokens(again)
        num_saved = stats_of(server)["num_saved_blocks"]
        complete(server, KEYS[0], PROMPT + "two, which is new")
        wait_saved(server, 4 * (num_saved + 7))  # what both begin with is there
        num_restarts = server.service.num_restarts
        os.kill(server.worker.pid, signal.SIGKILL)
        wait_until(lambda: server.service.num_restarts > num_restarts, timeout_s=START_S)
        wait_until(lambda: server.http.get("/ready").status_code == 200, timeout_s=START_S)
        killed = complete(server, KEYS[0], PROMPT + "two, which is new")
        assert cached_tokens(killed) == (len(PROMPT) + 16) // 4 * 4
        assert cached_tokens(complete(server, KEYS[1], PROMPT + "one")) == 0
        metrics = server.http.get("/metrics", headers=as_client(KEYS[0])).text
        assert "ambidex_session_saved_bytes" in metrics


def test_verbs_list_and_drop_what_lies_on_disk(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "sessions"
    with serving(folder, saved) as server:
        for key in KEYS:
            complete(server, key, PROMPT)
        wait_saved(server, 2 * len(PROMPT))
        address = ("--url", server.url, "--api-key", KEYS[0])
        code, out, _ = run_verb(capsys, "ls", *address)
        assert (code, "disk" in out) == (0, True)
        code, out, _ = run_verb(capsys, "rm", *address, "--json")
        assert (code, json.loads(out)["num_dropped_blocks"] >= len(PROMPT) // 4) == (0, True)
        num_left = stats_of(server)["num_saved_blocks"]
        assert num_left == len(list(saved.glob("*/*.kv"))) >= len(PROMPT) // 4  # the other key's
    with serving(folder, saved) as server:
        assert cached_tokens(complete(server, KEYS[0], PROMPT)) == 0
        assert cached_tokens(complete(server, KEYS[1], PROMPT)) > 0

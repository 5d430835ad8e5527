"""Sessions on disk as clients see them: found after a restart and after a kill, listed, and dropped."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from test_server_cache import KEYS, as_client, cached_tokens, complete, run_verb
from test_server_process import AMBIDEX

from ambidex import LLM, AsyncLLM, SamplingParams
from ambidex.formats.folder_lock import FolderLock
from ambidex.server.main import INTERRUPT_DRAIN_S
from live_server import SMALL_POOL, START_S, LiveServer, in_worker, wait_until

PROMPT = "a session that goes on after the server has been started anew, "
GREEDY = SamplingParams(max_output_tokens=16, temperature=0.0)


def serving(folder: Path, saved: Path, *, drain_s: float = 30) -> LiveServer:
    make = in_worker(folder, **SMALL_POOL, session_dir=str(saved))
    return LiveServer(make, api_keys=KEYS, drain_s=drain_s)


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
        wait_saved(server, 4 * (num_saved + 8))  # what both begin with is there
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
        wait_saved(server, 2 * ((len(PROMPT) + 15) // 4 * 4))  # all of both: the last token's K and V are not computed
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


def test_folder_in_use_is_refused_before_the_port_is_taken(folder: Path, tmp_path: Path) -> None:
    # Bug: the port was open and the model loaded before the server ended because of it.
    saved = tmp_path / "sessions"
    lock = FolderLock(saved, setting="session_dir")
    command = [*AMBIDEX, "serve", str(folder), "--port", "0", "--session-dir", str(saved)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    lock.close()
    assert result.returncode == 2
    assert result.stderr == f"error: --session-dir {saved} is in use by another engine: give each its own folder\n"


@pytest.mark.parametrize(("number", "limit_s"), [(signal.SIGTERM, 7.0), (signal.SIGINT, INTERRUPT_DRAIN_S)])
def test_saving_at_the_end_may_take_what_is_left_of_the_drain(
    folder: Path, number: signal.Signals, limit_s: float
) -> None:
    given: list[float | None] = []

    class Noted(AsyncLLM):
        async def close(self, save_s: float | None = None) -> None:
            given.append(save_s)
            await super().close(save_s)

    with LiveServer(lambda _: Noted(str(folder)), drain_s=7) as server:
        server.server.handle_exit(number, None)
        wait_until(lambda: given != [])
    (save_s,) = given
    assert save_s is not None
    assert 0 <= save_s < limit_s


def test_engine_process_saves_for_as_long_as_it_is_told(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(folder, tmp_path / "no-time", drain_s=0) as server:
        assert complete(server, KEYS[0], PROMPT).status_code == 200
    said = capfd.readouterr().err
    num_left = re.search(r"(\d+) blocks of the prefix cache were not saved", said)
    num_saved = len(list(tmp_path.glob("no-time/*/*.kv")))
    assert num_saved + (int(num_left[1]) if num_left else 0) >= len(PROMPT) // 4

"""`ambidex serve` as its own process: port, signals, exit codes; and the verb's settings."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from ambidex.cli.main import AmbidexCommand
from ambidex.cli.services import Services
from ambidex.core.config import EngineConfig
from ambidex.server.config import ServerConfig
from live_server import START_S, WAIT_S, LiveServer, wait_until

AMBIDEX = (sys.executable, "-c", "from ambidex.cli.main import run; run()")
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@contextmanager
def serving(*args: str, log_format: str = "json") -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [*AMBIDEX, "serve", *args, "--port", "0", "--log-format", log_format]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENV)
    assert process.stderr is not None
    try:
        match = re.search(r"http://\S+", process.stderr.readline())
        assert match is not None
        yield process, match[0]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=WAIT_S).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_generating_ends_the_process_after_the_drain(folder: Path, number: signal.Signals) -> None:
    with serving(str(folder), "--drain-s", "1") as (process, url):
        wait_until(lambda: is_ready(url), timeout_s=START_S)
        body = {"prompt": "x", "max_tokens": 100, "stream": True, "ignore_eos": True, "n": 8}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            process.send_signal(number)
            last = list(lines)[-1]
        assert last == "data: [DONE]" or "shutting down" in last
        assert process.wait(timeout=WAIT_S) == 0
        assert process.stderr is not None
        events = [json.loads(line) for line in process.stderr.read().splitlines() if line.startswith("{")]
        assert [event["output_tokens"] > 0 for event in events if event["route"] == "POST /v1/completions"] == [True]


SPREAD = ("--kv-gpu-tokens", "128", "--num-sink-tokens", "4", "--recent-window", "16", "--block-size", "4")


@pytest.mark.parametrize(("args", "log_format"), [((), "text"), (("--quiet",), "text"), ((), "json")])
def test_where_keys_are_spread_it_is_said_at_start_and_what_came_of_it_at_the_end(
    folder: Path, args: tuple[str, ...], log_format: str
) -> None:
    with serving(str(folder), *SPREAD, *args, log_format=log_format) as (process, url):
        wait_until(lambda: is_ready(url), timeout_s=START_S)
        body = {"prompt": "x", "max_tokens": 8, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=WAIT_S) == 0
        assert process.stderr is not None
        said = process.stderr.read()
    shows = args == () and log_format == "text"
    assert ("tier  read by" in said) == shows
    assert (
        re.search(r"decode: [\d.]+ ms a step measured.*mean of \d+ steps of 1 x \d+ tokens", said) is not None
    ) == shows


def test_taken_port_is_the_users_mistake_and_nothing_loads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        result = CliRunner().invoke(AmbidexCommand(), ["serve", str(tmp_path / "no-model"), "--port", port])
    assert result.exit_code == 2
    assert f"127.0.0.1:{port} cannot be listened on" in result.stderr
    assert result.stderr.count("\n") == 1


def test_model_that_is_not_there_ends_the_server_with_one_line(tmp_path: Path) -> None:
    command = [*AMBIDEX, "serve", str(tmp_path / "none"), "--port", "0"]
    result = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=START_S, check=False)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "error: " in result.stderr.splitlines()[-1]


def choose(*args: str, env: dict[str, str] | None = None) -> tuple[ServerConfig, EngineConfig]:
    """What the verb hands to the server."""
    given: list[tuple[ServerConfig, EngineConfig]] = []
    services = Services(serve=lambda config, engine, _: given.append((config, engine)))
    result = CliRunner(env=env).invoke(AmbidexCommand(), ["serve", *args], obj=services)
    assert result.exit_code == 0, result.stderr
    return given[0]


def test_settings_come_from_flags_variables_and_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    lines = ('model = "m"', "port = 9000", "lenient = true", 'allowed_hosts = ["a", "b"]', "ping_s = 2.5")
    file.write_text("\n".join(lines))
    config, engine = choose(
        "--config", str(file), "--ping-s", "3", "--block-size", "8", env={"AMBIDEX_API_KEY": "key-from-env"}
    )
    assert (config.port, config.lenient, config.allowed_hosts, config.ping_s) == (9000, True, ("a", "b"), 3.0)
    assert (config.api_key, engine.model, engine.block_size) == ("key-from-env", "m", 8)
    assert choose("m")[0] == ServerConfig()


def test_verbose_does_not_show_the_key() -> None:
    services = Services(serve=lambda *_: None)
    args = ["serve", "m", "-v", "--api-key", "top-secret-key"]
    result = CliRunner().invoke(AmbidexCommand(), args, obj=services)
    assert "top-secret-key" not in result.output
    assert "(set)" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["m", "--host", "0.0.0.0"], "there is no API key"),
        (["m", "--port", "70000"], "at most 65535"),
        (["m", "--max-queue", "0"], "at least 1"),
        (["m", "--temperature", "1"], "No such option"),
        (["m", "--api-key", "short"], "at least 8 printable"),
        (["m", "--drain-s", "-1"], "--drain-s"),
        ([], "no model is named"),
    ],
)
def test_wrong_setting_is_one_line(args: list[str], message: str) -> None:
    result = CliRunner().invoke(AmbidexCommand(), ["serve", *args])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert message in result.stderr


def test_metrics_have_units_and_count(server: LiveServer) -> None:
    def read() -> dict[str, float]:
        families = text_string_to_metric_families(server.http.get("/metrics").text)
        return {
            f"{sample.name}{sorted(sample.labels.items())}": sample.value
            for family in families
            for sample in family.samples
        }

    before = read()
    server.complete("hello", max_tokens=7, ignore_eos=True, n=2).raise_for_status()
    after = read()

    def change(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert change("ambidex_prompt_tokens_total[]") == 5
    assert change("ambidex_answer_tokens_total[]") == change("ambidex_output_tokens_total[]") == 14
    assert change("ambidex_answers_total[('reason', 'length')]") == 2
    assert change("ambidex_time_to_first_token_seconds_count[]") == 2
    assert change("ambidex_time_between_tokens_seconds_count[]") == 12
    assert change("ambidex_http_requests_total[('route', '/v1/completions'), ('status', '200')]") == 1
    assert change("ambidex_lane_read_bytes_total[('lane', 'gpu')]") > 0
    assert after["ambidex_kv_capacity_bytes[('tier', 'dram')]"] > 0
    assert after["ambidex_kv_used_bytes[('tier', 'gpu')]"] == 0
    assert after["ambidex_engine_ready[]"] == 1
    names = {name.partition("[")[0] for name in after}
    units = r"(bytes|seconds|tokens|total|sum|count|bucket|created|ready|restarts|open|waiting|running)$"
    assert [name for name in names if not re.search(units, name)] == []


def test_board_asks_for_metrics_that_there_are(server: LiveServer) -> None:
    board = (Path(__file__).parents[2] / "deploy" / "grafana.json").read_text(encoding="utf-8")
    asked = set(re.findall(r"ambidex_[a-z_]+", board))
    text = server.http.get("/metrics").text
    assert {name for name in asked if name not in text} == set()

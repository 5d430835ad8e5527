"""`ambidex bench`: its options, what it prints, and its files."""

import json
from pathlib import Path

import pytest
from fake_llm import run_ambidex

from ambidex.bench import links
from tiny_engine import make_engine_folder


@pytest.fixture(autouse=True)
def small_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "probe_bytes", lambda: 1 << 20)


def test_bench_alone_shows_its_verbs() -> None:
    result = run_ambidex("bench")
    assert result.exit_code == 0
    assert all(verb in result.stdout for verb in ("links", "decode", "prefill"))


def test_bench_decode_prints_a_table_and_appends_a_line_a_run(tmp_path: Path) -> None:
    model, output = str(make_engine_folder(tmp_path)), tmp_path / "new" / "records.jsonl"
    args = ("bench", "decode", model, "--contexts", "8,20", "--batch", "1,2", "--steps", "2", "--num-threads", "1")
    first = run_ambidex(*args, "--output", str(output))
    assert first.exit_code == 0, first.stderr
    assert [line.split()[:2] for line in first.stdout.splitlines()[1:5]] == [
        ["8", "1"],
        ["8", "2"],
        ["20", "1"],
        ["20", "2"],
    ]
    assert "host memory at most" in first.stdout
    second = run_ambidex(*args, "--json", env={"AMBIDEX_OUTPUT": str(output)})
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(records) == 2
    assert json.loads(second.stdout) == records[1]
    assert {"bench", "commit", "date", "machine", "versions", "settings", "rates", "points"} <= set(records[0])


def test_bench_prefill_prints_a_table(tmp_path: Path) -> None:
    model = str(make_engine_folder(tmp_path))
    result = run_ambidex("bench", "prefill", model, "--prompts", "8", "--rounds", "1", "--num-threads", "1")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.splitlines()[1].split()[0] == "8"


def test_bench_links_needs_no_model() -> None:
    result = run_ambidex("bench", "links", "--num-threads", "1")
    assert result.exit_code == 0, result.stderr
    assert "DRAM read, 1 thread" in result.stdout


@pytest.mark.parametrize("words", ["0", "x", "", "8,,9", "1.5T,9999999T", "-3"])
def test_bench_with_a_bad_list_is_refused(words: str) -> None:
    result = run_ambidex("bench", "decode", "anything", f"--contexts={words}")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "is no list of numbers from 1, such as 512,2K" in result.stderr


def test_bench_with_an_output_that_cannot_be_written_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    result = run_ambidex("bench", "decode", "no/such/model", "--output", str(tmp_path))
    assert result.exit_code == 2
    assert f"--output {tmp_path} cannot be written: Is a directory" in result.stderr


def test_bench_takes_engine_settings_alone() -> None:
    text = run_ambidex("bench", "decode", "--help").stdout
    assert "--kv-gpu-tokens" in text
    assert "--temperature" not in text


def test_bench_verbose_says_what_settings_became(tmp_path: Path) -> None:
    model = str(make_engine_folder(tmp_path))
    args = ("--contexts", "8", "--steps", "1", "--num-threads", "1", "--kv-gpu-tokens", "100", "--json", "-v")
    result = run_ambidex("bench", "decode", model, *args)
    assert result.exit_code == 0, result.stderr
    assert any("100 were asked for: rounded up to blocks of 64" in line for line in result.stderr.splitlines())
    assert json.loads(result.stdout)["became"]["kv.kv_gpu_tokens"] == "128 tokens"

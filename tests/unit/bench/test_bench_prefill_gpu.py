"""What `bench/prefill_gpu.py` counts, and that it runs."""

import json
from pathlib import Path

import pytest

import decode_gpu
import prefill_gpu
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec


def test_flops_of_a_token_are_two_for_each_weight_and_its_visible_keys(tmp_path: Path) -> None:
    decode_gpu.make_model_folder(tmp_path, "llama-3.1-8b")
    spec = read_spec(find_model(str(tmp_path)))
    num_parameters, embedding = 8_030_261_248, 128_256 * 4096  # as the model's own card counts them
    norms = (2 * 32 + 1) * 4096
    assert prefill_gpu.count_flops(spec, 1) == 2 * (num_parameters - embedding - norms) + 4 * 32 * 32 * 128
    two = prefill_gpu.count_flops(spec, 2) - prefill_gpu.count_flops(spec, 1)
    assert two == 2 * (num_parameters - 2 * embedding - norms) + 2 * 4 * 32 * 32 * 128


def test_a_run_on_the_cpu_ends_with_a_record_for_each_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "records.jsonl"
    arguments = ["--shape", "tiny", "--device", "cpu", "--dtype", "fp32", "--prompts", "90,1400", "--chunk", "256"]
    monkeypatch.setattr("sys.argv", ["prefill_gpu.py", *arguments, "--runs", "1", "--output", str(output)])
    assert prefill_gpu.main() == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["settings"]["prompt"] for record in records] == [90, 1400]
    assert records[0]["variants"]["split"]["lane_bytes"]["cpu"] == 0  # all within sink and recent window
    assert records[1]["variants"]["split"]["lane_bytes"]["cpu"] > 0
    assert records[1]["variants"]["gpu"]["lane_bytes"]["cpu"] == 0
    assert records[1]["ratio"] > 0
    assert "1400 tokens" in capsys.readouterr().out

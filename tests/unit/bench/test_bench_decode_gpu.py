"""What `bench/decode_gpu.py` counts, and that it runs."""

import json
from pathlib import Path

import pytest

import decode_gpu
from ambidex.core.config import DTypeChoice


def test_weight_bytes_of_a_step_are_all_but_the_embedding(tmp_path: Path) -> None:
    decode_gpu.make_model_folder(tmp_path, "llama-3.1-8b")
    num_parameters = 8_030_261_248  # as the model's own card counts them
    assert decode_gpu.count_weight_bytes(str(tmp_path), DTypeChoice.BF16) == 2 * (num_parameters - 128_256 * 4096)


@pytest.mark.parametrize("word", ["8192", "0x5", "2x", "ax3", "1x-4"])
def test_a_point_of_another_form_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="is not BATCHxCONTEXT"):
        decode_gpu.Point.parse(word)


def test_a_run_on_the_cpu_ends_with_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "records.jsonl"
    arguments = ["--shape", "tiny", "--device", "cpu", "--dtype", "fp32", "--points", "1x70,3x20", "--steps", "2"]
    monkeypatch.setattr("sys.argv", ["decode_gpu.py", *arguments, "--chunk", "64", "--output", str(output)])
    assert decode_gpu.main() == 0
    record = json.loads(output.read_text())
    assert [(point["batch"], point["context"]) for point in record["points"]] == [(1, 70), (3, 20)]
    # The prompt's 70 keys, 5 warm-up steps, then two that read 76 and 77: K and V, two layers, two heads of 32 fp32
    assert record["points"][0]["kv_bytes"] == 2 * 2 * 2 * 32 * 4 * (76 + 77) // 2
    assert "3 x     20" in capsys.readouterr().out

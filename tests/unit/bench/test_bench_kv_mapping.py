"""That `bench/kv_mapping.py` runs, and what its record says."""

import json
from pathlib import Path

import pytest

import kv_mapping


def test_a_run_on_the_cpu_ends_with_a_record_that_says_emulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "records.jsonl"
    arguments = ["--shape", "tiny", "--device", "cpu", "--dtype", "fp32", "--points", "1x300,2x200", "--steps", "2"]
    monkeypatch.setattr(
        "sys.argv",
        ["kv_mapping.py", *arguments, "--rounds", "1", "--selected", "20", "--near", "8", "--output", str(output)],
    )
    assert kv_mapping.main() == 0
    record = json.loads(output.read_text())
    assert record["settings"]["is_emulated"] is True
    assert record["settings"]["cxl_tier"] == "emulated (300 ns, 20 GB/s)"
    assert record["are_tokens_equal"] is True
    assert [(point["batch"], point["context"]) for point in record["points"]] == [(1, 300), (2, 200)]
    for point in record["points"]:
        assert set(point["step_s"]) == {"dram", "k-dram-v-cxl", "interleave"}
        assert set(point["slower_percent"]) == {"k-dram-v-cxl", "interleave"}
        assert point["step_s"]["dram"]["num"] == 2
    assert "CXL tier: emulated" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--points", "8192"], ["--rounds", "0"], ["--near", "1"]])
def test_a_wrong_command_line_ends_with_code_2(wrong: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kv_mapping.py", *wrong])
    with pytest.raises(SystemExit) as ended:
        kv_mapping.main()
    assert ended.value.code == 2

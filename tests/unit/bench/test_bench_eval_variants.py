"""That `bench/eval_variants.py` runs, and what its record says."""

import json
from pathlib import Path

import pytest

import eval_variants
from tiny_engine import make_engine_folder

WORDS = "the keeper of the lighthouse wrote every evening what the sea had brought, and what it had taken away. " * 8


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["eval_variants.py", *arguments])
    return eval_variants.main()


def test_variants_answer_the_same_texts_and_perplexity_is_held_against_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, text, output = make_engine_folder(tmp_path), tmp_path / "book.txt", tmp_path / "records.jsonl"
    text.write_text(WORDS)
    arguments = ["--model", str(folder), "--text", str(text), "--context", "120", "--predict", "20", "--windows", "2"]
    arguments += ["--rounds", "1", "--items", "2", "--shots", "0", "--tasks", "perplexity,needle,choice"]
    assert run(monkeypatch, "exact", "streaming_llm:policy_tokens=8", *arguments, "--output", str(output)) == 0
    record = json.loads(output.read_text())
    exact, streaming = record["points"]
    assert [point["variant"] for point in record["points"]] == ["exact", "streaming_llm:policy_tokens=8"]
    assert exact["perplexity"]["perplexity"] == pytest.approx(exact["perplexity"]["exact_perplexity"], rel=1e-4)
    assert streaming["perplexity"]["exact_perplexity"] == exact["perplexity"]["exact_perplexity"]
    assert streaming["perplexity"]["perplexity"] != pytest.approx(exact["perplexity"]["perplexity"], rel=1e-3)
    assert streaming["perplexity"]["num_tokens"] == 40
    assert [found["depth_percent"] for found in streaming["needle"]["depths"]] == [10, 50, 90]
    assert streaming["choice"]["num_items"] == 2
    assert streaming["choice"]["attended_share"] < exact["choice"]["attended_share"] == 1.0
    assert str(tmp_path) not in json.dumps(record["settings"]["text"])
    assert "streaming_llm:policy_tokens=8, choice: right" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", [["--tasks", "spelling"], ["--predict", "1"], ["--context", "many"], ["h2o:policy_percent=300"]]
)
def test_a_wrong_command_line_ends_with_code_2(wrong: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "exact", *wrong, "--text", "book.txt")
    assert ended.value.code == 2

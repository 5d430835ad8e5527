"""`ambidex eval` on a tiny model: figures against numbers got another way, records, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from ambidex import LLM, SamplingParams
from ambidex.cli.main import AmbidexCommand
from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError, RequestFailedError
from ambidex.eval.agreement import Text, measure_agreement
from ambidex.eval.needle import NUM_DIGITS, make_haystack, measure_needle
from ambidex.eval.teacher import Teacher
from ambidex.text.tokenizer import Tokenizer
from tiny_engine import ids_of, make_engine_folder

SETTINGS: dict[str, Any] = {"num_threads": 1, "dtype": "fp32", "max_context_len": 127, "max_tokens_per_step": 48}
WORDS = "the keeper of the lighthouse wrote every evening what the sea had brought, and what it had taken away. " * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("eval"))


def make_teacher(folder: Path, **settings: Any) -> Teacher:
    return Teacher(EngineConfig(model=str(folder), **SETTINGS, **settings))


def test_exact_log_probabilities_are_those_of_an_answer(folder: Path) -> None:
    ids = ids_of(WORDS)[:60]
    logprobs = make_teacher(folder).exact(ids, first=40)
    assert logprobs.shape == (20, 131)
    with LLM(str(folder), **SETTINGS) as llm:
        for place in (40, 47, 59):
            params = SamplingParams(max_output_tokens=1, temperature=0.0, logprobs=3, ignore_eos=True)
            answer = llm.generate([ids[: place + 1]], params)[0]
            assert answer.logprobs is not None
            for token_id, logprob in answer.logprobs[0].top_logprobs:
                assert abs(float(logprobs[place - 40, token_id]) - logprob) < 1e-4


def test_policy_is_followed_as_when_the_engine_decodes(folder: Path) -> None:
    """Known text behind a prompt goes through the decode path: it gives what an answer of these tokens gives."""
    settings = {"policy": "h2o", "policy_tokens": 8}
    with LLM(str(folder), **SETTINGS, **settings) as llm:
        params = SamplingParams(max_output_tokens=25, temperature=0.0, logprobs=0, ignore_eos=True)
        answer = llm.generate([ids_of(WORDS)[:40]], params)[0]
    assert answer.logprobs is not None
    teacher = make_teacher(folder, **settings)
    logprobs, selection = teacher.with_policy([*ids_of(WORDS)[:40], *answer.token_ids], num_prompt=40)
    assert selection is not None
    assert logprobs[:-1].argmax(1).tolist() == list(answer.token_ids[1:])
    for row, token in zip(logprobs[:-1], answer.logprobs[1:], strict=True):
        assert token.logprob is not None
        assert abs(float(row[token.token_id]) - token.logprob) < 1e-4
    exact = teacher.exact([*ids_of(WORDS)[:40], *answer.token_ids], first=40)
    assert (exact - logprobs).abs().max() > 0.01, "the policy changes nothing: the test would prove nothing"


def test_agreement_is_computed_from_both_runs(folder: Path) -> None:
    ids = ids_of(WORDS)
    text = Text(token_ids=ids, context=70, num_predicted=20, num_windows=2)
    teacher = make_teacher(folder, policy="streaming_llm", policy_tokens=12)
    got = measure_agreement(teacher, text, against_exact=True)
    losses, exact_losses, equal, divergences = [], [], [], []
    for start in (0, 70):
        window, targets = ids[start : start + 70], ids[start + 51 : start + 71]
        policy, _ = teacher.with_policy(window, num_prompt=50)
        exact = teacher.exact(window, first=50)
        for row, target in enumerate(targets):
            losses.append(-float(policy[row, target]))
            exact_losses.append(-float(exact[row, target]))
            equal.append(int(policy[row].argmax()) == int(exact[row].argmax()))
            divergences.append(
                sum(math.exp(e) * (e - p) for e, p in zip(exact[row].tolist(), policy[row].tolist(), strict=True))
            )
    assert got.num_tokens == 40
    assert got.perplexity == pytest.approx(math.exp(sum(losses) / 40), rel=1e-5)
    assert got.exact_perplexity == pytest.approx(math.exp(sum(exact_losses) / 40), rel=1e-5)
    steps = [loss - exact for loss, exact in zip(losses, exact_losses, strict=True)]
    spread = math.sqrt(sum((step - sum(steps) / 40) ** 2 for step in steps) / 39 / 40)
    assert got.change_error == pytest.approx(math.exp(sum(steps) / 40) * spread, rel=1e-4)
    assert f" ± {100 * got.change_error:.3f} %" in got.row()[4]
    assert got.top1_equal == sum(equal) / 40 < 1
    assert got.mean_kl == pytest.approx(sum(divergences) / 40, rel=1e-3)
    assert got.mean_kl > 0.01


def test_policy_that_leaves_nothing_out_agrees(folder: Path) -> None:
    text = Text(token_ids=ids_of(WORDS), context=60, num_predicted=20, num_windows=1)
    for settings in ({}, {"policy": "bounded", "max_dropped_mass": 0.0}):
        got = measure_agreement(make_teacher(folder, **settings), text, against_exact=True)
        assert got.top1_equal == 1.0
        assert got.mean_kl is not None
        assert abs(got.mean_kl) < 1e-6


def test_haystack_holds_the_code_where_it_should(folder: Path) -> None:
    tokenizer: Tokenizer = make_teacher(folder).engine.tokenizer
    for depth in (0, 50, 100):
        hay = make_haystack(tokenizer, WORDS * 3, context=200, depth_percent=depth, seed=1)
        assert len(hay.ids) == 200
        said = " " + " ".join(str(digit) for digit in hay.right)
        prompt = tokenizer.decode(hay.ids[: hay.num_prompt])
        assert prompt.count(f"lighthouse is{said}. Remember it.") == 1
        question = tokenizer.decode(hay.ids[hay.num_prompt :])
        assert question == "\nThe secret code of the lighthouse is" + said[:-1]
        assert [ids[right] for ids, right in zip(hay.candidates, hay.right, strict=True)] == ids_of(
            said.replace(" ", "")
        )
        for place, digit in list(zip(hay.places, hay.right, strict=True))[:-1]:
            assert hay.ids[place + 1] == ids_of(str(digit))[0]


def test_needle_reads_the_right_digit_against_the_others(folder: Path) -> None:
    teacher = make_teacher(folder, policy="streaming_llm", policy_tokens=12)
    found = measure_needle(
        teacher, WORDS, context=126, depth_percent=10, num_rounds=2, against_exact=True
    )  # fmt: skip
    odds = []
    for seed in range(2):
        hay = make_haystack(teacher.engine.tokenizer, WORDS, context=126, depth_percent=10, seed=seed)
        logprobs, _ = teacher.with_policy(hay.ids, num_prompt=hay.num_prompt)
        for place, digit in zip(hay.places, hay.right, strict=True):
            row = {other: float(logprobs[place - hay.num_prompt, ids_of(str(other))[0]]) for other in range(10)}
            odds.append(row.pop(digit) - max(row.values()))
    assert found.num_digits == len(odds) == 2 * NUM_DIGITS
    assert found.log_odds == pytest.approx(sum(odds) / len(odds), abs=1e-5)
    assert found.right_first == sum(value > 0 for value in odds) / len(odds)
    assert found.exact_log_odds != found.log_odds


def test_request_that_fails_is_reported(folder: Path) -> None:
    teacher = make_teacher(folder)

    def fail(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory, says the test")

    teacher.engine.core.executor._forward = fail  # type: ignore[attr-defined]
    with pytest.raises(RequestFailedError, match="no memory, says the test"):
        teacher.exact(ids_of(WORDS)[:20], first=10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 500}, r"--text has \d+ tokens: 1 windows of 500 need 501"),
        ({"num_windows": 40}, "40 windows of 60 need 2401"),
        ({"num_predicted": 60}, "--predict is 60: it must be below --contexts 60"),
        ({"context": 127}, "--contexts 127 needs a context limit above it: it is 127"),
    ],
)
def test_text_that_does_not_fit_is_refused(folder: Path, changes: dict[str, int], message: str) -> None:
    text = Text(**{"token_ids": ids_of(WORDS), "context": 60, "num_predicted": 20, "num_windows": 1} | changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        measure_agreement(make_teacher(folder), text, against_exact=False)


def run(folder: Path, text: Path, *words: str) -> Result:
    settings = ["--num-threads", "1", "--dtype", "fp32", "--max-context-len", "127"]
    return CliRunner().invoke(AmbidexCommand(), ["eval", *words, str(folder), "--text", str(text), *settings])


def test_command_prints_a_table_and_appends_a_json_line(folder: Path, tmp_path: Path) -> None:
    text, output = tmp_path / "words.txt", tmp_path / "records.jsonl"
    text.write_text(WORDS)
    shared = ["--contexts", "40,60", "--output", str(output)]
    result = run(
        folder, text, "agreement", *shared, "--predict", "9", "--policy", "bounded", "--max-dropped-mass", "0.1"
    )
    assert result.exit_code == 0, result.output
    assert "top-1 equal" in result.output
    result = run(folder, text, "perplexity", *shared, "--predict", "9", "--against", "none")
    assert result.exit_code == 0, result.output
    result = run(folder, text, "needle", "--contexts", "120", "--depths", "0,50", "--policy", "h2o", "--json",
                 "--output", str(output))  # fmt: skip
    assert result.exit_code == 0, result.output
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [record["eval"] for record in records] == ["agreement", "perplexity", "needle"]
    assert [point["context"] for point in records[0]["points"]] == [40, 60]
    assert records[0]["policy"] == "bounded"
    assert 0 < records[0]["points"][0]["selection"]["max_dropped_mass"] <= 0.1
    assert records[1]["points"][0]["exact_perplexity"] is None
    assert [point["depth_percent"] for point in records[2]["points"]] == [0, 50]
    assert json.loads(result.stdout.splitlines()[-1]) == records[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["agreement", "--text", "nowhere"], "--text nowhere cannot be read"),
        (["agreement", "--against", "none"], "'none' is not 'exact'"),
        (["needle", "--depths", "10,101"], "is no list of percentages"),
        (["perplexity", "--contexts", "0"], "is no list of numbers from 1"),
        (["agreement", "--policy", "h2o", "--sink-tokens", "3"], "--sink-tokens is an option of streaming_llm"),
    ],
)
def test_bad_words_are_refused_without_a_traceback(folder: Path, words: list[str], message: str) -> None:
    result = CliRunner().invoke(AmbidexCommand(), ["eval", *words, "-m", str(folder)])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output

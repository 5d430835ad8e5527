"""Tasks for long contexts: what is hidden, where, and how answers are compared."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from ambidex.cli.main import AmbidexCommand
from ambidex.core.errors import ConfigError
from ambidex.core.step import SelectionFigures
from ambidex.eval.long_context import TIMES_AS_OFTEN, make_counting, make_multikey, make_variables
from ambidex.eval.probe import Probe, measure_probes
from ambidex.eval.words import Hay, known_words, pick_answers
from ambidex.formats.locate import find_model
from ambidex.text.tokenizer import Tokenizer, load_tokenizer
from planted_model import save_planted_model
from tiny_engine import make_engine_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_planted_model(tmp_path_factory.mktemp("planted") / "model")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(find_model(str(folder)))


def words_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.token_text(token) for token in ids]


@pytest.mark.parametrize("seed", range(5))
def test_multikey_asks_for_one_of_the_hidden_secrets(tokenizer: Tokenizer, seed: int) -> None:
    probe = make_multikey(tokenizer, Hay.of(tokenizer, None), context=400, keys=5, seed=seed)
    assert len(probe.prompt) + len(probe.question) == 400
    text = " ".join(words_of(tokenizer, probe.prompt))
    secrets = dict(re.findall(r"The secret word of the (\w+) is (\w+) \.", text))
    assert len(secrets) == 5
    question = words_of(tokenizer, probe.question)
    assert question[-2:] == [question[7], "is"]
    (right,) = probe.right
    candidates = words_of(tokenizer, probe.candidates)
    assert candidates[right] == secrets[question[-2]]
    assert sorted(candidates) == sorted(secrets.values())


@pytest.mark.parametrize("seed", range(5))
def test_variables_of_one_chain_are_the_right_ones(tokenizer: Tokenizer, seed: int) -> None:
    probe = make_variables(tokenizer, Hay.of(tokenizer, None), context=400, chains=3, hops=2, seed=seed)
    assert len(probe.prompt) + len(probe.question) == 400
    text = " ".join(words_of(tokenizer, probe.prompt))
    values: dict[str, str] = {}
    for name, is_copy, source in re.findall(r"VAR (\w+) = (VAR )?((?:\d ?)+|\w+)", text):
        values[name] = values[source] if is_copy else source.strip()  # a source must come before its copy
    asked = " ".join(word for word in words_of(tokenizer, probe.question) if word.isdigit())[: 2 * 5 - 1]
    candidates = words_of(tokenizer, probe.candidates)
    assert sorted(values) == sorted(candidates)
    assert {candidates[place] for place in probe.right} == {name for name, value in values.items() if value == asked}
    assert len(probe.right) == 3


def test_common_words_come_ten_times_as_often(tokenizer: Tokenizer) -> None:
    probe = make_counting(tokenizer, context=450, common=2, seed=1)
    assert 250 < len(probe.prompt) + len(probe.question) <= 450
    counts = {word: words_of(tokenizer, probe.prompt).count(word) for word in words_of(tokenizer, probe.candidates)}
    right = {word for place, word in enumerate(counts) if place in probe.right}
    rounds = max(counts.values()) // TIMES_AS_OFTEN
    assert rounds >= 2
    assert all(counts[word] == rounds * (TIMES_AS_OFTEN if word in right else 1) for word in counts)
    assert len(right) == 2


def test_the_same_seed_makes_the_same_probe(tokenizer: Tokenizer) -> None:
    hay = Hay.of(tokenizer, None)
    first, again, other = (make_multikey(tokenizer, hay, context=300, keys=4, seed=seed) for seed in (3, 3, 4))
    assert first == again != other


class Fixed:
    """A teacher whose distribution behind the question is given."""

    def __init__(self, policy: list[float], exact: list[float]) -> None:
        self._rows = {"policy": torch.tensor([policy]), "exact": torch.tensor([exact])}

    def check_length(self, num_tokens: int, *, flag: str) -> None:
        pass

    def with_policy(self, token_ids: list[int], *, num_prompt: int) -> tuple[torch.Tensor, SelectionFigures | None]:
        assert (token_ids, num_prompt) == ([7, 8, 9], 2)
        return self._rows["policy"], None

    def exact(self, token_ids: list[int], *, first: int) -> torch.Tensor:
        assert (token_ids, first) == ([7, 8, 9], 2)
        return self._rows["exact"]


def test_found_and_odds_are_of_the_right_candidates_among_the_likeliest() -> None:
    probe = Probe(prompt=[7, 8], question=[9], candidates=[1, 2, 3, 4], right=frozenset({0, 2}))
    teacher: Any = Fixed([0.0, -1.0, -2.0, -4.0, -3.0], [9.0, -1.0, -5.0, -2.0, -6.0])
    got = measure_probes(teacher, lambda _: probe, context=3, num_probes=2, against_exact=True)
    assert (got.found, got.by_chance, got.log_odds) == (0.5, 0.5, -2.0)
    assert (got.exact_found, got.exact_log_odds) == (1.0, 3.0)


def test_equal_scores_find_nothing() -> None:
    probe = Probe(prompt=[7, 8], question=[9], candidates=[1, 2, 3], right=frozenset({0}))
    teacher: Any = Fixed([0.0] * 4, [0.0] * 4)
    got = measure_probes(teacher, lambda _: probe, context=3, num_probes=1, against_exact=False)
    assert (got.found, got.log_odds, got.exact_found) == (0.0, 0.0, None)


def test_characters_tell_as_many_words_apart_as_there_are_first_letters(tmp_path: Path) -> None:
    import random

    tokenizer = load_tokenizer(find_model(str(make_engine_folder(tmp_path))))
    answers = pick_answers(tokenizer, "Say", count=8, rng=random.Random(1), flag="--keys")
    assert tokenizer.decode(answers.question) == "Say "
    assert [tokenizer.token_text(token) for token in answers.tokens] == [word[0] for word in answers.words]
    letters = len({word[0] for word in known_words()})
    with pytest.raises(ConfigError, match=rf"tells {letters} of the known words apart by one token, --keys needs 60"):
        pick_answers(tokenizer, "Say", count=60, rng=random.Random(1), flag="--keys")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda t: make_multikey(t, Hay.of(t, None), context=40, keys=4, seed=0), "--contexts is too short by"),
        (lambda t: make_multikey(t, Hay.of(t, "a boat"), context=400, keys=4, seed=0), "--text has 2 tokens"),
        (lambda t: make_counting(t, context=60, common=4, seed=0), "--contexts 60 is too short for a list"),
    ],
)
def test_context_or_text_that_does_not_do_is_refused(tokenizer: Tokenizer, make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tokenizer)


def run(folder: Path, *words: str) -> Result:
    settings = ["--num-threads", "1", "--dtype", "fp32", "--max-context-len", "500"]
    return CliRunner().invoke(AmbidexCommand(), ["eval", *words, "-m", str(folder), *settings])


def test_commands_print_record_and_draw(folder: Path, tmp_path: Path) -> None:
    records, plot = tmp_path / "records.jsonl", tmp_path / "plot.svg"
    shared = ["--rounds", "2", "--contexts", "250,300", "--output", str(records), "--plot", str(plot)]
    first = run(folder, "multikey", *shared)
    assert first.exit_code == 0, first.output
    assert "100 %" in first.output
    second = run(folder, "multikey", *shared, "--policy", "streaming_llm", "--policy-tokens", "40")
    assert second.exit_code == 0, second.output
    assert len(records.read_text().splitlines()) == 2
    svg = plot.read_text()
    assert svg.count("<polyline") == 2
    assert ">streaming_llm</text>" in svg
    assert ">exact</text>" in svg
    for words in (["variables", "--chains", "2"], ["counting", "--common", "1"]):
        result = run(folder, *words, "--rounds", "1", "--contexts", "300", "--json", "--plot", str(plot))
        assert result.exit_code == 0, result.output
        assert f'"eval": "{words[0]}"' in result.stdout
    result = run(folder, "choice", "shipped", "--items", "2", "--shots", "1", "--plot", str(plot))
    assert result.exit_code == 0, result.output
    assert "right a byte" in result.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["multikey", "--contexts", "499", "--keys", "1"], "Invalid value for '--keys'"),
        (["multikey", "--contexts", "600"], "--contexts 600 needs a context limit above it"),
        (["counting", "--contexts", "50"], "--contexts 50 is too short for a list"),
        (["choice", "nowhere.jsonl"], "nowhere.jsonl cannot be read"),
        (["choice", "shipped", "--shots", "99"], "--shots is 99"),
        (["choice"], "Missing argument 'FILE'"),
    ],
)
def test_bad_words_are_refused_without_a_traceback(folder: Path, words: list[str], message: str) -> None:
    result = run(folder, *words)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output

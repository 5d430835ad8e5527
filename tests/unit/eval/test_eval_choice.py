"""Multiple choice and continuations on a tiny model: likelihoods against those of the engine's own answers."""

from pathlib import Path
from typing import Any

import pytest

from ambidex import LLM, SamplingParams
from ambidex.core.config import EngineConfig
from ambidex.core.errors import ConfigError
from ambidex.eval.choice import measure_choice
from ambidex.eval.continuation import score_continuation, split_ids
from ambidex.eval.items import Item
from ambidex.eval.teacher import Teacher
from tiny_engine import ids_of, make_engine_folder

SETTINGS: dict[str, Any] = {"num_threads": 1, "dtype": "fp32", "max_context_len": 127, "max_tokens_per_step": 48}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("choice"))


def make_teacher(folder: Path, **settings: Any) -> Teacher:
    return Teacher(EngineConfig(model=str(folder), **SETTINGS, **settings))


def test_continuation_has_the_log_probability_of_an_answer(folder: Path) -> None:
    prompt = ids_of("Question: what is it? Answer:")
    with LLM(str(folder), **SETTINGS) as llm:
        params = SamplingParams(max_output_tokens=6, temperature=0.0, logprobs=0, ignore_eos=True)
        answer = llm.generate([prompt], params)[0]
    assert answer.logprobs is not None
    wanted = sum(token.logprob or 0.0 for token in answer.logprobs)
    got = score_continuation(make_teacher(folder), prompt, answer.token_ids, is_exact=True)
    assert got.is_greedy
    assert got.logprob == pytest.approx(wanted, abs=1e-4)
    other = score_continuation(make_teacher(folder), prompt, [*answer.token_ids[:-1], 5], is_exact=True)
    assert not other.is_greedy


def test_first_token_of_a_continuation_is_computed_under_the_policy(folder: Path) -> None:
    prompt, answer = ids_of("Question: what has the keeper written there?"), ids_of("x")
    teacher = make_teacher(folder, policy="streaming_llm", policy_tokens=6)
    chosen = score_continuation(teacher, prompt, answer, is_exact=False)
    exact = score_continuation(teacher, prompt, answer, is_exact=True)
    assert chosen.selection is not None
    assert chosen.selection.num_attended < chosen.selection.num_visible
    assert abs(chosen.logprob - exact.logprob) > 1e-3


def test_one_token_of_context_is_enough(folder: Path) -> None:
    teacher = make_teacher(folder)
    one = score_continuation(teacher, ids_of("a"), ids_of("bc"), is_exact=False)
    assert one.logprob == pytest.approx(score_continuation(teacher, ids_of("a"), ids_of("bc"), is_exact=True).logprob)


def test_texts_are_parted_before_spaces(folder: Path) -> None:
    tokenizer = make_teacher(folder).engine.tokenizer
    assert split_ids(tokenizer, "ab ", "cd") == (ids_of("ab"), ids_of(" cd"))
    assert split_ids(tokenizer, "ab", " cd") == (ids_of("ab"), ids_of(" cd"))
    assert split_ids(tokenizer, "", "cd") == ([1], ids_of("cd"))
    with pytest.raises(ConfigError, match="no tokens to score"):
        split_ids(tokenizer, "", "")


ITEMS = [
    Item(contexts=(f"{number} is",) * 3, continuations=(" one", " two words", " a third thing"), right=number % 3)
    for number in range(5)
]


def test_shares_follow_from_the_likelihoods_of_the_choices(folder: Path) -> None:
    teacher = make_teacher(folder, policy="h2o", policy_tokens=6)
    got = measure_choice(teacher, ITEMS, shots=2, against_exact=True)
    before = "0 is one\n\n1 is two words\n\n"
    rights: dict[str, list[bool]] = {"plain": [], "byte": [], "exact": [], "exact byte": [], "same": []}
    for item in ITEMS[2:]:
        best = {}
        for name, is_exact in (("", False), ("exact ", True)):
            values = []
            for choice in item.continuations:
                ids = ids_of(before + item.contexts[0] + choice)
                num_context = len(before + item.contexts[0])
                if is_exact:
                    rows = teacher.exact(ids[:-1], first=num_context - 1)
                else:
                    rows, _ = teacher.with_policy(ids[:-1], num_prompt=num_context - 1)
                values.append(sum(float(row[token]) for row, token in zip(rows, ids[num_context:], strict=True)))
            best[name] = values.index(max(values))
            shares = [value / len(choice) for value, choice in zip(values, item.continuations, strict=True)]
            rights[f"{name}byte"].append(shares.index(max(shares)) == item.right)
        rights["plain"].append(best[""] == item.right)
        rights["exact"].append(best["exact "] == item.right)
        rights["same"].append(best[""] == best["exact "])
    shares = {name: sum(values) / 3 for name, values in rights.items()}
    assert (got.right, got.right_per_byte) == (shares["plain"], shares["byte"])
    assert (got.exact_right, got.exact_right_per_byte) == (shares["exact"], shares["exact byte"])
    assert got.same_choice == shares["same"]
    assert got.by_chance == pytest.approx(1 / 3)
    assert got.num_items == 3


def test_too_few_or_too_long_questions_are_refused(folder: Path) -> None:
    teacher = make_teacher(folder)
    with pytest.raises(ConfigError, match="--shots is 5: the file has 5 questions"):
        measure_choice(teacher, ITEMS, shots=5, against_exact=False)
    long = Item(contexts=("a" * 200,) * 2, continuations=(" b", " c"), right=0)
    with pytest.raises(ConfigError, match="has 202 tokens: the context limit is 127"):
        measure_choice(teacher, [long], shots=0, against_exact=False)

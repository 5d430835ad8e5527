"""Multiple-choice files: every known layout, and lines that are none."""

import json
from pathlib import Path
from typing import Any

import pytest

from ambidex.core.errors import ConfigError
from ambidex.eval.items import SHIPPED, Item, read_items

LAYOUTS: dict[str, tuple[dict[str, Any], Item]] = {
    "ours": (
        {"question": "What is wet?", "choices": ["sand", "water", "air"], "answer": 1},
        Item(contexts=("Question: What is wet?\nAnswer:",) * 3, continuations=(" sand", " water", " air"), right=1),
    ),
    "ours, by letter": (
        {"question": "Q", "choices": ["sand", "water"], "answer": "B"},
        Item(contexts=("Question: Q\nAnswer:",) * 2, continuations=(" sand", " water"), right=1),
    ),
    "ours, by text": (
        {"question": "Q", "choices": ["sand", "A"], "answer": "A"},
        Item(contexts=("Question: Q\nAnswer:",) * 2, continuations=(" sand", " A"), right=1),
    ),
    "PIQA": (
        {"goal": "dry a shirt", "sol1": "hang it up", "sol2": "drown it", "label": 0},
        Item(contexts=("Question: dry a shirt\nAnswer:",) * 2, continuations=(" hang it up", " drown it"), right=0),
    ),
    "OpenBookQA": (
        {
            "id": "7-1", "answerKey": "B",
            "question": {"stem": "The sun is",
                         "choices": [{"text": "cold", "label": "A"}, {"text": "hot", "label": "B"}]},
        },
        Item(contexts=("The sun is",) * 2, continuations=(" cold", " hot"), right=1),
    ),
    "OpenBookQA, flat": (
        {"question_stem": "The sun is", "choices": {"text": ["cold", "hot"], "label": ["A", "B"]}, "answerKey": "A"},
        Item(contexts=("The sun is",) * 2, continuations=(" cold", " hot"), right=0),
    ),
    "ARC": (
        {"question": "The sun is", "choices": {"text": ["cold", "hot"], "label": ["1", "2"]}, "answerKey": "2"},
        Item(contexts=("The sun is",) * 2, continuations=(" cold", " hot"), right=1),
    ),
    "COPA, cause": (
        {"premise": "The glass broke.", "choice1": "It fell.", "choice2": "It sang.", "question": "cause", "label": 0},
        Item(contexts=("The glass broke because",) * 2, continuations=(" it fell.", " it sang."), right=0),
    ),
    "COPA, effect": (
        {"premise": "It rained.", "choice1": "I sang.", "choice2": "I got wet.", "question": "effect", "label": 1},
        Item(contexts=("It rained therefore",) * 2, continuations=(" i sang.", " i got wet."), right=1),
    ),
    "RTE": (
        {"premise": "A dog ran.", "hypothesis": "An animal ran.", "label": "entailment"},
        Item(
            contexts=("A dog ran.\nQuestion: An animal ran. True or False?\nAnswer:",) * 2,
            continuations=(" True", " False"), right=0,
        ),
    ),
    "RTE, as numbers": (
        {"sentence1": "A dog ran.", "sentence2": "A cat ran.", "label": 1},
        Item(
            contexts=("A dog ran.\nQuestion: A cat ran. True or False?\nAnswer:",) * 2,
            continuations=(" True", " False"), right=1,
        ),
    ),
    "WinoGrande": (
        {"sentence": "The cup did not fit, for _ was big.", "option1": "the cup", "option2": "the bag", "answer": "1"},
        Item(
            contexts=("The cup did not fit, for the cup", "The cup did not fit, for the bag"),
            continuations=(" was big.", " was big."), right=0,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_is_read(tmp_path: Path, name: str) -> None:
    line, wanted = LAYOUTS[name]
    file = tmp_path / "items.jsonl"
    file.write_text(json.dumps(line) + "\n\n" + json.dumps(line) + "\n")
    assert read_items(file) == [wanted, wanted]


def test_labels_beside_the_file_are_used(tmp_path: Path) -> None:
    line = {"goal": "g", "sol1": "a", "sol2": "b"}
    (tmp_path / "valid.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps(line)}\n")
    (tmp_path / "valid-labels.lst").write_text("1\n0\n")
    assert [item.right for item in read_items(tmp_path / "valid.jsonl")] == [1, 0]


def test_shipped_items_are_of_our_layout_and_right_answers_are_spread() -> None:
    items = read_items(Path(SHIPPED))
    assert len(items) >= 36
    assert {item.right for item in items} == {0, 1, 2, 3}
    assert len({item.contexts[0] for item in items}) == len(items)


GOOD = '{"question": "Q", "choices": ["a", "b"], "answer": 0}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "line 2 is list, not an object"),
        ("[" * 100_000, "line 2 is no"),
        ("{}", "line 2 has the fields none: give question"),
        ('{"goal": "g", "sol1": "a", "sol2": "b"}', "line 2 has the fields goal, sol1, sol2: give .* PIQA .with label"),
        ('{"question": "Q", "choices": ["a"], "answer": 0}', "line 2 has 1 in `choices`: give 2 to 10"),
        ('{"question": "Q", "choices": ["a", 3], "answer": 0}', "line 2 has `choices` .* it must be a list of texts"),
        ('{"question": "Q", "choices": ["a", ""], "answer": 0}', "line 2 has an empty choice"),
        ('{"question": "Q", "choices": ["a", "b"], "answer": 2}', "line 2 has `answer` 2: it must be one of 0, 1"),
        ('{"question": "Q", "choices": ["a", "b"], "answer": true}', "line 2 has `answer` True"),
        ('{"question": "Q", "choices": ["a", "b"], "answer": "C"}', "line 2 has `answer` 'C': it must be one of A, B"),
        ('{"question": 3, "choices": ["a", "b"], "answer": 1}', "line 2 has `question` 3: it must be a text"),
        ('{"question": {"stem": 1}, "answerKey": "A"}', "line 2 has an answerKey, but no stem"),
        ('{"sentence": "no gap", "option1": "a", "option2": "b", "answer": "1"}', "line 2 has 0 gaps in `sentence`"),
        ('{"premise": "p", "hypothesis": "h", "label": "perhaps"}', "line 2 has `label` 'perhaps'"),
    ],
)
def test_line_that_is_no_question_is_refused_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text(f"{GOOD}\n{line}\n")
    with pytest.raises(ConfigError, match=message):
        read_items(file)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"\n \n"])
def test_file_without_questions_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "items.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"items\.jsonl (cannot be read|has no question)"):
        read_items(file)

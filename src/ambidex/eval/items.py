"""Multiple-choice questions from JSONL files: our own layout, and those of common sets, recognised by their fields.

    ours          question, choices (texts), answer (its number from 0, its letter, or its text)
    PIQA          goal, sol1, sol2, label; or the labels in NAME-labels.lst beside NAME.jsonl
    OpenBookQA    question {stem, choices [{text, label}]} or question_stem, choices {text, label}; answerKey (also ARC)
    COPA          premise, choice1, choice2, question (cause or effect), label
    RTE           premise, hypothesis (or sentence1, sentence2), label (entailment or not_entailment, 0 or 1)
    WinoGrande    sentence with one _, option1, option2, answer (1 or 2)

Prompts are worded as lm-evaluation-harness words them, so that figures can be compared.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from ambidex.core.errors import ConfigError
from ambidex.formats.bounded_file import read_text_file

SHIPPED: Final = "shipped"
"""The name of the file that comes with the package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """`contexts` and `continuations` of each choice, whose likelihoods are compared, and which is right. The contexts
    are equal but for WinoGrande, where the choice stands inside them."""

    contexts: tuple[str, ...]
    continuations: tuple[str, ...]
    right: int

    @property
    def solved(self) -> str:
        """The question with its answer, as an example for others."""
        return self.contexts[self.right] + self.continuations[self.right]


def read_items(name: Path) -> list[Item]:
    """Read a file, or the shipped one for the name `shipped`.

    Raises:
        ConfigError: it cannot be read, is empty, or a line (named by its number) is no question of a known layout.
    """
    if str(name) == SHIPPED:
        text = (files("ambidex.eval") / "data" / "items.jsonl").read_text(encoding="utf-8")
    else:
        try:
            text = read_text_file(name)
        except (OSError, ValueError) as error:  # ValueError: no UTF-8, a null byte in the name
            raise ConfigError(f"{name} cannot be read as UTF-8 text: {error}") from error
    labels = _labels_beside(name)
    items: list[Item] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            where = f"{name}, line {number}"
            items.append(_read_line(line, where, labels[len(items)] if len(items) < len(labels) else None))
    if not items:
        raise ConfigError(f"{name} has no question: each line must be a JSON object (docs/cli.md)")
    return items


def _labels_beside(name: Path) -> Sequence[str]:
    path = name.with_name(f"{name.stem}-labels.lst")
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, ValueError):  # there is none: the label must then stand in the line
        return ()


def _read_line(line: str, where: str, label: str | None) -> Item:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where} is no question: it is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{where} is {type(fields).__name__}, not an object with the fields of a question")
    if label is not None and "label" not in fields:
        fields["label"] = label
    for needed, read in LAYOUTS.items():
        if all(name in fields for name in needed):
            return _Line(fields, where).checked(read)
    raise ConfigError(
        f"{where} has the fields {', '.join(sorted(fields)) or 'none'}: give question, choices and answer, or the "
        f"fields of PIQA (with label), OpenBookQA, COPA, RTE or WinoGrande (docs/cli.md)"
    )


class _Line:
    """The fields of one line, read with their types checked."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields, self._where = fields, where

    def checked(self, read: "Callable[[_Line], Item]") -> Item:
        item = read(self)
        if not all(continuation.strip() for continuation in item.continuations):
            raise self.error("has an empty choice")
        return item

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self._where} {what}")

    def text(self, name: str) -> str:
        value = self._fields[name]
        if not isinstance(value, str):
            raise self.error(f"has `{name}` {value!r}: it must be a text")
        return value

    def raw(self, name: str) -> Any:
        return self._fields[name]

    def find(self, name: str) -> Any:
        return self._fields.get(name)

    def place(self, name: str, words: Sequence[object]) -> int:
        """Which of some words a field is, also as text."""
        value = self._fields[name]
        for place, word in enumerate(words):
            if value == word and type(value) is type(word):
                return place
        texts = [str(word) for word in words]
        if isinstance(value, str) and value in texts:
            return texts.index(value)
        raise self.error(f"has `{name}` {value!r}: it must be one of {', '.join(dict.fromkeys(texts))}")

    def texts(self, name: str, values: object) -> list[str]:
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise self.error(f"has `{name}` {str(values)[:80]}: it must be a list of texts")
        if not 2 <= len(values) <= len(LETTERS):
            raise self.error(f"has {len(values)} in `{name}`: give 2 to {len(LETTERS)}")
        return values


LETTERS: Final = "ABCDEFGHIJ"


def _same(context: str, choices: Sequence[str], right: int) -> Item:
    return Item(contexts=(context,) * len(choices), continuations=tuple(f" {c}" for c in choices), right=right)


def _ours(line: _Line) -> Item:
    choices = line.texts("choices", line.raw("choices"))
    answer = line.raw("answer")
    if isinstance(answer, str) and answer in choices:
        right = choices.index(answer)
    elif isinstance(answer, str):
        right = line.place("answer", LETTERS[: len(choices)])
    else:
        right = line.place("answer", range(len(choices)))
    return _same(f"Question: {line.text('question')}\nAnswer:", choices, right)


def _piqa(line: _Line) -> Item:
    choices = [line.text("sol1"), line.text("sol2")]
    return _same(f"Question: {line.text('goal')}\nAnswer:", choices, line.place("label", (0, 1)))


def _open_book(line: _Line) -> Item:
    """`question` and its choices as in the authors' files, or flat; choices as objects or as two lists."""
    question = line.find("question_stem") or line.raw("question")
    choices = line.find("choices")
    if isinstance(question, dict):
        choices, question = question.get("choices"), question.get("stem")
    if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices):
        choices = {name: [choice.get(name) for choice in choices] for name in ("text", "label")}
    if not isinstance(question, str) or not isinstance(choices, dict):
        raise line.error("has an answerKey, but no stem (a text) with choices of text and label")
    texts = line.texts("choices", choices.get("text"))
    labels = line.texts("labels of choices", choices.get("label"))
    if len(labels) != len(texts):
        raise line.error(f"has {len(texts)} choices and {len(labels)} labels")
    return _same(question, texts, line.place("answerKey", labels))


def _copa(line: _Line) -> Item:
    link = ("because", "therefore")[line.place("question", ("cause", "effect"))]
    choices = [line.text("choice1"), line.text("choice2")]
    lowered = [choice[:1].lower() + choice[1:] for choice in choices]
    return _same(f"{line.text('premise').strip().rstrip('.')} {link}", lowered, line.place("label", (0, 1)))


def _rte(premise: str, hypothesis: str) -> Callable[[_Line], Item]:
    def read(line: _Line) -> Item:
        label = line.raw("label")
        words = ("entailment", "not_entailment")
        right = line.place("label", words) if label in words else line.place("label", (0, 1))
        context = f"{line.text(premise)}\nQuestion: {line.text(hypothesis)} True or False?\nAnswer:"
        return _same(context, ("True", "False"), right)

    return read


def _winogrande(line: _Line) -> Item:
    sentence = line.text("sentence")
    if sentence.count("_") != 1:
        raise line.error(f"has {sentence.count('_')} gaps in `sentence`: it must have one _")
    before, after = sentence.split("_")
    contexts = tuple(before + line.text(name) for name in ("option1", "option2"))
    return Item(contexts=contexts, continuations=(after, after), right=line.place("answer", ("1", "2")))


LAYOUTS: Final[Mapping[tuple[str, ...], Callable[[_Line], Item]]] = {
    ("question", "choices", "answer"): _ours,
    ("goal", "sol1", "sol2", "label"): _piqa,
    ("question", "answerKey"): _open_book,
    ("question_stem", "choices", "answerKey"): _open_book,
    ("premise", "choice1", "choice2", "question", "label"): _copa,
    ("premise", "hypothesis", "label"): _rte("premise", "hypothesis"),
    ("sentence1", "sentence2", "label"): _rte("sentence1", "sentence2"),
    ("sentence", "option1", "option2", "answer"): _winogrande,
}
"""Fields that tell a layout → how a line of it is read; the first that fits counts."""

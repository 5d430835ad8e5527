"""Words that a tokenizer tells apart by one token, and the text in which things are hidden."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ambidex.core.errors import ConfigError
from ambidex.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Words that may stand behind a question: `question` are the tokens before the first one that differs, `tokens`
    that one of each word."""

    question: list[int]
    words: list[str]
    tokens: list[int]


@cache
def known_words() -> tuple[str, ...]:
    """Common English nouns, one word each, in alphabetical order."""
    return tuple((files("ambidex.eval") / "data" / "words.txt").read_text(encoding="utf-8").split())


def pick_answers(
    tokenizer: Tokenizer, question: str, *, count: int, rng: random.Random, without: Sequence[str] = (), flag: str
) -> Answers:
    """Choose words that may follow a question.

    Args:
        question: what they follow, without the space between.
        without: words that are taken already.
        flag: what asked for so many, for the error.
    Raises:
        ConfigError: the tokenizer does not tell so many words apart by one token.
    """
    spellings = {word: tokenizer.encode(f"{question} {word}", add_special=False) for word in known_words()}
    num_shared = _shared_len(list(spellings.values()))
    words: list[str] = []
    tokens: list[int] = []
    for word in rng.sample(known_words(), len(known_words())):
        token = spellings[word][num_shared]
        if word in without or token in tokens:
            continue
        words.append(word)
        tokens.append(token)
        if len(words) == count:
            return Answers(question=next(iter(spellings.values()))[:num_shared], words=words, tokens=tokens)
    raise ConfigError(
        f"this model's tokenizer tells {len(words)} of the known words apart by one token, {flag} needs {count}: "
        f"lower it"
    )


def _shared_len(spellings: Sequence[list[int]]) -> int:
    """How many tokens all begin with."""
    shortest, longest = min(spellings), max(spellings)
    same = [a == b for a, b in zip(shortest, longest, strict=False)]
    return same.index(False) if False in same else len(same)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hay:
    """A text's tokens to hide things in; the shipped one is repeated until there is enough."""

    ids: Sequence[int]
    can_repeat: bool

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str | None) -> "Hay":
        """A text of the user's, or the shipped one for None."""
        if text is not None:
            return cls(ids=tokenizer.encode(text), can_repeat=False)
        return cls(ids=tokenizer.encode(shipped_text()), can_repeat=True)

    def take(self, count: int) -> list[int]:
        """The first so many tokens.

        Raises:
            ConfigError: the text has fewer, or the context leaves no room for one.
        """
        if count < 1:
            raise ConfigError(f"--contexts is too short by {1 - count} tokens for what is hidden in it: raise it")
        if self.can_repeat:
            return [self.ids[place % len(self.ids)] for place in range(count)]
        if len(self.ids) < count:
            raise ConfigError(f"--text has {len(self.ids)} tokens, this context needs {count}: give a longer text")
        return list(self.ids[:count])


@cache
def shipped_text() -> str:
    """A short text of our own, free to use, about a harbour."""
    return (files("ambidex.eval") / "data" / "harbour.txt").read_text(encoding="utf-8")


def hide(hay: Sequence[int], pieces: Sequence[Sequence[int]], rng: random.Random) -> list[int]:
    """Put pieces into a text, in their order, at random places, but not before its first token."""
    places = sorted(rng.randrange(1, len(hay) + 1) for _ in pieces)
    out: list[int] = []
    last = 0
    for place, piece in zip(places, pieces, strict=True):
        out += [*hay[last:place], *piece]
        last = place
    return [*out, *hay[last:]]

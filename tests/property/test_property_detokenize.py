"""Streams of tokens: the shown pieces join to the whole text, nothing is taken back, no character is cut."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ambidex.formats.locate import find_model
from ambidex.text.detokenize import Detokenizer
from ambidex.text.parts import TokenizerParts
from ambidex.text.tokenizer import Tokenizer, load_tokenizer
from tiny_tokenizers import sentencepiece_tokenizer

_NAMES = ("smollm2", "byte-fallback")
_KNOWN_TEXTS = st.text("ab \n▁é€你😀\u0301\u200d\ufffd", max_size=30)
_TEXTS = _KNOWN_TEXTS | st.text(max_size=20)


@cache
def _tokenizer(name: str) -> Tokenizer:
    if name == "smollm2":
        return load_tokenizer(find_model("smollm2"))
    return Tokenizer(TokenizerParts(backend=sentencepiece_tokenizer(), bos_id=1, eos_ids=(2,), chat_template=None))


def _chunks(draw: st.DrawFn, ids: Sequence[int]) -> list[Sequence[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=len(ids))))
    bounds = [0, *cuts, len(ids)]
    return [ids[start:end] for start, end in pairwise(bounds)]


def _truncated(text: str, stops: tuple[str, ...], include_stop: bool) -> str:
    found = [(start, len(stop)) for stop in stops if (start := text.find(stop)) >= 0]
    if not found:
        return text
    start, length = min(found)
    return text[: start + length] if include_stop else text[:start]


def _check(tokenizer: Tokenizer, chunks: list[Sequence[int]], stops: tuple[str, ...], include_stop: bool) -> None:
    """All promises about one stream."""
    whole = tokenizer.decode([token_id for chunk in chunks for token_id in chunk])
    expected = _truncated(whole, stops, include_stop)
    detokenizer = Detokenizer(tokenizer, stops, include_stop)
    shown = ""
    for chunk in chunks:
        shown += detokenizer.push(chunk)
        assert expected.startswith(shown)
    assert shown + detokenizer.finish() == expected
    assert detokenizer.stopped == any(stop in whole for stop in stops)


@st.composite
def _random_ids(draw: st.DrawFn, name: str) -> list[Sequence[int]]:
    """Ids of any kind: most byte sequences are no text."""
    return _chunks(draw, draw(st.lists(st.integers(0, _tokenizer(name).vocab_size + 1), max_size=30)))


@st.composite
def _text_ids(draw: st.DrawFn, name: str) -> list[Sequence[int]]:
    return _chunks(draw, _tokenizer(name).encode(draw(_TEXTS)))


@pytest.mark.parametrize("name", _NAMES)
@given(data=st.data())
def test_stream_of_random_ids_joins_to_the_whole(name: str, data: st.DataObject) -> None:
    chunks = data.draw(_random_ids(name))
    whole = _tokenizer(name).decode([token_id for chunk in chunks for token_id in chunk])
    parts = st.integers(0, len(whole)).map(lambda start: whole[start : start + 3])
    stops = data.draw(st.lists((parts | _TEXTS).filter(bool), max_size=3))
    _check(_tokenizer(name), chunks, tuple(stops), data.draw(st.booleans()))


@pytest.mark.parametrize("name", _NAMES)
@given(data=st.data())
def test_stream_of_text_joins_to_the_whole(name: str, data: st.DataObject) -> None:
    chunks = data.draw(_text_ids(name))
    stops = data.draw(st.lists(st.text("ab é你😀", min_size=1, max_size=5), max_size=4))
    _check(_tokenizer(name), chunks, tuple(stops), data.draw(st.booleans()))


@pytest.mark.parametrize("name", _NAMES)
@given(
    text=st.text("ab", max_size=24),
    stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4),
    include_stop=st.booleans(),
)
def test_stream_with_overlapping_stops_joins_to_the_whole(
    name: str, text: str, stops: list[str], include_stop: bool
) -> None:
    tokenizer = _tokenizer(name)
    letters = [tokenizer.encode(letter, add_special=False) for letter in text]
    _check(tokenizer, letters, tuple(stops), include_stop)


@pytest.mark.parametrize("name", _NAMES)
@given(text=_KNOWN_TEXTS)
def test_stream_of_text_shows_only_characters_of_the_text(name: str, text: str) -> None:
    tokenizer = _tokenizer(name)
    detokenizer = Detokenizer(tokenizer)
    shown = "".join(detokenizer.push([token_id]) for token_id in tokenizer.encode(text))
    assert shown == tokenizer.decode(tokenizer.encode(text))
    assert shown.count("\ufffd") == text.count("\ufffd")
    assert detokenizer.finish() == ""

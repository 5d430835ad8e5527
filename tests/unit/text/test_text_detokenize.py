import time

import pytest

from ambidex.text.detokenize import Detokenizer
from ambidex.text.parts import TokenizerParts
from ambidex.text.tokenizer import Tokenizer
from tiny_tokenizers import gpt2_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TokenizerParts(backend=gpt2_tokenizer(), bos_id=None, eos_ids=(), chat_template=None))


def _push_letters(detokenizer: Detokenizer, tokenizer: Tokenizer, text: str) -> list[str]:
    """What each letter shows, encoded alone."""
    return [detokenizer.push(tokenizer.encode(letter)) for letter in text]


def test_push_without_stop_shows_at_once(tokenizer: Tokenizer) -> None:
    assert _push_letters(Detokenizer(tokenizer), tokenizer, "ab\n") == ["a", "b", "\n"]


def test_push_part_of_a_character_shows_nothing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("\U0010ffff")
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([token_id]) for token_id in ids] == ["", "", "", "\U0010ffff"]


def test_finish_inside_a_character_shows_the_replacement(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("\U0010ffff")[:2]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_push_special_token_shows_nothing(tokenizer: Tokenizer) -> None:
    assert Detokenizer(tokenizer).push(tokenizer.encode("a<|im_end|>b")) == "ab"


def test_push_beginning_of_stop_is_held_until_it_fails(tokenizer: Tokenizer) -> None:
    assert _push_letters(Detokenizer(tokenizer, ("abc",)), tokenizer, "xabd") == ["x", "", "", "abd"]


@pytest.mark.parametrize(("include_stop", "last"), [(False, ""), (True, "abc")])
def test_push_stop_ends_the_text(include_stop: bool, last: str, tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ("abc",), include_stop)
    assert _push_letters(detokenizer, tokenizer, "xabc") == ["x", "", "", last]
    assert detokenizer.stopped
    assert (detokenizer.push(tokenizer.encode("more")), detokenizer.finish()) == ("", "")


def test_push_stop_that_overlaps_itself_is_found(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ("aab",))
    assert _push_letters(detokenizer, tokenizer, "aaab") == ["", "", "a", ""]
    assert detokenizer.stopped


def test_push_stop_inside_a_token_cuts_the_token(tokenizer: Tokenizer) -> None:
    (the,) = [token_id for token_id in range(900) if tokenizer.token_text(token_id) == " the"]
    assert Detokenizer(tokenizer, ("h",)).push([the]) == " t"


def test_push_shorter_stop_inside_a_longer_waits_for_the_first(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ("b", "abc"))
    assert _push_letters(detokenizer, tokenizer, "xab") == ["x", "", ""]
    assert not detokenizer.stopped
    assert detokenizer.push(tokenizer.encode("d")) == "a"
    assert detokenizer.stopped


def test_finish_shows_a_held_beginning_of_stop(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ("abc",))
    assert _push_letters(detokenizer, tokenizer, "ab") == ["", ""]
    assert (detokenizer.finish(), detokenizer.stopped) == ("ab", False)


def test_finish_settles_a_waiting_stop(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer, ("b", "abc"))
    assert _push_letters(detokenizer, tokenizer, "ab") == ["", ""]
    assert (detokenizer.finish(), detokenizer.stopped) == ("a", True)


@pytest.mark.parametrize("text", ["some words ", "\U0010ffff"])
def test_push_of_many_tokens_takes_linear_time(text: str, tokenizer: Tokenizer) -> None:
    ids = (tokenizer.encode(text) * 5_000)[:-1]
    detokenizer = Detokenizer(tokenizer, ("\n\n\n", "words some none"))
    started = time.process_time()
    shown = [detokenizer.push([token_id]) for token_id in ids]
    # About 0.2 s for 20,000 tokens; decoding anew from the start at each push would take minutes.
    assert time.process_time() - started < 20
    assert "".join(shown) + detokenizer.finish() == tokenizer.decode(ids)

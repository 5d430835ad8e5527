import itertools
import random
from array import array
from collections.abc import Mapping

import numpy as np
import pytest

from ambidex.core.errors import ModelFileError, UnsupportedModelError
from ambidex.text.gguf_tokenizer import read_gguf_tokenizer
from ambidex.text.tokenizer import Tokenizer
from tiny_tokenizers import (
    BYTE_LEVEL,
    HARD_TEXTS,
    gguf_metadata,
    gpt2_tokenizer,
    sentencepiece_gguf_metadata,
    sentencepiece_tokenizer,
)


def _tokenizer(metadata: Mapping[str, object], **changes: object) -> Tokenizer:
    changed = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return Tokenizer(read_gguf_tokenizer({**metadata, **changed}, name="tiny.gguf"))


@pytest.fixture(scope="module")
def gpt2() -> dict[str, object]:
    return gguf_metadata(gpt2_tokenizer(), "gpt-2")


@pytest.fixture(scope="module")
def llama() -> dict[str, object]:
    return sentencepiece_gguf_metadata()


def _sentencepiece_ids(metadata: Mapping[str, object], text: str) -> list[int]:
    """SentencePiece's algorithm as it is defined: join the neighbours of the highest score, the leftmost first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    score_of = {token: scores[token_id] for token, token_id in ids.items() if token_id >= 3 + 256}
    symbols = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        pairs = [left + right for left, right in itertools.pairwise(symbols)]
        best = max((pair for pair in pairs if pair in score_of), key=score_of.__getitem__, default=None)
        if best is None:
            break
        idx = pairs.index(best)
        symbols[idx : idx + 2] = [best]
    pieces = [[ids[s]] if s in score_of else [ids[f"<0x{byte:02X}>"] for byte in s.encode()] for s in symbols]
    return [token_id for piece in pieces for token_id in piece]


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_read_byte_level_encodes_as_the_original(pre: str) -> None:
    original = BYTE_LEVEL[pre]()
    tokenizer = _tokenizer(gguf_metadata(original, pre))
    for text in HARD_TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids, repr(text)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("default", ["it", "'", "s", " ", "123", "456", "..", " Ab", "²"]),
        ("refact", ["it", "'s", " ", "1", "2", "3", "4", "5", "6", "..", " Ab", "²"]),
        ("tekken", ["it", "'s", " ", "1", "2", "3", "4", "5", "6", "..", " Ab", "²"]),
        ("llama3", ["it", "'s", " ", "123", "456", "..", " Ab", "²"]),
    ],
)
def test_read_pre_cuts_words(pre: str, words: list[str], gpt2: dict[str, object]) -> None:
    backend = read_gguf_tokenizer({**gpt2, "tokenizer.ggml.pre": pre}, name="tiny.gguf").backend
    text = "it's 123456.. Ab²"
    assert [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)] == words


def test_read_sentencepiece_encodes_as_the_original(llama: dict[str, object]) -> None:
    original = sentencepiece_tokenizer(is_legacy=True)
    tokenizer = _tokenizer(llama)
    for text in HARD_TEXTS:
        assert tokenizer.encode(text) == original.encode(text).ids, repr(text)


def test_read_sentencepiece_encodes_as_the_algorithm(llama: dict[str, object], real_text: str) -> None:
    tokenizer = _tokenizer(llama)
    rng = random.Random(0)
    starts = [rng.randrange(len(real_text) - 200) for _ in range(50)]
    texts = [real_text[start : start + rng.randrange(1, 120)] for start in starts]
    texts += ["".join(rng.choices(" aàehil你", k=40)) for _ in range(50)]
    for text in texts:
        assert tokenizer.encode(text, add_special=False) == _sentencepiece_ids(llama, text), repr(text)


def test_read_sentencepiece_with_runs_of_letters_encodes_as_the_algorithm(llama: dict[str, object]) -> None:
    pieces = ["▁", "a", "b", "aa", "ab", "▁a", "aaa", "aab", "baa", "abab", "aaaa", "▁aab"]
    scores = [0.0] * 259 + [-9.0, -9.1, -9.2, *(-float(idx) for idx in range(9))]
    metadata = {
        **llama,
        "tokenizer.ggml.tokens": [*llama["tokenizer.ggml.tokens"][:259], *pieces],
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
    }
    tokenizer = _tokenizer(metadata)
    rng = random.Random(0)
    for _ in range(300):
        text = "".join(rng.choices("ab ", weights=[5, 2, 1], k=rng.randrange(20)))
        assert tokenizer.encode(text, add_special=False) == _sentencepiece_ids(metadata, text), repr(text)


@pytest.mark.parametrize(("add_space_prefix", "decoded"), [(True, "hello"), (False, " hello")])
def test_read_sentencepiece_honours_space_prefix(
    add_space_prefix: bool, decoded: str, llama: dict[str, object]
) -> None:
    tokenizer = _tokenizer(llama, add_space_prefix=add_space_prefix)
    with_prefix = _tokenizer(llama).encode("hello", add_special=False)
    assert (tokenizer.encode("hello", add_special=False) == with_prefix) is add_space_prefix
    assert tokenizer.decode(with_prefix) == decoded


@pytest.mark.parametrize(
    ("changes", "frame"),
    [
        ({}, ([1], [])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_bos_token": True, "add_eos_token": True}, ([1], [2])),
        ({"bos_token_id": None}, ([], [])),
    ],
)
def test_read_frame_follows_keys(
    changes: dict[str, object], frame: tuple[list[int], list[int]], llama: dict[str, object]
) -> None:
    tokenizer = _tokenizer(llama, **changes)
    bare = tokenizer.encode("hello", add_special=False)
    assert tokenizer.encode("hello") == [*frame[0], *bare, *frame[1]]


def test_read_bos_with_signs_in_its_name_is_added(gpt2: dict[str, object]) -> None:
    tokens = ["<|endoftext|>", "$A:1 b:", *gpt2["tokenizer.ggml.tokens"][2:]]
    assert _tokenizer(gpt2, tokens=tokens, bos_token_id=1, add_bos_token=True).encode("") == [1]


def test_read_byte_level_adds_no_bos_unless_told(gpt2: dict[str, object]) -> None:
    assert _tokenizer(gpt2).encode("") == []
    assert _tokenizer(gpt2, add_bos_token=True).encode("") == [3]


def test_read_eos_ids_named_first_then_known_turn_ends(gpt2: dict[str, object]) -> None:
    tokenizer = _tokenizer(gpt2, eos_token_id=2, eot_token_id=3)
    assert tokenizer.eos_ids == (2, 3, 4, 0)
    assert tokenizer.eos_token == "<|im_end|>"


def test_read_user_defined_token_is_found_and_shown(gpt2: dict[str, object]) -> None:
    types = list(gpt2["tokenizer.ggml.token_type"])
    types[1] = 4
    tokenizer = _tokenizer(gpt2, token_type=types)
    ids = tokenizer.encode("a<|im_start|>b<|im_end|>")
    assert 1 in ids
    assert tokenizer.decode(ids) == "a<|im_start|>b"


def test_read_named_token_of_normal_type_is_special(gpt2: dict[str, object]) -> None:
    tokenizer = _tokenizer(gpt2, token_type=None, eos_token_id=2)
    assert tokenizer.special_ids == {2, 3}


def test_read_arrays_of_numpy_and_array_are_accepted(llama: dict[str, object]) -> None:
    scores = np.array(llama["tokenizer.ggml.scores"], dtype=np.float32)
    types = array("i", llama["tokenizer.ggml.token_type"])
    tokenizer = _tokenizer(llama, scores=scores, token_type=types)
    assert tokenizer.encode("hello world") == _tokenizer(llama).encode("hello world")


def test_read_chat_template_is_kept(gpt2: dict[str, object]) -> None:
    assert _tokenizer({**gpt2, "tokenizer.chat_template": "{{ 1 }}"}).chat_template == "{{ 1 }}"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gpt2", {"model": None}, "there is no tokenizer.ggml.model"),
        ("gpt2", {"model": 3}, "model is int, not str"),
        ("gpt2", {"tokens": None}, "tokens is missing or empty"),
        ("gpt2", {"tokens": []}, "tokens is missing or empty"),
        ("gpt2", {"tokens": "abc"}, "tokens is str, not an array"),
        ("gpt2", {"tokens": ["a", 1]}, "tokens holds int, not str"),
        ("gpt2", {"tokens": ["a", "a"]}, "tokens holds 'a' twice"),
        ("gpt2", {"merges": None}, "merges is missing or empty"),
        ("gpt2", {"merges": ["! no-token"]}, "'no-token' is no token"),
        ("gpt2", {"merges": ["!!"]}, "merges holds '!!', but '!!' is no token"),
        ("gpt2", {"merges": ['! "']}, "but '!\"' is no token"),
        ("gpt2", {"token_type": [1]}, "token_type has 1 entries for 900 tokens"),
        ("gpt2", {"token_type": [9] * 900}, "9 is not a valid"),
        ("gpt2", {"eos_token_id": 900}, "eos_token_id is 900, but there is no such token among 900"),
        ("gpt2", {"bos_token_id": -1}, "bos_token_id is -1, but there is no such token"),
        ("gpt2", {"bos_token_id": "1"}, "bos_token_id is str, not int"),
        ("gpt2", {"bos_token_id": True}, "bos_token_id is bool, not int"),
        ("gpt2", {"add_bos_token": 1}, "add_bos_token is int, not bool"),
        ("gpt2", {"add_bos_token": True, "bos_token_id": None}, "add_bos_token is true, but no bos token is named"),
        ("llama", {"scores": None}, "scores is missing or empty"),
        ("llama", {"scores": [1.0]}, "scores has 1 entries"),
        ("llama", {"scores": [float("nan")] * 10}, "scores has 10 entries"),
        ("llama", {"unknown_token_id": 10**6}, "unknown_token_id is 1000000"),
    ],
)
def test_read_malformed_metadata_is_refused(
    family: str, changes: dict[str, object], message: str, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(ModelFileError, match=r"^tiny\.gguf: ") as caught:
        _tokenizer(request.getfixturevalue(family), **changes)
    assert message in str(caught.value)


def test_read_score_that_is_no_number_is_refused(llama: dict[str, object]) -> None:
    scores = [*llama["tokenizer.ggml.scores"][:-1], float("nan")]
    with pytest.raises(ModelFileError, match="scores holds NaN"):
        _tokenizer(llama, scores=scores)


def test_read_very_long_piece_is_refused(llama: dict[str, object]) -> None:
    tokens = [*llama["tokenizer.ggml.tokens"][:-1], "x" * 257]
    with pytest.raises(ModelFileError, match="holds 257 characters in a token, above 256"):
        _tokenizer(llama, tokens=tokens)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert': known are gpt2 and llama"),
        ({"pre": "poro-chat"}, "tokenizer.ggml.pre is 'poro-chat': known are default, gpt-2"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
    ],
)
def test_read_unknown_kind_is_refused_by_name(
    changes: dict[str, object], message: str, gpt2: dict[str, object]
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        _tokenizer(gpt2, **changes)


def test_read_whitespace_removal_is_refused(llama: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModelError, match="remove_extra_whitespaces is true"):
        _tokenizer(llama, remove_extra_whitespaces=True)

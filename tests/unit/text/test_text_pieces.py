import random

import pytest
from tokenizers import Regex, Tokenizer, decoders, models

from ambidex.core.errors import UnsupportedModelError
from ambidex.text.pieces import Pieces, TextStream
from tiny_tokenizers import HARD_TEXTS, gpt2_tokenizer, sentencepiece_tokenizer


def _decode(backend: Tokenizer, ids: list[int]) -> str:
    stream = TextStream(Pieces(backend), frozenset())
    return stream.push(ids) + stream.finish()


def _backend(decoder: decoders.Decoder | None, *tokens: str) -> Tokenizer:
    backend = Tokenizer(models.BPE({token: token_id for token_id, token in enumerate(tokens)}, []))
    if decoder is not None:
        backend.decoder = decoder
    return backend


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.Fuse(),
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 3, 0)]),
        decoders.Sequence([decoders.Sequence([decoders.ByteLevel()])]),
    ],
)
@pytest.mark.parametrize("ids", [[0, 1], [1, 1, 2], [2, 2, 0, 3], [3, 1, 3], [], [1], [4, 0, 1]])
def test_decode_equals_the_library(decoder: decoders.Decoder | None, ids: list[int]) -> None:
    backend = _backend(decoder, "▁a", "▁", "▁▁b▁c", "<0x41>", "é d")
    assert _decode(backend, ids) == backend.decode(ids, skip_special_tokens=False)


def test_decode_byte_level_of_random_tokens_equals_the_library() -> None:
    backend = gpt2_tokenizer()
    rng = random.Random(0)
    for _ in range(300):
        ids = rng.choices(range(900), k=rng.randrange(12))
        assert _decode(backend, ids) == backend.decode(ids, skip_special_tokens=False), ids


def test_decode_byte_fallback_of_texts_equals_the_library() -> None:
    backend = sentencepiece_tokenizer()
    for text in HARD_TEXTS:
        ids = backend.encode(text).ids
        assert _decode(backend, ids) == backend.decode(ids, skip_special_tokens=False), repr(text)


def test_decode_byte_fallback_keeps_whole_characters_beside_broken_ones() -> None:
    backend = _backend(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), "<0xC3>", "<0xA9>", "x")
    assert _decode(backend, [0, 1, 1, 2, 0]) == "é\ufffdx\ufffd"


def test_push_never_ends_inside_a_character() -> None:
    backend = _backend(decoders.ByteFallback(), "<0xC3>", "<0xA9>", "x")
    stream = TextStream(Pieces(backend), frozenset())
    assert [stream.push([token_id]) for token_id in (2, 0, 1)] == ["x", "", "é"]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Strip(" ", 1, 0),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
        decoders.Replace(Regex("a+"), "b"),
        decoders.Sequence([decoders.Replace("a", "b"), decoders.ByteLevel()]),
    ],
)
def test_decoder_of_unknown_kind_is_refused(decoder: decoders.Decoder) -> None:
    with pytest.raises(UnsupportedModelError, match="the tokenizer's decoder has the step"):
        Pieces(_backend(decoder, "a"))

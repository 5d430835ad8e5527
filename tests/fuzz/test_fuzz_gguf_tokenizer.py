"""Damaged tokenizer metadata: a tokenizer that works, or one of our own errors."""

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from ambidex.core.errors import ModelError
from ambidex.text.gguf_tokenizer import read_gguf_tokenizer
from ambidex.text.tokenizer import Tokenizer
from tiny_tokenizers import gguf_metadata, llama3_tokenizer, sentencepiece_gguf_metadata

_JUNK = st.sampled_from(
    [None, 0, 1, -1, 2**40, True, 1.5, float("nan"), "", " ", "x", "a b", "▁", "$A:0", "<0x00>", "\0", b"x", (), ("a",)]
)


@cache
def _intact(family: str) -> dict[str, object]:
    return gguf_metadata(llama3_tokenizer(), "llama-bpe") if family == "gpt2" else sentencepiece_gguf_metadata()


@st.composite
def _damaged(draw: st.DrawFn) -> dict[str, object]:
    metadata = dict(_intact(draw(st.sampled_from(["gpt2", "llama"]))))
    for key in draw(st.lists(st.sampled_from(sorted(metadata)), min_size=1, max_size=3)):
        value = metadata[key]
        if isinstance(value, list) and value and draw(st.booleans()):
            place = draw(st.integers(0, len(value) - 1))
            new = draw(st.lists(st.one_of(_JUNK, st.sampled_from(value)), max_size=2))
            metadata[key] = [*value[:place], *new, *value[place + 1 :]]
        else:
            metadata[key] = draw(_JUNK)
    return metadata


@given(_damaged())
def test_read_of_damaged_metadata_works_or_is_refused(metadata: dict[str, object]) -> None:
    try:
        tokenizer = Tokenizer(read_gguf_tokenizer(metadata, name="damaged.gguf"))
    except ModelError:
        return
    ids = tokenizer.encode("Hello ▁ wörld <|im_end|> 123 😀</s>")
    assert isinstance(tokenizer.decode([*ids, *range(300)]), str)

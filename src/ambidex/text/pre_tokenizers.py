"""How text is cut into words before BPE, by the names that GGUF files give (`tokenizer.ggml.pre`).

Only cuts that are known for certain are listed; each is the one that the model's own tokenizer.json states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Sequence, Split

_GPT2_WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
"""GPT-2's words as llama.cpp spells them: what no alternative matches stays a word of its own."""

_LLAMA3_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS: Final = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_WORDS: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenization:
    """The cut, and what goes with it: NFC normalisation, whole words looked up before merging, a BOS by default."""

    cut: Callable[[], PreTokenizer]
    normalizes: bool = False
    ignores_merges: bool = False
    adds_bos: bool = False


def gpt2_words(*, add_prefix_space: bool = False) -> PreTokenizer:
    """GPT-2's words, as bytes."""
    return ByteLevel(add_prefix_space=add_prefix_space)


def _split(*patterns: str) -> PreTokenizer:
    """Cut by one pattern after the other, then spell the words as bytes."""
    cuts: list[PreTokenizer] = [Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


def _single_digits() -> PreTokenizer:
    return Sequence([Digits(individual_digits=True), gpt2_words()])


def _falcon() -> PreTokenizer:
    # The digits are looked for after the bytes are spelled out, as in falcon-7b's tokenizer.json.
    threes = Split(Regex("[0-9][0-9][0-9]"), behavior="isolated")
    return Sequence([Punctuation(behavior="contiguous"), gpt2_words(), Digits(individual_digits=False), threes])


def _unnamed() -> PreTokenizer:
    return _split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]")


_GPT2: Final = PreTokenization(cut=gpt2_words)
_SINGLE_DIGITS: Final = PreTokenization(cut=_single_digits)
_LLAMA3: Final = PreTokenization(cut=lambda: _split(_LLAMA3_WORDS), ignores_merges=True, adds_bos=True)
_QWEN2: Final = PreTokenization(cut=lambda: _split(_QWEN2_WORDS), normalizes=True)

PRE_TOKENIZATIONS: Final = {
    "default": PreTokenization(cut=_unnamed),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "tekken": PreTokenization(cut=lambda: _split(_TEKKEN_WORDS), ignores_merges=True, adds_bos=True),
    "falcon": PreTokenization(cut=_falcon),
}

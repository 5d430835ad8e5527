"""Tiny tokenizers of the known families, trained in a second, and texts that are hard to tokenize."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HARD_TEXTS = (
    "",
    " ",
    "Hello, world! It's what they've said, isn't it?",
    "  two spaces, then\n\n\n\ttabs \r\n and trailing   ",
    "\n",
    "def f(x):\n    return {'a': x[0] ** 2, \"b\": -1.5e-3}  # comment\n",
    "12345678 3.14159 1,000,000 ² ½ ٣٤٥ Ⅷ",
    "naïve café Ünïcödé ﬁ",
    "e\u0301 o\u0308 a\u030a\u0323 (combining) \u200d\u200b\ufeff",
    "😀👩‍👩‍👧‍👦🏳️‍🌈 🇩🇪",
    "你好，世界。こんにちは 안녕하세요 สวัสดี",
    "мир und Ελλάδα, שלום مرحبا",
    "\u00a0nbsp\u2003em\u3000ideographic",
    "▁already ▁▁ marked",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>tail</s> <s>x<unk> <|eot_id|>",
    "\ufffd \x00\x01\x7f",
    "𝕬𝖇𝖈 \U0010ffff",
)

_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>")
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _corpus() -> list[str]:
    words = "hello world it's they've don't 'Tis 1234 56789 你好世界 こんにちは мир café 😀😀 \n\n    return x\n"
    return [*(topics[name] for name in ("assignment", "lambda", "numbers", "strings")), words * 20]


def _byte_level(*cuts: pre_tokenizers.PreTokenizer, use_regex: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    mapping = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, mapping])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(_SPECIALS),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's words."""
    return _byte_level(use_regex=True)


def smollm_tokenizer() -> Tokenizer:
    """GPT-2's words, every digit alone."""
    return _byte_level(pre_tokenizers.Digits(individual_digits=True), use_regex=True)


def llama3_tokenizer() -> Tokenizer:
    """Llama 3's words, whole words before merges, a BOS before every text."""
    tokenizer = _byte_level(pre_tokenizers.Split(Regex(_LLAMA3), behavior="isolated"), use_regex=False)
    tokenizer.model.ignore_merges = True
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def qwen2_tokenizer() -> Tokenizer:
    """Qwen 2's words, after NFC."""
    tokenizer = _byte_level(pre_tokenizers.Split(Regex(_QWEN2), behavior="isolated"), use_regex=False)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def falcon_tokenizer() -> Tokenizer:
    """Falcon's words: punctuation alone, digits in threes."""
    tokenizer = _byte_level(pre_tokenizers.Punctuation(behavior="contiguous"), use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation(behavior="contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
        ]
    )
    return tokenizer


def sentencepiece_tokenizer(*, is_legacy: bool = False) -> Tokenizer:
    """Llama 2's and Mistral's form: `▁` for spaces, bytes for unknown characters, a BOS before every text.

    `is_legacy`: the prefix space comes from a normalizer, before every stretch of text between special tokens.
    """
    merges, pieces = _sentencepiece_merges()
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if is_legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@functools.cache
def _sentencepiece_merges() -> tuple[list[tuple[str, str]], list[str]]:
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(vocab_size=700, limit_alphabet=90, show_progress=False)
    trained.train_from_iterator(_corpus(), trainer)
    merges = [(left, right) for left, right in json.loads(trained.to_str())["model"]["merges"]]
    alphabet = [token for token, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1]) if len(token) == 1]
    return merges, [left + right for left, right in merges] + alphabet


BYTE_LEVEL: Mapping[str, Callable[[], Tokenizer]] = {
    "gpt-2": gpt2_tokenizer,
    "smollm": smollm_tokenizer,
    "llama-bpe": llama3_tokenizer,
    "qwen2": qwen2_tokenizer,
    "falcon": falcon_tokenizer,
}
"""By the name that GGUF files give to the family."""


def save_folder(path: Path, tokenizer: Tokenizer, *, model_type: str = "llama", **settings: object) -> Path:
    """A model folder without weights: tokenizer.json, tokenizer_config.json, config.json."""
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


def gguf_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, object]:
    """Keys of a GGUF file that describe a byte-level tokenizer; the first token is the end of text."""
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in _SPECIALS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": tokens.index("<|begin_of_text|>"),
        "tokenizer.ggml.eos_token_id": 0,
    }


def sentencepiece_gguf_metadata() -> dict[str, object]:
    """Keys of a GGUF file that describe the tokenizer of `sentencepiece_tokenizer(is_legacy=True)`."""
    vocab = sentencepiece_tokenizer(is_legacy=True).get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    num_bytes = 256
    num_others = len(tokens) - 3 - num_bytes
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * (3 + num_bytes) + [-float(rank) for rank in range(num_others)],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * num_bytes + [1] * num_others,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }

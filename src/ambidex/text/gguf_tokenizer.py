"""The tokenizer inside a GGUF file: keys `tokenizer.ggml.*` and `tokenizer.chat_template`.

Two models are known: `gpt2`, byte-level BPE with merges, and `llama`, SentencePiece's BPE, whose merges follow from the
scores of its pieces. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section "GGML".
"""

import itertools
import math
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Final, TypeVar

from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from ambidex.core.errors import ModelFileError, UnsupportedModelError
from ambidex.text.parts import TokenizerParts, add_frame
from ambidex.text.pre_tokenizers import PRE_TOKENIZATIONS, PreTokenization

_T = TypeVar("_T")

_TURN_ENDS: Final = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>")
"""Special tokens that end an answer even where no key of the file names them: those of the known chat formats."""
_MAX_PIECE_LEN: Final = 256
"""Characters of a SentencePiece piece, whose every cut is looked at; the longest in known models has 48."""


class _TokenType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_gguf_tokenizer(metadata: Mapping[str, object], *, name: str) -> TokenizerParts:
    """Build the tokenizer that a GGUF file describes.

    Args:
        metadata: all keys of the file; arrays are lists, `array`s or numpy arrays.
        name: the file, for errors.

    Raises:
        ModelFileError: a key is missing, has the wrong type, or names a token that is not there.
        UnsupportedModelError: `tokenizer.ggml.model` or `tokenizer.ggml.pre` is not known.
    """
    keys = _Keys(metadata, name)
    match model := keys.find_text("tokenizer.ggml.model"):
        case "gpt2":
            pre = _find_pre(keys)
            vocab = _Vocab(keys)
            backend, adds_bos = _byte_level_backend(keys, vocab, pre), pre.adds_bos
        case "llama":
            vocab = _Vocab(keys)
            backend, adds_bos = _sentencepiece_backend(keys, vocab), True
        case None:
            raise keys.error("there is no tokenizer.ggml.model")
        case _:
            raise UnsupportedModelError(f"{name}: tokenizer.ggml.model is {model!r:.60}: known are gpt2 and llama")
    named = [vocab.find_named(role) for role in ("bos", "eos", "eot", "eom")]
    special = [*vocab.of_type(_TokenType.CONTROL, _TokenType.UNKNOWN), *(token for token in named if token)]
    _add_tokens(backend, vocab, special)
    add_frame(
        backend,
        bos=_framing_token(keys, vocab, "bos", by_default=adds_bos),
        eos=_framing_token(keys, vocab, "eos", by_default=False),
    )
    bos, *ends = named
    ends += [end for end in _TURN_ENDS if end in special]
    return TokenizerParts(
        backend=backend,
        bos_id=None if bos is None else vocab.ids[bos],
        eos_ids=tuple(dict.fromkeys(vocab.ids[end] for end in ends if end is not None)),
        chat_template=keys.find_text("tokenizer.chat_template"),
    )


class _Keys:
    """Typed look-ups in the metadata; `name` is the file, for errors."""

    def __init__(self, metadata: Mapping[str, object], name: str) -> None:
        self._metadata = metadata
        self.name = name

    def error(self, fault: str) -> ModelFileError:
        return ModelFileError(f"{self.name}: {fault}: the file is damaged or was converted wrongly")

    def find_text(self, key: str) -> str | None:
        return self._find(key, str)

    def find_number(self, key: str) -> int | None:
        return self._find(key, int)

    def find_flag(self, key: str, default: bool) -> bool:
        value = self._find(key, bool)
        return default if value is None else value

    def find_list(self, key: str, kind: type[_T]) -> list[_T] | None:
        value = self._metadata.get(key)
        if value is None:
            return None
        if isinstance(value, str) or not isinstance(value, Iterable):
            raise self.error(f"{key} is {type(value).__name__}, not an array")
        items = list(value)
        if hasattr(value, "tolist"):  # numbers of numpy or `array` as Python's own
            items = value.tolist()
        for item in items:
            if type(item) is not kind:
                raise self.error(f"{key} holds {type(item).__name__}, not {kind.__name__}")
        return items

    def get_list(self, key: str, kind: type[_T]) -> list[_T]:
        if not (items := self.find_list(key, kind)):
            raise self.error(f"{key} is missing or empty")
        return items

    def _find(self, key: str, kind: type[_T]) -> _T | None:
        value = self._metadata.get(key)
        if value is None or type(value) is kind:
            return value
        raise self.error(f"{key} is {type(value).__name__}, not {kind.__name__}")


class _Vocab:
    """Tokens in the order of their ids, and their types; a token without a text keeps its id but is never encoded."""

    def __init__(self, keys: _Keys) -> None:
        self._keys = keys
        self.tokens = keys.get_list("tokenizer.ggml.tokens", str)
        self.ids = {token: token_id for token_id, token in enumerate(self.tokens) if token}
        for token_id, token in enumerate(self.tokens):
            if token and self.ids[token] != token_id:
                raise keys.error(f"tokenizer.ggml.tokens holds {token!r:.60} twice")
        self._types = self._read_types()

    def of_type(self, *types: _TokenType) -> list[str]:
        return [token for token, kind in zip(self.tokens, self._types, strict=True) if token and kind in types]

    def find_named(self, role: str) -> str | None:
        """The token that `tokenizer.ggml.<role>_token_id` names."""
        key = f"tokenizer.ggml.{role}_token_id"
        token_id = self._keys.find_number(key)
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens) or not self.tokens[token_id]:
            raise self._keys.error(f"{key} is {token_id}, but there is no such token among {len(self.tokens)}")
        return self.tokens[token_id]

    def _read_types(self) -> list[_TokenType]:
        types = self._keys.find_list("tokenizer.ggml.token_type", int)
        if types is None:
            return [_TokenType.NORMAL] * len(self.tokens)
        if len(types) != len(self.tokens):
            raise self._keys.error(f"tokenizer.ggml.token_type has {len(types)} entries for {len(self.tokens)} tokens")
        try:
            return [_TokenType(number) for number in types]
        except ValueError as error:
            raise self._keys.error(f"tokenizer.ggml.token_type: {error}") from error


def _find_pre(keys: _Keys) -> PreTokenization:
    pre = keys.find_text("tokenizer.ggml.pre")
    if pre is None or pre not in PRE_TOKENIZATIONS:
        raise UnsupportedModelError(
            f"{keys.name}: tokenizer.ggml.pre is {pre!r:.60}: known are {', '.join(PRE_TOKENIZATIONS)}; "
            "use a newer conversion of the model, or its folder with tokenizer.json"
        )
    return PRE_TOKENIZATIONS[pre]


def _byte_level_backend(keys: _Keys, vocab: _Vocab, pre: PreTokenization) -> Backend:
    merges = [_read_merge(keys, vocab, merge) for merge in keys.get_list("tokenizer.ggml.merges", str)]
    backend = Backend(models.BPE(vocab.ids, merges, ignore_merges=pre.ignores_merges))
    if pre.normalizes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.cut()
    backend.decoder = decoders.ByteLevel()
    return backend


def _read_merge(keys: _Keys, vocab: _Vocab, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    for token in (left, right, left + right):
        if token not in vocab.ids:
            raise keys.error(f"tokenizer.ggml.merges holds {merge!r:.60}, but {token!r:.60} is no token")
    return left, right


def _sentencepiece_backend(keys: _Keys, vocab: _Vocab) -> Backend:
    if keys.find_flag("tokenizer.ggml.remove_extra_whitespaces", False):
        raise UnsupportedModelError(
            f"{keys.name}: tokenizer.ggml.remove_extra_whitespaces is true: only false is known"
        )
    prefixes = keys.find_flag("tokenizer.ggml.add_space_prefix", True)
    backend = Backend(
        models.BPE(
            vocab.ids,
            _merges_from_scores(keys, vocab),
            unk_token=vocab.find_named("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    # The prefix stands before every stretch of text between special tokens.
    prefix = [normalizers.Prepend("▁")] if prefixes else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefixes else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _merges_from_scores(keys: _Keys, vocab: _Vocab) -> list[tuple[str, str]]:
    """Merges that do what SentencePiece does: of all neighbours that form a piece, join those of the highest score.

    A piece that can be formed in several ways has several merges, all of them before those of lower score. Tested
    against the algorithm itself in tests/unit/text and once against sentencepiece 0.2: the same ids.
    """
    scores = keys.get_list("tokenizer.ggml.scores", float)
    if len(scores) != len(vocab.tokens):
        raise keys.error(f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocab.tokens)} tokens")
    if any(map(math.isnan, scores)):
        raise keys.error("tokenizer.ggml.scores holds NaN")
    pieces = set(vocab.of_type(_TokenType.NORMAL, _TokenType.UNUSED))
    longest = max(pieces, key=len, default="")
    if len(longest) > _MAX_PIECE_LEN:
        raise keys.error(f"tokenizer.ggml.tokens holds {len(longest)} characters in a token, above {_MAX_PIECE_LEN}")
    by_score = sorted(pieces, key=lambda piece: (-scores[vocab.ids[piece]], vocab.ids[piece]))
    return list(itertools.chain.from_iterable(_cuts(piece, pieces) for piece in by_score))


def _cuts(piece: str, pieces: set[str]) -> list[tuple[str, str]]:
    """Ways to form a piece of two others, the longest left part first."""
    cuts = [(piece[:length], piece[length:]) for length in range(len(piece) - 1, 0, -1)]
    return [(left, right) for left, right in cuts if left in pieces and right in pieces]


def _add_tokens(backend: Backend, vocab: _Vocab, special: list[str]) -> None:
    """Register the tokens that are looked for in a text before anything else."""
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    user_defined = [token for token in vocab.of_type(_TokenType.USER_DEFINED) if token not in special]
    backend.add_tokens([AddedToken(token, normalized=False) for token in user_defined])


def _framing_token(keys: _Keys, vocab: _Vocab, role: str, *, by_default: bool) -> str | None:
    """The token to put before or after a text, if the file wants it."""
    key = f"tokenizer.ggml.add_{role}_token"
    if not keys.find_flag(key, by_default):
        return None
    token = vocab.find_named(role)
    if token is None and keys.find_flag(key, False):
        raise keys.error(f"{key} is true, but no {role} token is named")
    return token

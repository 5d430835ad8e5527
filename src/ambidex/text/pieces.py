"""What tokens stand for: bytes. Joined bytes become text, and a character is shown when its last byte has come.

The rules are read from the decoder that a tokenizer file states. Two families are known: byte level (GPT-2, Llama 3,
Qwen, Falcon: a token is a string of printable stand-ins for bytes) and SentencePiece (Llama 2, Mistral: `▁` for a
space, `<0xE2>` for a byte, no space before the first word). Byte sequences that are no UTF-8 become U+FFFD, one for
each maximal subpart (Unicode 16, section 3.9).
"""

import codecs
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from tokenizers import Tokenizer as Backend

from ambidex.core.errors import UnsupportedModelError

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(slots=True, kw_only=True)
class PieceRules:
    """How the string of a token becomes bytes, and what the start of a text loses.

    The first token loses every `first_token_drops`; the text loses `text_drops` at its start, at most `num_text_drops`
    times; `separator` stands between tokens.
    """

    byte_level: bool = False
    byte_fallback: bool = False
    replacements: list[tuple[str, str]] = field(default_factory=list)
    first_token_drops: str = ""
    text_drops: str = ""
    num_text_drops: int = 0
    separator: bytes = b""

    def bytes_of(self, token: str) -> bytes:
        """Bytes that a token adds to a text."""
        if self.byte_level:
            return _byte_level(token)
        for old, new in self.replacements:
            token = token.replace(old, new)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.encode()


class Pieces:
    """Bytes of each token of a vocabulary.

    Raises:
        UnsupportedModelError: the vocabulary's decoder is of another kind than byte level and SentencePiece.
    """

    def __init__(self, backend: Backend) -> None:
        self.rules = _read_rules(backend)
        self._backend = backend
        self._bytes: dict[int, bytes | None] = {}

    def find_token(self, token_id: int) -> str | None:
        """String of a token as the vocabulary spells it; None for an id outside the vocabulary."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def find_bytes(self, token_id: int) -> bytes | None:
        """Bytes that a token adds to a text; None for an id outside the vocabulary."""
        if token_id not in self._bytes:
            token = self.find_token(token_id)
            self._bytes[token_id] = None if token is None else self.rules.bytes_of(token)
        return self._bytes[token_id]


class TextStream:
    """Text of tokens that come one after the other; what it returns never ends inside a character.

    Ids that are `skipped` or outside the vocabulary add nothing.
    """

    def __init__(self, pieces: Pieces, skipped: frozenset[int]) -> None:
        self._pieces = pieces
        self._rules = pieces.rules
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = True
        self._num_drops = pieces.rules.num_text_drops

    def push(self, token_ids: Iterable[int]) -> str:
        """Text that has become whole with these tokens."""
        return self._trim(self._utf8.decode(b"".join(self._next_bytes(token_id) for token_id in token_ids)))

    def finish(self) -> str:
        """What is left when no token follows: U+FFFD if the last character is not whole, else nothing."""
        return self._trim(self._utf8.decode(b"", final=True))

    def _next_bytes(self, token_id: int) -> bytes:
        piece = None if token_id in self._skipped else self._pieces.find_bytes(token_id)
        if piece is None:
            return b""
        if not self._is_first:
            return self._rules.separator + piece
        self._is_first = False
        token = self._pieces.find_token(token_id) or ""
        return self._rules.bytes_of(token.replace(self._rules.first_token_drops, ""))

    def _trim(self, text: str) -> str:
        while self._num_drops and text:
            rest = text.removeprefix(self._rules.text_drops)
            self._num_drops = self._num_drops - 1 if rest != text else 0
            text = rest
        return text


def _read_rules(backend: Backend) -> PieceRules:
    if backend.decoder is None:
        return PieceRules(separator=b" ")
    steps = _flatten(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceRules(byte_level=True)
    rules = PieceRules()
    for idx, step in enumerate(steps):
        match step:
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                rules.replacements.append((old, new))
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                rules.replacements.append((mark, " "))
                rules.first_token_drops = "" if scheme == "never" else mark
            case {"type": "ByteFallback"}:
                rules.byte_fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": content, "start": start, "stop": 0} if "Fuse" in kinds[:idx]:
                rules.text_drops, rules.num_text_drops = content, start
            case _:
                raise UnsupportedModelError(
                    f"the tokenizer's decoder has the step {json.dumps(step, ensure_ascii=False)}: known are ByteLevel "
                    "alone, and Replace (of a string), Metaspace, ByteFallback, Fuse and Strip (at the start, fused)"
                )
    return rules


def _flatten(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flatten(part)]


def _byte_level(token: str) -> bytes:
    """Bytes behind stand-ins; a token with any other character (an added one) is plain text."""
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode()


def _stand_ins() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and up, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + idx): byte for idx, byte in enumerate(others)}


_BYTE_OF: Final = _stand_ins()

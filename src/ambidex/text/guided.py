"""Answers held to a JSON schema, a regular expression or a grammar: which tokens may come next, as a bit mask.

llguidance compiles and follows the grammar; what it does not know it refuses, and nothing is left out in silence. Its
limits on fuel, states and symbols bound the time of compiling and of each mask (measured on hostile grammars, one core
and a vocabulary of 49,152: at most 0.11 s to compile, 4 ms a mask).
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from ambidex.core.errors import RequestError
from ambidex.core.request import GuideKind, SamplingParams
from ambidex.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_CACHED: Final = 64
"""Compiled grammars that are kept."""
_MAX_SYMBOLS: Final = 100_000
_MAX_LEXER_STATES: Final = 20_000
"""Of a grammar; a state takes about 2 kB."""
_JSON_SPACE: Final = r"[\x20\x0A\x0D\x09]{1,16}"
"""White space between the parts of a JSON text: bounded, so that an answer cannot consist of nothing else."""
_MAX_REASON: Final = 400
"""Characters of the library's reason that an error shows."""
_PLAIN_REASONS: Final = {
    "NoExtensionBias": "no text fits it, or it refers to itself without an end: give what refers to itself a branch "
    "that does not"
}
"""What the library says, and what users understand."""


class Guide:
    """Follows one answer through its grammar."""

    def __init__(self, matcher: "LLMatcher", stop_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._stop_ids = stop_ids

    def accept(self, token_id: int) -> None:
        """Take in the chosen token.

        Raises:
            RequestError: the grammar does not allow it, or has become too complex to follow.
        """
        if token_id not in self._stop_ids and not self._matcher.consume_token(token_id):
            raise RequestError(f"the answer left its grammar: {_reason(self._matcher)}")

    def mask(self) -> bytes:
        """One bit for each token of the vocabulary, least significant first, in whole 32-bit words; 1: it may come.

        Raises:
            RequestError: the grammar has become too complex to follow.
        """
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise RequestError(f"the grammar cannot be followed: {_reason(self._matcher)}")
        return mask


class GuideCompiler:
    """Compiles guides for one vocabulary; any thread may call it.

    Args:
        vocab_size: of the model, which may be larger than the tokenizer's.
        eos_ids: tokens that end a text; the grammar says when they may come.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._compiled: OrderedDict[tuple[GuideKind, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def check(self, params: SamplingParams) -> None:
        """Compile the guide of the parameters, if they have one, and keep it for `open`.

        Raises:
            RequestError: it is not valid, not known in all its parts, or too large.
        """
        self.open(params)

    def open(self, params: SamplingParams) -> Guide | None:
        """The guide of one answer, at its start; None if the parameters ask for none.

        Raises:
            RequestError: as `check`.
        """
        if params.guide is None:
            return None
        if not self._eos_ids or params.ignore_eos:
            raise RequestError("a guided answer ends with an end-of-text token: there is none, or ignore_eos is set")
        with self._lock:
            matcher = self._compiled.get(params.guide) or self._compile(*params.guide)
            self._compiled[params.guide] = matcher
            self._compiled.move_to_end(params.guide)
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            return Guide(matcher.deep_copy(), self._eos_ids)

    def _compile(self, kind: GuideKind, text: str) -> "LLMatcher":
        from llguidance import (
            LLMatcher,
            LLParserLimits,
        )  # half of a second with numpy's part: only who asks for it pays

        limits = LLParserLimits(max_grammar_size=_MAX_SYMBOLS, max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        try:
            match kind:
                case GuideKind.JSON_SCHEMA:
                    grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _JSON_SPACE})
                case GuideKind.REGEX:
                    grammar = LLMatcher.grammar_from_regex(text)
                case GuideKind.GRAMMAR:
                    grammar = LLMatcher.grammar_from_lark(text)
            matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits)
        except (ValueError, UnicodeError) as error:
            raise RequestError(f"{kind} is not valid: {str(error)[:_MAX_REASON]}") from error
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that no text fits is known only now
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise RequestError(f"{kind} cannot be used: {_reason(matcher)}")
        return matcher

    @cached_property
    def _vocabulary(self) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size, min(self._eos_ids))),
            n_vocab=self._vocab_size,
            eos_token=sorted(self._eos_ids),
        )


class _Vocabulary:
    """The tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int) -> None:
        self.eos_token_id = eos_id
        self.bos_token_id = tokenizer.bos_id
        self.tokens: Sequence[bytes] = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False)


def _reason(matcher: "LLMatcher") -> str:
    text = " ".join(matcher.get_error().replace("<non-verbose/>", "").split())
    text = _PLAIN_REASONS.get(text, text)
    return text[:_MAX_REASON] or f"no text fits it ({matcher.stop_reason()})"

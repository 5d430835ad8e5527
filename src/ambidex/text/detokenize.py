"""Text of an answer while it is generated, up to the first stop string; what has been shown is never taken back."""

from collections.abc import Iterable

from ambidex.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns tokens into text that is safe to show.

    Held back are a character whose last byte has not come, and the longest end of the text that begins a stop string.
    All pushed and finished texts joined are the decoded text, special tokens skipped, up to where the first stop string
    begins (where several begin there: the shortest), with that stop string if `include_stop`.

    Cost: a push is linear in the new text and in the length of the stop strings, whatever came before.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), include_stop: bool = False) -> None:
        self._stream = tokenizer.open_text()
        self._stop = sorted(stop, key=len)
        self._include_stop = include_stop
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """A stop string has come; tokens that follow are ignored."""
        return self._stopped

    def push(self, token_ids: Iterable[int], *, may_stop: bool = True) -> str:
        """Text that these tokens make safe to show; if they may not stop the answer, no stop string begins in them."""
        if self._stopped:
            return ""
        text = self._held + self._stream.push(token_ids)
        if not may_stop:
            self._held = ""
            return text
        num_safe = self._first_beginning(text)
        match = self._find_stop(text)
        if match is not None and match[0] <= num_safe:
            return self._end(text, match)
        self._held = text[num_safe:]
        return text[:num_safe]

    def finish(self) -> str:
        """The rest, when no token follows; `stopped` is final after it."""
        if self._stopped:
            return ""
        text = self._held + self._stream.finish()
        self._held = ""
        match = self._find_stop(text)
        return text if match is None else self._end(text, match)

    def _end(self, text: str, match: tuple[int, int]) -> str:
        self._stopped = True
        self._held = ""
        return text[: match[1] if self._include_stop else match[0]]

    def _find_stop(self, text: str) -> tuple[int, int] | None:
        """Start and end of the first stop string."""
        found = [(start, start + len(stop)) for stop in self._stop if (start := text.find(stop)) >= 0]
        return min(found, default=None)

    def _first_beginning(self, text: str) -> int:
        """Where the longest end of the text starts that begins a stop string without being whole."""
        longest = 0
        for stop in self._stop:
            lengths = range(min(len(stop) - 1, len(text)), longest, -1)
            longest = next((length for length in lengths if text.endswith(stop[:length])), longest)
        return len(text) - longest

"""`TokenBudget`: how many tokens one step may still compute."""

from ambidex.core.errors import InternalError


class TokenBudget:
    """Tokens of one step."""

    def __init__(self, num_tokens: int) -> None:
        self._num_left = num_tokens

    @property
    def num_left(self) -> int:
        """Tokens that nobody has taken."""
        return self._num_left

    def offer(self, num_wanted: int) -> int:
        """As many of the wanted tokens as are left; takes none."""
        return min(num_wanted, self._num_left)

    def take(self, num_tokens: int) -> None:
        """Take tokens that were offered.

        Raises:
            InternalError: fewer are left.
        """
        if not 0 <= num_tokens <= self._num_left:
            raise InternalError(f"{num_tokens} tokens are taken from a budget that has {self._num_left}")
        self._num_left -= num_tokens

"""`MemoryLedger`: the one account of every byte on every tier. Whoever allocates asks here first."""

from collections.abc import Mapping
from dataclasses import dataclass

from ambidex.core.errors import ConfigError, InternalError, TierFullError
from ambidex.core.ids import Tier
from ambidex.core.units import format_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """Bytes that one owner holds on one tier."""

    tier: Tier
    owner: str
    num_bytes: int


class MemoryLedger:
    """Budgets per tier and who holds what; a tier without a budget has no bytes to give."""

    def __init__(self, budgets: Mapping[Tier, int]) -> None:
        for tier, budget in budgets.items():
            if budget < 0:
                raise ConfigError(f"the budget of tier {tier} is {budget} bytes: it must not be negative")
        self._budgets = dict(budgets)
        self._entries: dict[tuple[Tier, str], int] = {}

    def budget(self, tier: Tier) -> int:
        """Bytes that the tier may hold in all."""
        return self._budgets.get(tier, 0)

    def used(self, tier: Tier) -> int:
        """Bytes taken on the tier."""
        return sum(size for (owner_tier, _), size in self._entries.items() if owner_tier == tier)

    def free(self, tier: Tier) -> int:
        """Bytes left on the tier."""
        return self.budget(tier) - self.used(tier)

    def take(self, tier: Tier, owner: str, num_bytes: int) -> None:
        """Enter `num_bytes` for `owner`, on top of what it holds there.

        Raises:
            TierFullError: less is left; the message lists who holds what. Nothing changes.
        """
        if num_bytes < 0:
            raise InternalError(f"{owner} asks for {num_bytes} bytes on tier {tier}")
        if num_bytes > self.free(tier):
            held = (
                ", ".join(f"{entry.owner} {format_size(entry.num_bytes)}" for entry in self.entries(tier))
                or "nothing yet"
            )
            raise TierFullError(
                f"tier {tier}: {owner} needs {format_size(num_bytes)}, {format_size(self.free(tier))} of "
                f"{format_size(self.budget(tier))} are left (held: {held})"
            )
        self._entries[tier, owner] = self._entries.get((tier, owner), 0) + num_bytes

    def give_up(self, tier: Tier, owner: str, num_bytes: int) -> None:
        """Strike out some of what `owner` holds on the tier.

        Raises:
            InternalError: it does not hold so much.
        """
        held = self._entries.get((tier, owner), 0)
        if not 0 <= num_bytes <= held:
            raise InternalError(f"{owner} gives up {num_bytes} bytes on tier {tier}, where it holds {held}")
        self._entries[tier, owner] = held - num_bytes

    def give_back(self, tier: Tier, owner: str) -> int:
        """Strike out all that `owner` holds on the tier; returns the bytes."""
        if (tier, owner) not in self._entries:
            raise InternalError(f"{owner} gives back bytes on tier {tier} that it does not hold")
        return self._entries.pop((tier, owner))

    def entries(self, tier: Tier) -> tuple[LedgerEntry, ...]:
        """Who holds what on the tier."""
        return tuple(
            LedgerEntry(tier=entry_tier, owner=owner, num_bytes=size)
            for (entry_tier, owner), size in self._entries.items()
            if entry_tier == tier
        )

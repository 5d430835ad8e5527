import pytest

from ambidex.core.errors import ConfigError, InternalError, TierFullError
from ambidex.core.ids import Tier
from ambidex.core.ledger import LedgerEntry, MemoryLedger


def make_ledger() -> MemoryLedger:
    return MemoryLedger({Tier.GPU: 100, Tier.DRAM: 50})


def test_ledger_with_negative_budget_raises() -> None:
    with pytest.raises(ConfigError, match="gpu is -1 bytes"):
        MemoryLedger({Tier.GPU: -1})


def test_take_lowers_what_is_free_on_that_tier_only() -> None:
    ledger = make_ledger()
    ledger.take(Tier.GPU, "weights", 60)
    assert (ledger.used(Tier.GPU), ledger.free(Tier.GPU), ledger.free(Tier.DRAM)) == (60, 40, 50)


def test_take_twice_by_one_owner_adds_up() -> None:
    ledger = make_ledger()
    ledger.take(Tier.GPU, "kv", 10)
    ledger.take(Tier.GPU, "kv", 20)
    assert ledger.entries(Tier.GPU) == (LedgerEntry(tier=Tier.GPU, owner="kv", num_bytes=30),)


def test_take_of_the_last_byte_is_granted() -> None:
    ledger = make_ledger()
    ledger.take(Tier.DRAM, "kv", 50)
    assert ledger.free(Tier.DRAM) == 0


def test_take_beyond_the_budget_names_holders_and_changes_nothing() -> None:
    ledger = make_ledger()
    ledger.take(Tier.GPU, "weights", 60)
    with pytest.raises(TierFullError, match=r"kv needs 41 B, 40 B of 100 B are left \(held: weights 60 B\)"):
        ledger.take(Tier.GPU, "kv", 41)
    assert ledger.used(Tier.GPU) == 60


def test_take_on_tier_without_budget_raises() -> None:
    with pytest.raises(TierFullError, match="held: nothing yet"):
        make_ledger().take(Tier.CXL, "kv", 1)


def test_take_of_negative_bytes_raises() -> None:
    with pytest.raises(InternalError, match="-1 bytes"):
        make_ledger().take(Tier.GPU, "kv", -1)


def test_give_back_strikes_out_all_of_the_owner() -> None:
    ledger = make_ledger()
    ledger.take(Tier.GPU, "kv", 10)
    assert ledger.give_back(Tier.GPU, "kv") == 10
    assert ledger.free(Tier.GPU) == 100
    assert ledger.entries(Tier.GPU) == ()


def test_give_back_by_owner_without_bytes_raises() -> None:
    with pytest.raises(InternalError, match="does not hold"):
        make_ledger().give_back(Tier.GPU, "kv")

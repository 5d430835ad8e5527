"""`ScanRule`: few keys are attended exactly, many are scanned, unless too many of them are kept."""

import pytest

from ambidex.attention.scan_rule import ScanRule


def make_rule(rate: float = 178e9) -> ScanRule:
    return ScanRule(rate, exact_bytes=4096, scanned_bytes=8 * 132, kept_bytes=8 * 512)


def test_keys_are_scanned_from_where_what_is_saved_pays_for_it() -> None:
    rule = make_rule()
    least = rule.least_keys(0.05)
    assert least == pytest.approx(60e-6 * 178e9 / (4096 - 8 * 132 - 0.1 * 8 * 512))
    assert 3008 < least < 7104  # of contexts of 4K and 8K tokens, 1,088 of them on the accelerator
    assert not rule.is_scanned(int(least))
    assert rule.is_scanned(int(least) + 1)
    assert make_rule(rate=89e9).least_keys(0.05) == pytest.approx(least / 2)


def test_where_too_many_keys_are_kept_all_are_attended_and_now_and_then_it_looks_again() -> None:
    rule = make_rule()
    rule.note(0.5)
    assert rule.least_keys(0.5) == float("inf")
    assert [rule.is_scanned(10**6) for _ in range(64)] == [False] * 63 + [True]
    assert not rule.is_scanned(10**6), "what it saw there was not told"
    rule.note(0.01)
    assert rule.is_scanned(10**6)


def test_it_does_not_look_again_at_so_few_keys_that_no_share_would_pay() -> None:
    rule = make_rule()
    rule.note(0.5)
    assert not any(rule.is_scanned(1000) for _ in range(200))

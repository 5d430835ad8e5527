"""`ScanRule`: few keys are attended exactly, many are scanned, unless too many of them are kept."""

import pytest

from ambidex.attention.scan_rule import ScanRule


def run_step(rule: ScanRule, num_keys: int) -> bool:
    """Whether it scans; asked twice, as a step is that could not be sent ahead."""
    was_scanned = rule.is_scanned(num_keys)
    assert rule.is_scanned(num_keys) is was_scanned
    rule.count(num_keys, was_scanned=was_scanned)
    return was_scanned


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
    assert [run_step(rule, 10**6) for _ in range(64)] == [False] * 63 + [True]
    assert not rule.is_scanned(10**6), "what it saw there was not told"
    rule.note(0.01)
    assert rule.is_scanned(10**6)


def test_it_does_not_look_again_at_so_few_keys_that_no_share_would_pay() -> None:
    rule = make_rule()
    rule.note(0.5)
    assert not any(run_step(rule, 1000) for _ in range(200))


def test_what_the_link_brings_during_products_is_no_reason_to_scan() -> None:
    """By rates alone 5,000 keys were scanned in steps that exact attention would have ended earlier."""
    link, rate, products_s, num_keys = 50e9, 136e9, 140e-6, 5000
    rule = ScanRule(rate, link=link, exact_bytes=4096, scanned_bytes=8 * 132, kept_bytes=8 * 512)
    rule.note(0.05)
    assert rule.is_scanned(num_keys)
    scanned_s = 60e-6 + num_keys * (8 * 132 + 0.05 * 2 * 8 * 512) / rate
    exact_s = (num_keys * 4096 - products_s * link) / rate
    assert exact_s < scanned_s
    for _ in range(12):
        rule.note_time(products_s + scanned_s, num_keys)
    assert not rule.is_scanned(num_keys)
    assert rule.is_scanned(8000)


def test_where_only_the_cpu_scans_keys_are_scanned_from_where_it_alone_is_the_faster() -> None:
    """As with rows that the scan lane's kernel does not take: exact steps have both lanes, those that scan have one."""
    link, rate, kept, products_s = 50e9, 136e9, 0.05, 140e-6
    rule = ScanRule(rate, link=link, scan_rate=rate - link, exact_bytes=4096, scanned_bytes=8 * 132, kept_bytes=8 * 512)

    def scanned_s(num_keys: float) -> float:
        return products_s + 60e-6 + num_keys * (8 * 132 + kept * 2 * 8 * 512) / (rate - link)

    for _ in range(40):
        rule.note_time(scanned_s(10_000), 10_000)
    least = rule.least_keys(kept)
    exact_s = products_s + (least * 4096 - products_s * link) / rate
    assert scanned_s(least) == pytest.approx(exact_s)
    assert rule.is_scanned(int(least) + 1)
    assert not rule.is_scanned(int(least) - 1)


def test_step_of_no_time_brings_no_products() -> None:
    rule = ScanRule(136e9, link=50e9, exact_bytes=4096, scanned_bytes=8 * 132, kept_bytes=8 * 512)
    least = rule.least_keys(0.05)
    for _ in range(5):
        rule.note_time(1e-9, 100_000)
    assert rule.least_keys(0.05) == least


def test_steps_that_were_held_up_do_not_end_scanning() -> None:
    """Bug: with Llama-3.1-8B's shape on an H200 15,296 keys were attended exactly for good (18.9 ms a step; 16.8 where
    they had been scanned): the time of one slow step was taken for products, behind which a link would bring all."""
    link, rate, kept, num_keys = 54.8e9, 130e9, 0.19, 15_296
    rule = ScanRule(rate, link=link, exact_bytes=4096, scanned_bytes=8 * 132, kept_bytes=8 * 512)
    fast_s = 162e-6 + 60e-6 + num_keys * (8 * 132 + kept * 2 * 8 * 512) / rate
    for slowness in (2.0, 1.0, 1.5, 1.0, 1.0, 3.0, 1.02, 2.0):
        assert rule.is_scanned(num_keys)
        rule.note(kept)
        rule.count(num_keys, was_scanned=True)
        rule.note_time(slowness * fast_s, num_keys)
    assert rule.is_scanned(num_keys)

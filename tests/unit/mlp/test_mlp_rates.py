"""What the CPU takes of the weights in DRAM in steps of each size."""

import pytest
import torch

from ambidex.kernels.cpu.native import ThreadPool
from ambidex.kernels.linear import LinearContext
from ambidex.mlp.cuts import SiteShape
from ambidex.mlp.host_lane import HostSide
from ambidex.mlp.parts import Part, Rows
from ambidex.mlp.rates import TOKENS, LaneRates, keep_whole, measure_cpu
from ambidex.models.divided import _share_out


def test_levels_let_both_lanes_end_together() -> None:
    rates = LaneRates(cpu={1: 90e9, 8: 60e9, 64: 30e9, 128: 2e9}, link=30e9, most_native_tokens=8)
    on_cpu, streamed = 80, 20
    levels = rates.levels(on_cpu=on_cpu, streamed=streamed)
    assert [level.most_tokens for level in levels] == [1, 8, 64]  # at 128 the CPU would take a sixteenth
    assert [level.cpu_share for level in levels] == pytest.approx([75 / 80, 66.667 / 80, 50 / 80], rel=1e-3)
    for level, num_tokens in zip(levels, (1, 8, 64), strict=True):
        by_cpu = on_cpu * level.cpu_share
        assert by_cpu / rates.cpu[num_tokens] == pytest.approx((100 - by_cpu) / rates.link)


def test_both_lanes_share_what_dram_gives() -> None:
    """The CPU alone reads 90 GB/s, but 60 while copies run: with 9 in 12 of the bytes it would end last."""
    rates = LaneRates(cpu={1: 90e9, 64: 30e9}, link=30e9, most_native_tokens=64, beside=90e9)
    assert [level.cpu_share for level in rates.levels(on_cpu=100, streamed=0)] == pytest.approx([60 / 90, 30 / 60])
    odd = LaneRates(cpu={1: 90e9}, link=50e9, most_native_tokens=1, beside=40e9)
    assert [level.cpu_share for level in odd.levels(on_cpu=100, streamed=0)] == []


def test_where_the_cpu_reads_a_part_the_link_is_left_less() -> None:
    """What travels is read whole: of DRAM it takes more than what the CPU reads of the same neurons."""
    rates = LaneRates(cpu={1: 300e9}, link=50e9, most_native_tokens=1, beside=100e9, reads=0.25)
    (level,) = rates.levels(on_cpu=100, streamed=0)
    assert level.cpu_share == pytest.approx(1 / (1 / 3 + 0.75))
    cpu_s, dram_s = level.cpu_share / 300e9, (0.25 * level.cpu_share + 1 - level.cpu_share) / 100e9
    assert cpu_s == pytest.approx(dram_s)
    slow = LaneRates(cpu={1: 100e9}, link=10e9, most_native_tokens=1, beside=110e9, reads=0.5)
    assert slow.levels(on_cpu=100, streamed=0)[0].cpu_share == pytest.approx(100 / 110), "the link has no more to give"


def test_the_cpu_takes_all_of_its_part_in_steps_that_a_solver_divided_for() -> None:
    levels = LaneRates(cpu={1: 30e9, 8: 30e9, 64: 30e9}, link=30e9, most_native_tokens=8).levels(on_cpu=9, streamed=1)
    kept = keep_whole(levels, 8)
    assert [(level.most_tokens, level.cpu_share) for level in kept] == [(8, 1.0), (64, levels[2].cpu_share)]
    assert keep_whole([], 4)[0].cpu_share == 1.0


def test_the_cpu_takes_no_more_than_its_part() -> None:
    rates = LaneRates(cpu={1: 90e9}, link=30e9, most_native_tokens=1)
    assert rates.levels(on_cpu=50, streamed=50)[0].cpu_share == 1.0


def test_shares_of_many_places_are_right_in_sum() -> None:
    counts = [3, 1, 5, 0, 2] * 20
    for share in (0.0, 0.1, 0.35, 0.5, 0.77, 1.0):
        taken = _share_out(counts, share)
        assert all(0 <= num <= count for num, count in zip(taken, counts, strict=True))
        assert abs(sum(taken) - share * sum(counts)) <= 0.5


def test_rates_of_the_cpu_are_measured_for_every_size() -> None:
    shape = SiteShape(num_in=64, num_rows=512)
    linear = LinearContext(ThreadPool(1))
    rows = range(512)
    part = Part(
        Rows(shape, rows, torch.randn(shape.num_numbers).bfloat16().view(torch.uint8), torch.bfloat16), None, linear
    )
    rates, most_native_tokens = measure_cpu([HostSide(shape, [part])], linear)
    assert list(rates) == list(TOKENS)
    assert all(rate > 0 for rate in rates.values())
    assert most_native_tokens in (0, *TOKENS)
    assert linear.most_native_tokens == most_native_tokens


def test_products_with_quantised_weights_are_native_whatever_was_measured() -> None:
    """The same product was timed as two forms, and noise chose between them."""
    shape = SiteShape(num_in=64, num_rows=64, kind="Q4_0")
    linear = LinearContext(ThreadPool(1), most_native_tokens=0)
    memory = torch.zeros(shape.num_bytes(64, 2), dtype=torch.uint8)
    part = Part(Rows(shape, range(64), memory, torch.bfloat16), None, linear)
    rates, most_native_tokens = measure_cpu([HostSide(shape, [part])], linear)
    assert list(rates) == list(TOKENS)
    assert most_native_tokens == linear.most_native_tokens == TOKENS[-1]

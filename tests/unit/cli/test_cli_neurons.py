"""What statistics and metrics say about neurons that were left out."""

from ambidex.cli.show import neuron_rows, stats_json
from ambidex.core.sparsity import CacheFigures, NeuronFigures
from ambidex.engine.stats import EngineStats

CACHE = CacheFigures(
    num_active=400, num_hits=300, num_moves=3, num_moved=70, num_failed_moves=1, moved_bytes=140 * 1024
)


def test_nothing_is_said_where_nothing_can_be_left_out() -> None:
    assert neuron_rows(EngineStats()) == []
    assert stats_json(EngineStats())["neurons"] is None


def test_shares_are_of_what_was_seen() -> None:
    figures = NeuronFigures(
        num_neurons=1000,
        num_active=30,
        num_rows=500,
        num_rows_read=40,
        num_screened=500,
        num_candidates=45,
        cache=CACHE,
    )
    assert neuron_rows(EngineStats(neurons=figures)) == [
        ("neurons in DRAM", "3.0 % active for a token, 8.0 % of columns read"),
        ("rows that a screen let through", "9.0 %"),
        ("active neurons on the accelerator", "75.0 %"),
        ("neurons moved", "70 pairs in 3 moves, 140.0 KiB, 1 moves failed"),
    ]
    assert stats_json(EngineStats(neurons=figures))["neurons"]["cache"]["num_hits"] == 300


def test_before_the_first_step_all_shares_are_zero() -> None:
    figures = NeuronFigures(num_neurons=0, num_active=0, num_rows=0, num_rows_read=0)
    assert (figures.active_share, figures.read_share, figures.candidate_share) == (0.0, 0.0, 0.0)
    assert len(neuron_rows(EngineStats(neurons=figures))) == 1

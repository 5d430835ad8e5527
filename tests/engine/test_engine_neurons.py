"""`measure_neurons` and its verb: quantiles, activity, and the file that engines read."""

from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from ambidex import EngineConfig
from ambidex.cli.main import AmbidexCommand
from ambidex.cli.services import Services
from ambidex.core.config import DeviceKind
from ambidex.core.errors import ConfigError
from ambidex.core.model_spec import Activation
from ambidex.engine.compose.neurons import LayerStatistics, SizeHistogram, measure_neurons
from ambidex.formats.neuron_profile import SHARES
from tiny_engine import make_engine_folder

TEXT = "Emma Woodhouse, handsome, clever, and rich, with a comfortable home and happy disposition, " * 4


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(model=str(folder), device=DeviceKind.CPU, num_threads=1, block_size=16)


def test_quantiles_of_a_histogram_are_those_of_the_values_to_a_bins_width() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 3
    histogram = SizeHistogram()
    for part in values.split(700):
        histogram.add(part.view(-1, 1))
    for share in SHARES:
        true = float(values.abs().quantile(share))
        assert histogram.quantile(share) == pytest.approx(true, rel=0.03)


def test_zeros_have_size_zero_and_nothing_is_lost_at_either_end() -> None:
    histogram = SizeHistogram()
    histogram.add(torch.tensor([0.0, 0.0, 0.0, 1e-30, 1e30]))
    assert histogram.quantile(0.5) == 0.0
    assert histogram.quantile(0.75) < 1e-11
    assert histogram.quantile(0.95) > 1e4


def test_activity_behind_a_relu_is_the_share_of_tokens_with_another_number_than_zero() -> None:
    layer = LayerStatistics(Activation.RELU)
    layer.observe(None, torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 3.0]]))
    layer.observe(None, torch.tensor([[0.0, 1.0, 4.0], [0.0, 0.0, 5.0]]))
    assert layer.activity.tolist() == [0.0, 0.5, 1.0]
    assert layer.gate_sizes() == []


def test_activity_of_a_gated_mlp_is_the_share_of_tokens_in_the_larger_half() -> None:
    layer = LayerStatistics(Activation.SILU)
    gate = torch.tensor([[0.1, 5.0], [0.2, -6.0]])
    layer.observe(gate, torch.ones(2, 2))
    assert layer.activity.tolist() == [0.0, 1.0]
    assert layer.gate_sizes()[SHARES.index(0.95)] == pytest.approx(6.0, rel=0.05)


def test_thresholds_leave_out_the_share_that_they_are_for(tmp_path: Path) -> None:
    config = config_of(make_engine_folder(tmp_path))
    done: list[tuple[int, int]] = []
    profile = measure_neurons(
        config, TEXT, num_tokens=300, context=100, progress=None, tell=lambda *counts: done.append(counts)
    )
    assert done == [(100, 300), (200, 300), (300, 300)]
    assert profile.num_tokens == 300
    assert profile.activity.mean() == pytest.approx(0.5, abs=0.02)
    assert (np.diff(profile.gate_sizes, axis=1) > 0).all()
    assert (np.diff(profile.input_sizes, axis=1) > 0).all()


@pytest.mark.parametrize(
    ("num_tokens", "context", "message"),
    [(50, 100, "has 50 tokens, a context has 100"), (500, 128, "the limit is 128")],
)
def test_a_context_that_cannot_be_had_is_refused(num_tokens: int, context: int, message: str, tmp_path: Path) -> None:
    config = config_of(make_engine_folder(tmp_path))
    with pytest.raises(ConfigError, match=message):
        measure_neurons(
            config, TEXT, num_tokens=num_tokens, context=context, progress=None, tell=lambda _done, _total: None
        )


def test_the_verb_writes_the_profile_into_the_cache_and_engines_find_it(tmp_path: Path) -> None:
    from ambidex.engine.compose import build_engine

    folder = make_engine_folder(tmp_path, "llama")
    (tmp_path / "text").write_text(TEXT)
    arguments = ["calibrate", "neurons", str(folder), "--text", str(tmp_path / "text"), "--context", "64"]
    env = {"XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        result = CliRunner().invoke(AmbidexCommand(), [*arguments, "--device", "cpu"], obj=Services(), env=env)
        assert result.exit_code == 0, result.output
        assert "tokens of" in result.output
        assert len(list((tmp_path / "ambidex" / "neurons").iterdir())) == 1
        report = build_engine(
            EngineConfig(model=str(folder), device=DeviceKind.CPU, num_threads=1, mlp_sparsity="cats:0.5")
        ).report
    assert report.value("compute", "mlp_sparsity").startswith("cats:0.5, changes answers")

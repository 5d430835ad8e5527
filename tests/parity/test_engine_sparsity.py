"""Leaving out neurons: exact forms give the dense run's tokens wherever weights lie; a threshold gives the same tokens
under every division, since it is the model's and not the lane's."""

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_engine_placements import DEVICES, KV, LEVELS, answer, answers_of, make_engine, placements

from ambidex import EngineConfig
from ambidex.core.config import DeviceKind, Graphs
from ambidex.core.errors import ConfigError
from ambidex.core.ids import Tier
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.engine.compose.neurons import measure_neurons
from ambidex.mlp.neuron_mover import NeuronMover
from ambidex.mlp.sparse_costs import ScreenCosts
from ambidex.mlp.split_site import Level
from ambidex.models.site_plans import RingSizes
from ambidex.runner.decode import DecodeForm
from tiny_engine import make_engine_folder
from tiny_models import NUM_LAYERS

SPREAD: Final = WeightSplit(on_gpu=0.3, on_cpu=0.5, streamed=0.2)
DIVIDED: Final = Placement(layers=(LayerPlacement(attention=SPREAD, mlp=SPREAD),) * NUM_LAYERS)
TEXT: Final = "It is a truth universally acknowledged, that a single man in possession of a good fortune, " * 3


def profile_of(folder: Path, **others: Any) -> Path:
    path = folder / "neurons.npz"
    if not path.exists():
        config = EngineConfig(model=str(folder), device=DeviceKind.CPU, num_threads=1, block_size=16)
        measured = measure_neurons(
            config, TEXT, num_tokens=200, context=64, progress=None, tell=lambda _done, _total: None, **others
        )
        measured.write(path)
    return path


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", ["opt", "opt_350m", "llama_relu"])
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_skipping_neurons_behind_a_relu_changes_no_token(
    variant: str, device: DeviceKind, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"sparsity_{variant}" / variant
    if not folder.is_dir():
        make_engine_folder(folder.parent, variant)
    wanted = answer(folder, None, device=device)
    engine = make_engine(
        folder,
        data.draw(placements(variant)),
        device=device,
        mlp_sparsity=data.draw(st.sampled_from(["relu", "relu-screened"])),
        max_tokens_per_step=data.draw(st.sampled_from([7, 48, 512])),
        graphs=data.draw(st.sampled_from([Graphs.AUTO, Graphs.OFF])),
        weight_ring=RingSizes(
            chunk_bytes=data.draw(st.sampled_from([1, 9000, 30000])), num_slots=data.draw(st.integers(1, 4))
        ),
        cpu_levels=data.draw(st.sampled_from(LEVELS)),
        decode_form=data.draw(st.sampled_from([None, DecodeForm.FIXED] if device is DeviceKind.CPU else [None])),
        **data.draw(st.sampled_from(KV)),
    )
    assert answers_of(engine) == wanted


@pytest.mark.parametrize(("variant", "sparsity"), [("llama", "cats:0.5"), ("llama", "teal:0.4"), ("opt", "teal:0.9"),
                                                   ("falcon_7b", "teal:0.5")])  # fmt: skip
def test_thresholds_give_the_same_tokens_under_every_division(variant: str, sparsity: str, tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, variant)
    chosen = {"mlp_sparsity": sparsity, "neuron_profile": str(profile_of(folder))}
    dense = answer(folder, None, device=DeviceKind.CPU)
    whole = answer(folder, None, device=DeviceKind.CPU, **chosen)
    assert whole != dense, "the threshold changes nothing: the test would prove nothing"
    for form in (None, DecodeForm.FIXED):
        ring = RingSizes(chunk_bytes=9000, num_slots=3)
        assert answer(folder, DIVIDED, device=DeviceKind.CPU, weight_ring=ring, decode_form=form, **chosen) == whole


def test_the_report_says_what_is_left_out_and_what_was_measured(tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "opt")
    off = make_engine(folder, DIVIDED, device=DeviceKind.CPU).report
    assert off.value("compute", "mlp_sparsity") == "off"
    divided = make_engine(folder, DIVIDED, device=DeviceKind.CPU, mlp_sparsity="relu").report
    assert divided.value("compute", "mlp_sparsity").startswith("relu, exact; the CPU reads columns of active neurons")
    assert "10 % active assumed, no profile; measured at start (" in divided.why("compute", "mlp_sparsity")
    profile = str(profile_of(folder))
    whole = make_engine(folder, None, device=DeviceKind.CPU, mlp_sparsity="relu", neuron_profile=profile).report
    assert "nothing is skipped" in whole.value("compute", "mlp_sparsity")
    assert "active on 192 tokens of the profile" in whole.why("compute", "mlp_sparsity")


@pytest.mark.parametrize(
    ("variant", "settings_", "message"),
    [
        ("llama", {"mlp_sparsity": "relu"}, "needs a ReLU, and this model's activation is silu: use cats"),
        ("opt", {"mlp_sparsity": "cats:0.5"}, "looks at the gate of an MLP, and this model's has none"),
        ("llama", {"mlp_sparsity": "cats:0.5", "neuron_profile": "none.npz"}, "there is no neuron profile none.npz"),
        ("llama", {"neuron_profile": "none.npz"}, "`neuron_profile` is for `mlp_sparsity`, which is off"),
    ],
)
def test_what_is_not_for_a_model_is_refused(
    variant: str, settings_: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(make_engine_folder(tmp_path, variant), None, device=DeviceKind.CPU, **settings_)


def test_a_profile_of_other_weights_is_refused(tmp_path: Path) -> None:
    first, second = (make_engine_folder(tmp_path / str(seed), "llama", seed=seed) for seed in (0, 1))
    with pytest.raises(ConfigError, match="belongs to another model, or to other weights of it"):
        make_engine(second, None, device=DeviceKind.CPU, mlp_sparsity="cats:0.5", neuron_profile=str(profile_of(first)))


def test_neurons_of_divided_weights_are_not_measured(tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    config = EngineConfig(model=str(folder), device=DeviceKind.CPU, weights_gpu_memory="430KB", num_threads=1)
    with pytest.raises(ConfigError, match="where all of them are computed in one place"):
        measure_neurons(config, TEXT, num_tokens=64, context=64, progress=None, tell=lambda _done, _total: None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", ["opt", "llama_relu"])
@pytest.mark.parametrize("form", [None, DecodeForm.FIXED])
def test_neurons_that_change_places_while_steps_run_change_no_token(
    variant: str, device: DeviceKind, form: DecodeForm | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_engine_folder(tmp_path, variant)
    wanted = answer(folder, None, device=device)
    settings_: dict[str, Any] = {"neuron_profile": str(profile_of(folder))}
    # Screening pays or not as this machine measures it: here it always does.
    monkeypatch.setattr(ScreenCosts, "most_candidates", lambda _costs, _num_tokens: 1.0)
    for cache, move_memory, sparsity in (
        ("static", 8 << 20, "relu"),
        ("dynamic", 8 << 20, "relu"),
        ("dynamic", 8000, "relu-screened"),
    ):
        settings_["mlp_sparsity"] = sparsity
        engine = make_engine(
            folder, DIVIDED, device=device, decode_form=form if device is DeviceKind.CPU else None,
            weight_ring=RingSizes(chunk_bytes=9000, num_slots=3), neuron_cache=cache, neuron_move_memory=move_memory,
            cpu_levels=[Level(most_tokens=10**6, cpu_share=1.0)], **settings_,
        )  # fmt: skip
        for _ in range(3):
            assert answers_of(engine) == wanted
        figures = engine.stats.neurons
        assert figures is not None
        assert figures.cache is not None
        assert 0 < figures.num_active < figures.num_neurons
        assert 0 < figures.cache.num_hits < figures.cache.num_active
        assert (figures.cache.num_moves > 0) == (cache == "dynamic")
        assert figures.cache.num_failed_moves == 0
        assert (figures.num_screened > 0) == (sparsity == "relu-screened" and variant == "llama_relu")


def test_the_most_active_neurons_of_the_profile_lie_on_the_accelerator(tmp_path: Path) -> None:
    """More hits than with the first neurons, on the text that the profile was measured on."""
    folder = make_engine_folder(tmp_path, "opt")
    profile = str(profile_of(folder))
    rates = []
    for settings_ in ({"neuron_cache": "static", "neuron_profile": profile}, {"neuron_cache": "dynamic"}):
        if settings_["neuron_cache"] == "dynamic":  # without a profile it begins with the first ones
            settings_["neuron_move_memory"] = "1B"
        engine = make_engine(folder, DIVIDED, device=DeviceKind.CPU, mlp_sparsity="relu", **settings_)
        answers_of(engine)
        figures = engine.stats.neurons
        assert figures is not None
        assert figures.cache is not None
        rates.append(figures.cache.hit_rate)
    assert rates[0] > rates[1] + 0.05
    assert engine.report.why("compute", "neuron_cache") == "no profile: the first ones, to begin with"


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"neuron_cache": "dynamic"}, "without `mlp_sparsity` all neurons are computed wherever"),
        ({"neuron_cache": "static", "mlp_sparsity": "relu"}, "profile on the accelerator, and there is none"),
    ],
)
def test_a_cache_of_neurons_is_refused_where_it_is_of_no_use(
    settings_: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        make_engine(make_engine_folder(tmp_path, "opt"), DIVIDED, device=DeviceKind.CPU, **settings_)


def test_a_move_that_fails_leaves_every_neuron_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_engine_folder(tmp_path, "opt")
    wanted = answer(folder, None, device=DeviceKind.CPU)
    engine = make_engine(folder, DIVIDED, device=DeviceKind.CPU, mlp_sparsity="relu", neuron_cache="dynamic")

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory for neurons")

    for has_memory in (False, True):
        with monkeypatch.context() as patch:
            if not has_memory:
                patch.setattr(NeuronMover, "begin", fail)
            for _ in range(2):
                assert answers_of(engine) == wanted
        figures = engine.stats.neurons
        assert figures is not None
        assert figures.cache is not None
        assert figures.cache.num_failed_moves > 0
        assert (figures.cache.num_moved > 0) == has_memory


def test_buffers_for_moves_are_in_the_ledger_of_both_tiers(tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "opt")
    settings_: dict[str, Any] = {"mlp_sparsity": "relu", "neuron_cache": "dynamic", "neuron_move_memory": 4096}
    engine = make_engine(folder, DIVIDED, device=DeviceKind.CPU, **settings_)
    neuron_bytes = 2 * 48 * 4
    for tier in (Tier.GPU, Tier.DRAM):
        sizes = {entry.owner: entry.num_bytes for entry in engine.figures.ledger.entries(tier)}
        assert sizes["neuron moves"] == 4096 // (2 * neuron_bytes) * 2 * neuron_bytes

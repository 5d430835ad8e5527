"""What the CPU reads of MLPs where neurons are left out, by hand, and what that does to a step and to a placement."""

import dataclasses

import numpy as np
import pytest

from ambidex.core.dtypes import DType
from ambidex.core.model_spec import Activation, ModelSpec
from ambidex.core.placement import LayerPlacement, Placement, WeightSplit
from ambidex.core.sparsity import ASSUMED_ACTIVE, parse_sparsity
from ambidex.core.units import MIB
from ambidex.cost.sparsity import TOKENS, expected_reads, independent_unions, mlp_reads
from ambidex.cost.step import predict_step
from ambidex.cost.units import StepUnits, make_units
from ambidex.cost.weights import DIVIDED_ON_GPU, PLAIN, count_weights
from ambidex.cost.workload import KVShares, Workload
from ambidex.formats.neuron_profile import NeuronProfile
from ambidex.hw.presets import make_profile
from ambidex.hw.profile import Curve
from ambidex.solver.problem import PlacementProblem
from ambidex.solver.solve import solve_placement

OPT = ModelSpec(
    architecture="opt", num_layers=4, hidden_size=1024, intermediate_size=4096, num_q_heads=8, num_kv_heads=8,
    head_dim=128, vocab_size=1000, max_context_len=2048, norm_eps=1e-5, activation=Activation.RELU, rope=None,
    windows=(None,) * 4, tie_embeddings=True, dtype=DType.BF16,
)  # fmt: skip
LLAMA = dataclasses.replace(OPT, architecture="llama", activation=Activation.SILU)
PROFILE = make_profile("rtx3060-12g", "ddr4-2ch", "pcie3x16")
HALF = WeightSplit(on_gpu=0.5, on_cpu=0.5)


@pytest.mark.parametrize(
    ("spec", "form", "share"),
    [
        (OPT, "relu", (1 + 0.125) / 2),
        (OPT, "relu-screened", (34 / 64 + 0.25 + 0.125) / 2),
        (dataclasses.replace(LLAMA, activation=Activation.RELU), "relu", (1 + 0.125 + 0.125) / 3),
        (LLAMA, "cats:0.5", (1 + 0.125 + 0.125) / 3),
        (LLAMA, "teal:0.5", (1 + 1 + 0.125) / 3),
    ],
)
def test_each_form_reads_its_part_of_each_matrix(spec: ModelSpec, form: str, share: float) -> None:
    sparsity = parse_sparsity(form)
    assert sparsity is not None
    assert mlp_reads(spec, sparsity, {1: 0.125}, number_bytes=2).at(1) == pytest.approx(share)


def test_a_screen_never_reads_more_than_all_rows() -> None:
    sparsity = parse_sparsity("relu-screened")
    assert sparsity is not None
    assert mlp_reads(OPT, sparsity, {64: 0.9}, number_bytes=2).at(64) == pytest.approx((1 + 0.9) / 2)


def test_more_tokens_need_more_neurons() -> None:
    unions = independent_unions(0.03)
    assert unions[1] == pytest.approx(0.03)
    assert unions[2] == pytest.approx(1 - 0.97**2)
    assert list(unions) == list(TOKENS)


def test_a_profile_says_how_often_each_neuron_is_active() -> None:
    activity = np.array([[0.5, 0.0, 0.0, 0.0]], dtype=np.float32)
    none = np.zeros((1, 0), dtype=np.float32)
    profile = NeuronProfile(model="", num_tokens=1, activity=activity, gate_sizes=none, input_sizes=none)
    assert profile.unions((1, 2)) == {1: 0.25, 2: pytest.approx(0.25)}, "at least one neuron of four"
    assert NeuronProfile(
        model="", num_tokens=1, activity=np.full((1, 4), 0.5, dtype=np.float32), gate_sizes=none, input_sizes=none
    ).unions((1, 2)) == {1: 0.5, 2: 0.75}
    relu, teal = parse_sparsity("relu"), parse_sparsity("teal:0.4")
    assert relu is not None
    assert teal is not None
    assert expected_reads(OPT, relu, profile, number_bytes=2).at(1) == pytest.approx((1 + 0.25) / 2)
    assert expected_reads(OPT, relu, None, number_bytes=2).at(1) == pytest.approx((1 + ASSUMED_ACTIVE) / 2)
    assert expected_reads(OPT, teal, profile, number_bytes=2).at(1) == pytest.approx((1 + 0.6) / 2)


def units(mlp_reads: Curve | None, *, kind: str | None = None) -> StepUnits:
    residence = PLAIN if kind is None else DIVIDED_ON_GPU
    weights = count_weights(OPT, residence=residence, dtype=DType.BF16, kind=kind)
    return make_units(
        OPT, weights, PROFILE, Workload(batch=1, context=128), dtype=DType.BF16, mlp_reads=mlp_reads
    )  # fmt: skip


def test_the_cpu_takes_as_much_less_time_and_reads_as_much_less() -> None:
    placement = Placement(layers=(LayerPlacement(mlp=HALF),) * 4)
    dense, sparse = (predict_step(units(reads), placement, KVShares()) for reads in (None, Curve(((1, 0.5),))))
    assert sparse.cpu_s == pytest.approx(dense.cpu_s / 2)
    assert sparse.gpu_s == dense.gpu_s
    read = 4 * 2 * 1024 * 4096 * 2 / 2  # bytes of the CPU's halves
    assert PROFILE.link is not None
    idle = dense.dram_s - read / PROFILE.link.beside_bytes_per_s
    assert sparse.dram_s == pytest.approx(idle + read / 2 / PROFILE.link.beside_bytes_per_s)


def test_quantised_matrices_are_read_whole() -> None:
    assert units(Curve(((1, 0.5),)), kind="Q8_0") == units(None, kind="Q8_0")


def test_the_solver_gives_the_cpu_more_where_it_reads_less() -> None:
    def on_cpu(mlp_reads: Curve | None) -> tuple[float, float]:
        found = units(mlp_reads)
        problem = PlacementProblem(units=found, gpu_bytes=60 * MIB, ring_bytes=MIB, is_head_whole=True)
        solution = solve_placement(problem)
        return sum(layer.mlp.on_cpu for layer in solution.placement.layers), solution.step.step_s

    (dense, dense_s), (sparse, sparse_s) = on_cpu(None), on_cpu(Curve(((1, 0.5),)))
    assert sparse > dense + 0.2
    assert sparse_s < 0.8 * dense_s

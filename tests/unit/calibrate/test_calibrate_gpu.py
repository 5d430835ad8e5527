"""The parts that need a GPU: each gives a figure that a GPU of today can have."""

from pathlib import Path

import pytest
import torch

from ambidex.calibrate import cpu, gpu
from ambidex.calibrate.run import calibrate, measured_nodes, part_names
from ambidex.core.dtypes import GPU_WEIGHT_KINDS
from ambidex.hw.profile import Machine
from ambidex.hw.profile_file import read_profile
from ambidex.hw.topology import read_topology
from ambidex.kernels.cpu.native import ThreadPool

pytestmark = pytest.mark.gpu


def test_products_attention_and_copies_have_rates_of_a_gpu() -> None:
    device = torch.device("cuda")
    rates = dict(gpu.measure_products(device, "bf16"))
    assert 1e10 < rates[1] < 2e13
    assert rates[4096] < rates[1]
    assert 1e10 < gpu.measure_attention(device, "bf16") < 2e13
    assert all(1e9 < rate < 1e12 for rate in gpu.measure_copies(device))
    assert 1e-6 < gpu.measure_layer(device) < 1e-3


def test_handovers_and_reads_beside_copies_have_times_of_a_machine() -> None:
    device, threads = torch.device("cuda"), ThreadPool(2)
    assert 5e-6 < gpu.measure_handover(device, threads) < 1e-2
    assert gpu.measure_beside(device, threads, cpu.make_buffer(512 * 2**20)) > 1e9


def test_a_profile_of_a_gpu_machine_has_all_parts(tmp_path: Path) -> None:
    machine = Machine(cpu="Some CPU", cores=2, gpu="Some GPU")
    parts = list(calibrate(tmp_path / "profile.json", machine, num_threads=2, num_bytes=256 * 2**20))
    assert tuple(part.name for part in parts) == part_names(has_gpu=True, node_ids=measured_nodes(read_topology()))
    profile = read_profile(tmp_path / "profile.json")
    assert profile.gpu is not None
    assert profile.link is not None
    assert profile.gpu.products.flops_per_s("bf16") > 1e12


@pytest.mark.parametrize("kind", GPU_WEIGHT_KINDS)
def test_quantised_products_have_rates_of_a_gpu(kind: str) -> None:
    rates = dict(gpu.measure_products(torch.device("cuda"), kind))
    assert 1e10 < rates[1] < 2e13
    assert rates[4096] < rates[1]

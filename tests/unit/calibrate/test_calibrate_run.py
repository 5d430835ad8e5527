"""`calibrate` on small buffers: every part is there, what was interrupted goes on, plans can use the profile."""

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ambidex.calibrate import cpu, run
from ambidex.calibrate.launches import measure_launches
from ambidex.calibrate.run import calibrate, measured_nodes, part_names
from ambidex.cli.calibrate import show
from ambidex.cli.main import AmbidexCommand
from ambidex.cli.services import Services
from ambidex.core.dtypes import WEIGHT_BLOCKS, DType
from ambidex.hw.profile import Machine
from ambidex.hw.profile_file import read_profile
from ambidex.hw.topology import read_topology
from ambidex.kernels.cpu.native import ThreadPool
from ambidex.kernels.linear import LinearContext, LinearOp
from ambidex.mlp import sparse_rates

HERE = Machine(cpu="Some CPU", cores=1, gpu=None)
SMALL = 2**20


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One run of each figure, and matrices that a MiB holds; no GPU, whatever the machine."""
    num_threads = torch.get_num_threads()
    monkeypatch.setattr(cpu, "NUM_RUNS", 1)
    monkeypatch.setattr(cpu, "WIDTH", 256)
    monkeypatch.setattr(cpu, "NUM_SMALL", 2)
    monkeypatch.setattr(sparse_rates, "_NUM_PROBES", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield
    torch.set_num_threads(num_threads)


def test_all_parts_are_measured_into_a_profile_of_this_machine(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    parts = list(calibrate(path, HERE, num_threads=1, num_bytes=SMALL))
    assert tuple(part.name for part in parts) == part_names(has_gpu=False, node_ids=measured_nodes(read_topology()))
    profile = read_profile(path)
    profile.check_machine(HERE)
    assert set(profile.cpu.products.curves) == set(WEIGHT_BLOCKS)
    assert set(profile.cpu.attention_bytes_per_s) == set(DType)
    assert set(profile.cpu.neurons) == {"fp32", "bf16", "fp16"}
    assert set(profile.cpu.tiles_from) <= {"Q4_0", "Q4_1", "Q4_K"}
    assert (profile.gpu, profile.link) == (None, None)
    nodes = {node.node_id: node for node in read_topology().numa_nodes}
    for rates in profile.nodes:
        assert rates.read_bytes_per_s > 0
        assert rates.to_gpu_bytes_per_s is None
        assert rates.is_memory_only == nodes[rates.node_id].is_memory_only
    assert [child.name for child in tmp_path.iterdir()] == ["profile.json"]
    assert all(show(part.name, part.value) for part in parts)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    first = calibrate(path, HERE, num_threads=1, num_bytes=SMALL)
    begun = [next(first) for _ in range(3)]
    first.close()
    assert not path.exists()
    parts = list(calibrate(path, HERE, num_threads=1, num_bytes=SMALL))
    assert [part.is_kept for part in parts] == [True] * 3 + [False] * (len(parts) - 3)
    assert [json.dumps(part.value) for part in parts[:3]] == [json.dumps(part.value) for part in begun]


@pytest.mark.parametrize("fault", ["another machine", "another day", "no JSON", "anew"])
def test_what_is_left_of_another_run_is_not_taken_over(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    first = calibrate(path, HERE, num_threads=1, num_bytes=SMALL)
    next(first)
    first.close()
    machine = Machine(cpu="Another CPU", cores=1, gpu=None) if fault == "another machine" else HERE
    if fault == "no JSON":
        (tmp_path / "profile.json.partial").write_text("{")
    if fault == "another day":
        now = time.time()
        monkeypatch.setattr(run.time, "time", lambda: now + 2 * 24 * 3600)
    part = next(calibrate(path, machine, num_threads=1, anew=fault == "anew", num_bytes=SMALL))
    assert not part.is_kept


def test_the_verb_says_what_it_measured_and_the_plan_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "probe_bytes", lambda: 64 * SMALL)
    services = Services(describe_machine=lambda: HERE)
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    result = CliRunner().invoke(AmbidexCommand(), ["calibrate", "--num-threads", "1"], obj=services, env=env)
    assert result.exit_code == 0, result.output
    assert "CPU products Q4_K" in result.stdout
    assert "GB/s by tokens" in result.stdout
    planned = CliRunner().invoke(AmbidexCommand(), ["plan", "smollm2", "--json"], obj=services, env=env)
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["machine"]["cpu"] == "Some CPU"


def test_too_little_memory_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "probe_bytes", lambda: 1000)
    services = Services(describe_machine=lambda: HERE)
    result = CliRunner().invoke(AmbidexCommand(), ["calibrate", "--profile", str(tmp_path / "p.json")], obj=services)
    assert result.exit_code == 1
    assert "64.0 MiB are needed" in result.stderr


@pytest.mark.parametrize("kind", cpu.PRODUCT_FORMATS)
def test_matrices_lie_in_the_buffer_and_have_finite_numbers(kind: str) -> None:
    buffer = cpu.make_buffer(SMALL)
    weights = cpu.cut_weights(kind, buffer)
    assert weights
    for weight in weights[:1]:
        dense = weight if isinstance(weight, torch.Tensor) else weight.dense()
        assert torch.isfinite(dense.float()).all()


def test_measured_rates_are_bytes_over_seconds() -> None:
    buffer = cpu.make_buffer(SMALL)
    (count, rate), *_ = cpu.measure_reads(1, buffer)
    assert count == 1
    assert 1e8 < rate < 1e13
    assert 1e7 < cpu.measure_attention(ThreadPool(1), "bf16", buffer) < 1e13


def test_beside_a_gpu_the_faster_form_of_a_product_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms take turns, each with a run that is not counted: the second of three is made out to be the fastest."""
    calls: list[int] = []

    def measure(*_: object) -> float:
        calls.append(len(calls))
        return 2.0 if calls[-1] // 2 % 3 == 1 else 1.0

    monkeypatch.setattr(cpu, "_pass_rate", measure)
    buffer = cpu.make_buffer(SMALL)
    points = cpu.measure_products(ThreadPool(1), "bf16", buffer, is_lane=True)
    assert points == [(num, 2.0) for num in cpu.TOKENS]
    assert len(calls) == 2 * 3 * len(cpu.TOKENS)
    calls.clear()
    assert 2 * len(cpu.measure_products(ThreadPool(1), "Q4_0", buffer, is_lane=True)) == len(calls)


@pytest.mark.parametrize(("limit_s", "num_read"), [(-1.0, 1), (1e6, 8)])
def test_a_run_ends_when_its_time_is_over_and_counts_what_it_read(
    limit_s: float, num_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "PASS_S", limit_s)
    ticks = itertools.count()
    monkeypatch.setattr(cpu.time, "perf_counter", lambda: float(next(ticks)))
    context = LinearContext()
    weights = [torch.zeros(rows, 8) for rows in range(1, 9)]
    rate = cpu._pass_rate([LinearOp(context) for _ in weights], weights, torch.zeros(1, 8))
    assert rate == sum(weight.nbytes for weight in weights[:num_read]) / num_read


def test_launches_of_a_layer_take_a_time() -> None:
    assert 1e-6 < measure_launches(torch.device("cpu")) < 1.0

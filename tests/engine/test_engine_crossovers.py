"""An engine takes the faster form of a computation as the machine's profile has it; without one it measures it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ambidex import EngineConfig, SamplingParams
from ambidex.core.config import DTypeChoice
from ambidex.core.dtypes import DType
from ambidex.engine.compose import build_engine
from ambidex.engine.compose import weights as compose_weights
from ambidex.engine.compose.crossovers import Crossovers, find_crossovers
from ambidex.engine.engine import Engine
from ambidex.hw.presets import make_profile
from ambidex.hw.profile import Curve, HardwareProfile, Machine, NeuronRates
from ambidex.hw.profile_file import default_path, profile_json, write_json
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.linear import LEAST_TILED_TOKENS, LinearPool, Matrices
from ambidex.kernels.cpu.native import ThreadPool
from ambidex.kernels.cpu.quantized import QuantizedMatrix
from ambidex.mlp.rates import TOKENS
from ambidex.models.site_plans import RingSizes
from tiny_engine import make_engine_folder

SHEETS = make_profile("rtx3060-12g", "ddr4-2ch", "pcie3x16")
CPU = torch.device("cpu")
RATES = {"bags": 1e-11, "union": 1e-11, "dense": 1e-11, "plain": 1e-11, "screen": 5e-12, "candidate": 1e-11}


def profile_of(**seconds: float) -> HardwareProfile:
    """A machine of one thread where forms cost so many seconds a byte of rows, others 10 ps."""
    curves = {name: Curve(tuple((num, value) for num in TOKENS)) for name, value in (RATES | seconds).items()}
    rates = dict.fromkeys(("fp32", "bf16"), NeuronRates(**curves))
    cpu = replace(SHEETS.cpu, num_threads=1, neurons=rates, tiles_from={"Q4_0": 3, "Q4_K": None})
    return replace(SHEETS, cpu=cpu, source="measured by a test", date="today")


def make_engine(folder: Path, profile: HardwareProfile | None, sparsity: str = "relu", **settings: Any) -> Engine:
    config = EngineConfig(
        model=str(folder), dtype=DTypeChoice.FP32, num_threads=1, block_size=16, weights_gpu_memory="100KB",
        mlp_sparsity=sparsity, **settings,
    )  # fmt: skip
    return build_engine(config, weight_ring=RingSizes(chunk_bytes=9000, num_slots=2), profile=profile)


def answer(engine: Engine) -> tuple[int, ...]:
    engine.add(list(range(3, 20)), SamplingParams(max_output_tokens=6, temperature=0.0, ignore_eos=True))
    outputs = [output for _ in range(40) if engine.has_work for output in engine.step()]
    return tuple(outputs[-1].token_ids)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_engine_folder(tmp_path, "opt")


def test_the_profile_decides_which_rows_are_read_and_tokens_are_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("nothing is to be measured at start")

    monkeypatch.setattr(compose_weights, "measure_costs", refuse)
    dense = make_engine(folder, profile_of(bags=1.0, union=1.0))
    sparse = make_engine(folder, profile_of(dense=1.0))
    assert answer(dense) == answer(sparse)
    figures = [engine.stats.neurons for engine in (dense, sparse)]
    assert figures[0] is not None
    assert figures[1] is not None
    assert figures[0].num_rows_read == figures[0].num_rows, "all are read"
    assert figures[1].num_rows_read < figures[1].num_rows
    why = dense.report.why("compute", "mlp_sparsity")
    assert "measured by a test, today: dense above 0 % at 1" in why


def test_the_profile_decides_whether_rows_are_screened(tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "llama_relu")  # whose rows are whole blocks of an 8-bit copy
    for cost, is_screened in ((5e-12, True), (1.0, False)):
        engine = make_engine(folder, profile_of(screen=cost, candidate=1e-14), sparsity="relu-screened")
        answer(engine)
        assert engine.stats.neurons is not None
        assert (engine.stats.neurons.num_screened > 0) == is_screened


def test_without_a_profile_costs_are_measured_at_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    why = make_engine(folder, None).report.why("compute", "mlp_sparsity")
    assert "measured at start (not measured on this machine: `ambidex calibrate` does): dense above" in why


def test_data_sheets_and_other_threads_say_nothing() -> None:
    assert find_crossovers(CPU, 1, SHEETS).cpu is None
    assert "data sheets" in find_crossovers(CPU, 1, SHEETS).why
    other = find_crossovers(CPU, 2, profile_of())
    assert other.cpu is None
    assert other.why == "the profile was measured with 1 threads, these are 2"
    assert other.tiles_from == LEAST_TILED_TOKENS
    assert other.neurons(DType.BF16) is None


def test_an_old_profile_or_that_of_another_machine_is_not_used_and_the_reason_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_path({"XDG_CACHE_HOME": str(tmp_path)})
    write_json(path, profile_json(profile_of()) | {"version": 2})
    assert "version 2, version 3 is read here: measure this machine again" in find_crossovers(CPU, 1, None).why
    write_json(path, profile_json(replace(profile_of(), machine=Machine(cpu="none such", cores=1, gpu=None))))
    found = find_crossovers(CPU, 1, None)
    assert found.cpu is None
    assert "was measured on other hardware" in found.why


def test_what_is_said_of_tiles() -> None:
    known = find_crossovers(CPU, 1, profile_of()).tile_row()
    assert (known.value, known.why) == (
        "Q4_0 from 3 tokens, Q4_1 from 8 tokens, Q4_K never", "measured by a test, today",
    )  # fmt: skip
    assert Crossovers(None, "why").tile_row().value == "Q4_0 from 8 tokens, Q4_1 from 8 tokens, Q4_K from 8 tokens"


def test_a_format_has_tiles_from_the_tokens_that_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of both pools is called: on processors without tiles they compute the same."""
    pool = LinearPool(ThreadPool(1), tiles_from={"Q4_0": 3, "Q4_K": None})
    called: list[str] = []

    class Spy:
        def __init__(self, name: str, native_pool: Any) -> None:
            self._name, self._pool = name, native_pool

        def multiply(self, *args: Any, **named: Any) -> None:
            called.append(self._name)
            self._pool.multiply(*args, **named)

    monkeypatch.setattr(pool, "_vectors", Spy("vectors", pool._vectors))
    monkeypatch.setattr(pool, "_tiles", Spy("tiles", pool._tiles))
    for kind in ("Q4_0", "Q4_1", "Q4_K"):
        matrices = Matrices([QuantizedMatrix.zeros(kind, (16, 256))], [None])
        for num_tokens in (2, 3, LEAST_TILED_TOKENS):
            pool.multiply(matrices, torch.zeros(num_tokens, 256))
    assert called == ["vectors", "tiles", "tiles", "vectors", "vectors", "tiles", "vectors", "vectors", "vectors"]


@pytest.mark.skipif(native.isa() != "amx", reason="the processor has no tiles")
def test_tiles_and_vectors_differ_by_roundings_alone() -> None:
    torch.manual_seed(0)
    matrix = QuantizedMatrix.zeros("Q4_0", (32, 256))
    matrix.data.random_(0, 60)
    x = torch.randn(5, 256)
    vectors, tiles = (
        LinearPool(ThreadPool(1), tiles_from=start).multiply(Matrices([matrix], [None]), x)[0] for start in (None, 1)
    )
    assert torch.allclose(vectors, tiles, rtol=1e-3, atol=1e-3 * float(vectors.abs().max()))

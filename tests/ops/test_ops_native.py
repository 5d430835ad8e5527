"""`ambidex._native` and its door: each instruction set that this machine runs, against float64."""

import ast
import platform
import runpy
import sys
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

import ambidex
from ambidex import _native
from ambidex.core.errors import NativeModuleError, ShapeError
from ambidex.kernels.cpu import native

INF = float("inf")
EPSILON = float(np.finfo(np.float32).eps)
DIMS = [0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 128, 257]

Array = npt.NDArray[np.float32]


@pytest.fixture(params=_native.available_isas())
def isa(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make_array(shape: tuple[int, ...], *, offset: int = 0, seed: int = 0, scale: float = 1.0) -> Array:
    """Random fp32 array whose memory starts `offset` floats after an aligned address."""
    buffer = np.zeros(int(np.prod(shape)) + 32, np.float32)
    start = (-buffer.ctypes.data % 64) // 4 + offset
    array = buffer[start : start + int(np.prod(shape))].reshape(shape)
    array[...] = np.random.default_rng(seed).normal(scale=scale, size=shape)
    return array


def make_states(rows: int, dim: int, *, offset: int = 0) -> tuple[Array, Array, Array, Array]:
    """Two states; the last three rows see keys on one side or on none, and hold NaN where none was seen."""
    out_a, out_b = (make_array((rows, dim), offset=offset + i, seed=i) for i in (0, 1))
    lse_a, lse_b = (make_array((rows,), offset=offset + i, seed=i, scale=10.0) for i in (2, 3))
    lse_a[-2:], lse_b[-3:-1] = -INF, -INF
    out_a[-2:], out_b[-3:-1] = np.nan, np.nan
    return out_a, lse_a, out_b, lse_b


def merge_in_float64(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[np.ndarray, np.ndarray]:
    """The definition: softmax weights over both sides, unseen sides left out."""
    outs = np.nan_to_num(np.stack([out_a, out_b]).astype(np.float64))
    sums = np.exp(np.stack([lse_a, lse_b]).astype(np.float64))
    total = sums.sum(axis=0)
    seen = total > 0
    weights = np.divide(sums, total, out=np.zeros_like(sums), where=seen)
    lse = np.log(total, out=np.full_like(total, -np.inf), where=seen)
    return (weights[:, :, None] * outs).sum(axis=0), lse


def assert_close(got: Array, expected: np.ndarray, scale: np.ndarray) -> None:
    """Six roundings of at most half an epsilon each, and one epsilon for expf or logf: at most 4 epsilon of `scale`."""
    finite = np.isfinite(expected)
    assert np.array_equal(got[~finite], expected[~finite])
    assert np.all(np.abs(got[finite] - expected[finite]) <= 4 * EPSILON * scale[finite])


@pytest.mark.parametrize("dim", DIMS)
def test_merge_states_every_isa_odd_lengths_and_offsets_equals_float64(isa: str, dim: int) -> None:
    for offset in range(17):
        states = make_states(6, dim, offset=offset)
        out, lse = make_array((6, dim), offset=16 - offset), make_array((6,), offset=offset)
        _native.merge_states(*states, out, lse, isa=isa)
        expected_out, expected_lse = merge_in_float64(*states)
        assert_close(out, expected_out, np.abs(np.nan_to_num(states[0])) + np.abs(np.nan_to_num(states[2])))
        assert_close(lse, expected_lse, 1 + np.abs(expected_lse))


def test_merge_states_no_key_on_either_side_gives_zero_and_minus_infinity(isa: str) -> None:
    out_a, lse_a, out_b, lse_b = make_states(3, 5)
    out, lse = make_array((3, 5)), make_array((3,))
    _native.merge_states(out_a, lse_a, out_b, lse_b, out, lse, isa=isa)
    assert np.array_equal(out[1], np.zeros(5))
    assert lse[1] == -INF


def test_merge_states_no_key_on_one_side_copies_the_other_bit_for_bit(isa: str) -> None:
    out_a, lse_a, out_b, lse_b = make_states(3, 21)
    out, lse = make_array((3, 21)), make_array((3,))
    _native.merge_states(out_a, lse_a, out_b, lse_b, out, lse, isa=isa)
    assert np.array_equal(out[0], out_a[0])
    assert np.array_equal(out[2], out_b[2])
    assert (lse[0], lse[2]) == (lse_a[0], lse_b[2])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_merge_states_lse_not_finite_is_not_hidden(isa: str, bad: float, side: int) -> None:
    outs, lses = np.ones((2, 1, 9), np.float32), np.zeros((2, 1), np.float32)
    lses[side] = bad
    out, lse = np.zeros((1, 9), np.float32), np.zeros(1, np.float32)
    _native.merge_states(outs[0], lses[0], outs[1], lses[1], out, lse, isa=isa)
    assert np.isnan(lse).all()
    assert np.isnan(out).all()


def test_merge_states_lse_far_apart_neither_overflows_nor_loses_the_larger(isa: str) -> None:
    ones, twos = np.ones((1, 3), np.float32), np.full((1, 3), 2, np.float32)
    out, lse = np.zeros((1, 3), np.float32), np.zeros(1, np.float32)
    _native.merge_states(ones, np.array([3e4], np.float32), twos, np.array([-3e4], np.float32), out, lse, isa=isa)
    assert np.array_equal(out, ones)
    assert lse[0] == np.float32(3e4)


def test_merge_states_result_in_place_equals_result_apart(isa: str) -> None:
    states = make_states(7, 37, offset=3)
    out, lse = make_array((7, 37)), make_array((7,))
    _native.merge_states(*states, out, lse, isa=isa)
    _native.merge_states(*states, states[0], states[1], isa=isa)
    assert np.array_equal(states[0], out)
    assert np.array_equal(states[1], lse)


def test_merge_states_no_rows_does_nothing(isa: str) -> None:
    out, lse = np.zeros((0, 8), np.float32), np.zeros(0, np.float32)
    _native.merge_states(out, lse, out, lse, out, lse, isa=isa)


def test_merge_states_result_overlapping_in_part_is_refused() -> None:
    buffer = np.zeros(40, np.float32)
    out_a, out = buffer[:32].reshape(4, 8), buffer[8:].reshape(4, 8)
    lse = np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="out: overlaps out_a in part"):
        _native.merge_states(out_a, lse, out_a, lse, out, lse)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("lse_a", (3,)), ("out_b", (4, 7)), ("out_b", (3, 8)), ("lse_b", (5,)), ("out", (4, 9)), ("lse", (0,))],
)
def test_merge_states_shapes_differ_names_the_array_and_both_shapes(name: str, shape: tuple[int, ...]) -> None:
    arrays = {key: np.zeros((4, 8), np.float32) for key in ("out_a", "out_b", "out")}
    arrays |= {key: np.zeros(4, np.float32) for key in ("lse_a", "lse_b", "lse")}
    arrays[name] = np.zeros(shape, np.float32)
    wanted = "(4, 8)" if len(shape) == 2 else "(4,)"
    with pytest.raises(ValueError, match=rf"{name}: expected shape .*, got") as error:
        _native.merge_states(**arrays)
    assert wanted in str(error.value)
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("flaw", ["float64", "strided", "read-only result", "one axis too many"])
def test_merge_states_array_of_another_kind_is_refused_and_not_copied(flaw: str) -> None:
    good, lse = np.zeros((4, 8), np.float32), np.zeros(4, np.float32)
    read_only = np.zeros((4, 8), np.float32)
    read_only.flags.writeable = False
    flawed = {
        "float64": np.zeros((4, 8)),
        "strided": np.zeros((4, 16), np.float32)[:, ::2],
        "read-only result": read_only,
        "one axis too many": np.zeros((4, 8, 1), np.float32),
    }[flaw]
    with pytest.raises(TypeError, match="merge_states"):
        _native.merge_states(good, lse, good, lse, flawed, lse)  # type: ignore[arg-type]  # float64 is the point


def test_merge_states_unknown_isa_is_refused_with_the_available_ones() -> None:
    out, lse = np.zeros((1, 1), np.float32), np.zeros(1, np.float32)
    with pytest.raises(ValueError, match='isa: unknown "mmx"; this machine runs generic'):
        _native.merge_states(out, lse, out, lse, out, lse, isa="mmx")


def test_merge_states_running_lets_other_python_threads_run() -> None:
    out, lse = np.zeros((2048, 1024), np.float32), np.zeros(2048, np.float32)
    for _ in range(100):  # one success proves it; a held GIL gives none however often it is tried
        spans: list[tuple[float, float]] = []

        def merge(spans: list[tuple[float, float]] = spans) -> None:
            begin = time.perf_counter()
            _native.merge_states(out, lse, out, lse, out, lse)
            spans.append((begin, time.perf_counter()))

        worker = threading.Thread(target=merge)
        stamps = []
        worker.start()
        while worker.is_alive():
            stamps.append(time.perf_counter())
        worker.join()
        begin, end = spans[0]
        quarter = (end - begin) / 4  # around the call's ends a stamp says nothing
        if any(begin + quarter < stamp < end - quarter for stamp in stamps):
            return
    pytest.fail("no other thread ran during merge_states")


def test_available_isas_agree_with_the_operating_system() -> None:
    needs = {
        "generic": set(),
        "avx2": {"avx2", "fma", "f16c"},
        "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
        "avx512bf16": {"avx512_bf16", "avx512_vnni"},
        "amx": {"amx_tile", "amx_bf16", "amx_int8"},
    }  # each on top of those before it
    flags = {
        flag
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("flags") and platform.machine() == "x86_64"
        for flag in line.split(":")[1].split()
    }
    names = list(needs)
    expected = [isa for i, isa in enumerate(names) if set().union(*(needs[n] for n in names[: i + 1])) <= flags]
    assert _native.available_isas() == expected
    assert _native.isa() == expected[-1]


def test_stub_names_exactly_what_the_module_offers() -> None:
    stub = ast.parse((Path(ambidex.__file__).parent / "_native.pyi").read_text())
    declared = {node.name for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert declared == {name for name in dir(_native) if not name.startswith("_")}


def test_native_merge_states_tensors_equals_float64(isa: str) -> None:
    out_a, out_b = torch.randn(2, 5, 3, 17, generator=torch.Generator().manual_seed(0))
    lse_a, lse_b = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(1))
    out, lse = native.merge_states(out_a, lse_a, out_b, lse_b, isa=isa)
    expected_lse = torch.logaddexp(lse_a.double(), lse_b.double())
    weight_a = torch.exp(lse_a.double() - expected_lse)[..., None]
    expected_out = weight_a * out_a.double() + (1 - weight_a) * out_b.double()
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=16 * EPSILON)  # |out| up to about 4
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=16 * EPSILON)
    assert (out.shape, lse.shape) == ((5, 3, 17), (5, 3))


def test_native_merge_states_no_tokens_returns_empty() -> None:
    out, lse = native.merge_states(*(torch.zeros(0, 3, 8), torch.zeros(0, 3)) * 2)
    assert (out.shape, lse.shape) == ((0, 3, 8), (0, 3))


def test_native_merge_states_shapes_differ_raises_shape_error() -> None:
    out, lse = torch.zeros(2, 3, 8), torch.zeros(2, 3)
    with pytest.raises(ShapeError, match="lse_b"):
        native.merge_states(out, lse, out, torch.zeros(2, 4))


@pytest.mark.parametrize("flawed", [torch.zeros(2, 3, 8, dtype=torch.bfloat16), torch.zeros(3, 2, 8).transpose(0, 1)])
def test_native_merge_states_layout_of_another_kind_raises_shape_error(flawed: torch.Tensor) -> None:
    out, lse = torch.zeros(2, 3, 8), torch.zeros(2, 3)
    with pytest.raises(ShapeError, match=r"out_b: expected contiguous torch\.float32 on cpu, got torch"):
        native.merge_states(out, lse, flawed, lse)


def test_native_isa_is_the_fastest_available() -> None:
    assert native.isa() == native.available_isas()[-1]


@pytest.mark.parametrize("function", ["isa", "available_isas"])
def test_native_module_missing_raises_on_use_and_says_how_to_mend_it(
    monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    monkeypatch.delattr(ambidex, "_native")
    monkeypatch.setitem(sys.modules, "ambidex._native", None)
    door = runpy.run_path(native.__file__)
    with pytest.raises(NativeModuleError, match="make setup"):
        door[function]()

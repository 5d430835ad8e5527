"""A model whose rows are no power of 2 in tile order (heads of 80 dims: rows of 96) has a stream lane: greedy tokens
are those of a run whose keys all lie on the accelerator, whoever reads them in DRAM.

Without a GPU something plays its part: steps of fixed form in 16 bits, with a link to DRAM that is none.
"""

import random
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from test_engine_lane_presets import PARAMS, run_whole
from test_engine_splits import answers, make_prompts

from ambidex import EngineConfig
from ambidex.attention.scan_rule import ScanAlways
from ambidex.attention.streamed import why_no_stream
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.dtypes import DType
from ambidex.core.ids import Lane
from ambidex.core.policy import PolicyName
from ambidex.engine.compose import build_engine, choices, lanes, parts, root, weights
from ambidex.engine.compose.choices import Choices
from ambidex.engine.engine import Engine
from ambidex.engine.lane_preset import follow_preset
from ambidex.kernels import dispatch
from ambidex.runner.decode import DecodeForm
from tiny_engine import make_engine_folder
from triton_device import INTERPRETED

DEVICES: Final = [DeviceKind.CPU, pytest.param(DeviceKind.CUDA, marks=pytest.mark.gpu)]
IN_DRAM: Final[dict[str, Any]] = {"kv_gpu_tokens": 512, "num_sink_tokens": 0, "recent_window": 0}
"""Settings with which all whole blocks but the newest lie in DRAM."""
BOTH: Final = {**IN_DRAM, "stream_percent": 40}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("rows"), "opt_2_7b")


@pytest.fixture
def link_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream lane is refused for what the model is, and for nothing else."""

    def find_no_stream(chosen: Choices, _pools: object) -> str | None:
        return why_no_stream(chosen.spec, chosen.kv.specs)

    def keep_dtype(dtype: DType, _device: torch.device) -> DType:
        return dtype

    def follow_with_link(config: EngineConfig, *, has_link: bool) -> EngineConfig:
        assert not has_link
        return follow_preset(config, has_link=True)

    monkeypatch.setattr(lanes, "find_no_stream", find_no_stream)
    monkeypatch.setattr(root, "follow_preset", follow_with_link)
    for module in (choices, parts, weights):
        monkeypatch.setattr(module, "activation_dtype", keep_dtype)


def build(folder: Path, device: DeviceKind, name: str = "exact", **settings: Any) -> Engine:
    own: dict[str, Any] = {
        "dtype": DTypeChoice.FP16, "block_size": 16, "num_threads": 1, "max_context_len": 128, "dram_memory": 2**23,
    }  # fmt: skip
    beside: dict[str, Any] = {}
    if device is DeviceKind.CPU:
        beside = {"decode_form": DecodeForm.FIXED, "min_streamed": 10**9}
    return build_engine(
        EngineConfig(model=str(folder), device=device, policy=PolicyName(name), **own | settings), **beside
    )


def run(engine: Engine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in run_whole(engine, PARAMS)]


@pytest.mark.usefixtures("link_on_cpu")
@pytest.mark.parametrize(
    ("name", "settings", "kernel"),
    [
        pytest.param("exact", BOTH, "reference", id="exact, both lanes"),
        pytest.param("exact", BOTH, "triton", id="exact, both lanes, triton", marks=INTERPRETED),
        pytest.param("exact", {**IN_DRAM, "stream_percent": 100}, "reference", id="exact, stream lane"),
        pytest.param("flexgen", {"num_sink_tokens": 0}, "reference", id="flexgen"),
    ],
)
def test_greedy_tokens_equal_those_of_a_run_without_streamed_keys(
    name: str, settings: dict[str, Any], kernel: str, folder: Path
) -> None:
    wanted = run(build(folder, DeviceKind.CPU, stream_percent=0))
    assert wanted == answers(folder, make_prompts(), device=DeviceKind.CPU), "fp16 rounds no token away"
    engine = build(folder, DeviceKind.CPU, name, **settings)
    share = settings.get("stream_percent", 100)
    assert engine.report.value("compute", "stream_share") == f"{share / 100:.2f} of keys in DRAM"
    with dispatch.override("attend_tiles", kernel):
        assert run(engine) == wanted
    assert engine.stats.lane_bytes[Lane.STREAM] > 100_000
    assert (engine.stats.lane_bytes[Lane.CPU] > 0) is (share < 100)


@pytest.mark.usefixtures("link_on_cpu")
@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "k=int8,v=int4"])
def test_keys_in_integers_become_rows_of_80_numbers_behind_the_link(kv_dtype: str, folder: Path) -> None:
    wanted = run(build(folder, DeviceKind.CPU, kv_dtype=kv_dtype, **IN_DRAM, stream_percent=0))
    engine = build(folder, DeviceKind.CPU, kv_dtype=kv_dtype, **IN_DRAM, stream_percent=50)
    assert run(engine) == wanted
    assert engine.stats.lane_bytes[Lane.STREAM] > 10_000


@pytest.mark.parametrize("device", DEVICES)
def test_under_the_bounded_policy_the_cpu_scans_alone_and_exact_steps_have_both_lanes(
    device: DeviceKind, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if device is DeviceKind.CPU:
        request.getfixturevalue("link_on_cpu")
    rng = random.Random(5)

    class ByChance(ScanAlways):  # and so whether it is asked once or twice a step
        def is_scanned(self, num_keys: int) -> bool:
            return num_keys > 0 and rng.random() < 0.5

    for rule in ("ScanAlways", "ScanRule"):  # the second one on a GPU
        monkeypatch.setattr(lanes, rule, lambda *_, **__: ByChance(0))
    wanted = run(build(folder, device, stream_percent=0))
    careful, careless = (
        build(folder, device, "bounded", max_dropped_mass=mass, stream_percent=50, **IN_DRAM) for mass in (1e-5, 0.3)
    )
    share = careful.report.why("compute", "stream_share")
    assert share == "asked for; of scanned ones 0: the kernel scans no rows of 96 numbers, which are no power of 2"
    found = run(careful)
    if device is DeviceKind.CPU:
        assert found == wanted
    assert [answer[0] for answer in found] == [answer[0] for answer in wanted]  # later ones follow from near ties, too
    run(careless)
    for engine, mass in ((careful, 1e-5), (careless, 0.3)):
        assert engine.stats.lane_bytes[Lane.STREAM] > 0, "in steps that are exact ones"
        assert engine.stats.lane_bytes[Lane.CPU] > 0
        assert engine.stats.selection is not None
        assert engine.stats.selection.max_dropped_mass <= mass
    assert careless.stats.selection is not None
    assert careless.stats.selection.max_dropped_mass > 0.02, "in steps that scan"

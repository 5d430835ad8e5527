"""`bench/decode_weights.py`: each rival is measured, FlexGen's streaming in blocks of several batches, and recorded."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

import decode_weights
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.policy import PolicyName
from ambidex.core.units import GIB
from decode_weights import DENSE, Run, bytes_beside, make_config, make_model, make_runs

TINY = ["--shape", "tiny-opt", "--layers", "2", "--device", "cpu", "--dtype", "fp32", "--gpu-memory", "40MiB",
        "--steps", "2", "--context", "24", "--chunk", "32"]  # fmt: skip


def record_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict[str, Any]:
    output = tmp_path / "records.jsonl"
    monkeypatch.setattr("sys.argv", ["decode_weights.py", *TINY, *arguments, "--output", str(output)])
    assert decode_weights.main() == 0
    record: dict[str, Any] = json.loads(output.read_text())
    return record


def test_all_rivals_of_a_row_are_in_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["ours", "layer_split", "streamed", "flexgen", "cpu", "gpu"]
    record = record_of(tmp_path, monkeypatch, "--placement", ",".join(names), "--batches", "2", "--blocks", "1,2")
    points = record["points"]
    assert [(point["placement"], point["batch"], point["num_batches"]) for point in points] == [
        ("ours", 2, 1), ("layer_split", 2, 1), ("streamed", 2, 1), ("flexgen", 2, 1), ("flexgen", 4, 2),
        ("cpu", 2, 1), ("gpu", 2, 1),
    ]  # fmt: skip
    assert not [point["error"] for point in points if "error" in point]
    lanes = {(point["placement"], point["batch"]): point["lane_bytes"] for point in points}
    assert lanes["flexgen", 2]["cpu"] == 0
    assert lanes["flexgen", 2]["link"] > 0
    assert lanes["flexgen", 4]["link"] == lanes["flexgen", 2]["link"], "weights travel once for both batches"
    assert lanes["cpu", 2]["link"] == lanes["gpu", 2]["link"] == lanes["gpu", 2]["cpu"] == 0


def options(**changes: Any) -> argparse.Namespace:
    own = {
        "shape": "opt-30b", "layers": None, "sparsity": [DENSE], "kind": None, "context": 128, "prefill": 0,
        "chunk": 1024, "steps": 4, "dtype": DTypeChoice.BF16, "gpu_memory": 24 * GIB, "kv_gpu_percent": 100,
        "device": DeviceKind.CUDA, "placement": ["flexgen"], "batches": [64], "blocks": [1, 2],
    }  # fmt: skip
    return argparse.Namespace(**own | changes)


def test_a_block_has_the_requests_of_its_batches_and_others_have_one() -> None:
    runs = make_runs(options(placement=["ours", "flexgen"], batches=[64, 8], blocks=[1, 3]))
    assert [(run.placement, run.batch) for run in runs] == [
        ("ours", 64), ("ours", 8), ("flexgen", 64), ("flexgen", 192), ("flexgen", 8), ("flexgen", 24),
    ]  # fmt: skip
    assert str(runs[3]) == "flexgen, 192 x 128 (a block of 3 x 64), off"


def test_settings_beside_a_gpu(tmp_path: Path) -> None:
    """Only the settings: no machine of tests has the memory."""
    args = options()
    make_model(tmp_path, args)
    flexgen = make_config(tmp_path, Run(placement="flexgen", batch=64, context=128), args)
    assert flexgen.policy is PolicyName.FLEXGEN
    assert flexgen.placement is None, "the policy has a rule of its own"
    assert flexgen.dram_memory is not None
    few = make_config(tmp_path, Run(placement="flexgen", batch=1, context=128), args)
    assert few.recent_window == few.max_context_len, "keys that fit beside the weights stay on the GPU"
    whole = make_config(tmp_path, Run(placement="gpu", batch=64, context=128), args)
    assert whole.gpu_memory is not None
    assert 70 * GIB < whole.gpu_memory < 80 * GIB, "60 GB of weights, 15 GB of keys, workspace"
    assert whole.dram_memory == 0
    split = make_config(tmp_path, Run(placement="layer_split", batch=64, context=128), args)
    assert split.placement is not None
    assert split.policy is PolicyName.EXACT
    placed = json.loads(Path(split.placement).read_text())
    assert "kv" not in placed


def test_what_is_not_for_weights_grows_with_the_requests(tmp_path: Path) -> None:
    from ambidex.formats.locate import find_model
    from ambidex.formats.spec import read_spec

    args = options()
    make_model(tmp_path, args)
    spec = read_spec(find_model(str(tmp_path)))
    sizes = [
        bytes_beside(make_config(tmp_path, Run(placement="flexgen", batch=batch, context=128), args), spec, args)
        for batch in (1, 64, 128)
    ]
    assert sizes == sorted(set(sizes))
    assert sizes[-1] < 3 * GIB


@pytest.mark.parametrize("arguments", [["--blocks", "x"], ["--blocks", "0"], ["--placement", "zigzag"]])
def test_options_that_make_no_run_are_refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["decode_weights.py", *arguments])
    with pytest.raises(SystemExit, match="2"):
        decode_weights.main()

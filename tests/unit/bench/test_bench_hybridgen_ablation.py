"""`bench/hybridgen_ablation.py`: a line for each variant, held against the first; what takes too long is given up."""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

import hybridgen_ablation

TINY = ["--device", "cpu", "--dtype", "fp32", "--recent", "64", "--near", "32", "--exact-layers", "1", "--steps", "2",
        "--settle", "6"]  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, output: Path, *more: str) -> int:
    monkeypatch.setattr("sys.argv", ["hybridgen_ablation.py", *TINY, "--output", str(output), *more])
    return hybridgen_ablation.main()


def test_tiny_run_has_a_line_for_each_variant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "records.jsonl"
    assert run(monkeypatch, output, "--points", "tiny:1x300,tiny:2x130", "--percent", "10") == 0
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["variant"] for line in lines] == list(hybridgen_ablation.VARIANTS)
    full = lines[0]
    for line in lines:
        assert (line["bench"], line["shape"], line["failed"]) == ("hybridgen_ablation", "tiny", None)
        assert [(point["batch"], point["context"]) for point in line["points"]] == [(1, 300), (2, 130)]
        for point, against in zip(line["points"], full["points"], strict=True):
            assert point["step_s"]["num"] == 2
            ratio = point["step_s"]["median"] / against["step_s"]["median"]
            assert point["times_full"] == pytest.approx(ratio, rel=0.01)
    by_name = {line["variant"]: line for line in lines}
    keys = {name: line["points"][0]["attended_share"] for name, line in by_name.items()}
    assert keys["flexgen"] == keys["exact"] == 1.0
    assert 0.08 < keys["keyformer"] < 0.12, "10 % of the prompt"
    # Half of the two layers attends all keys; in the other one 30 chosen ones, 32 near ones and the step's own.
    for name in ("post", "pre", "mode-only"):
        assert keys[name] == pytest.approx((1 + 63 / 307) / 2, abs=0.02)
    assert by_name["full"]["points"][0]["num_selected"] >= 64
    assert by_name["mode-only"]["points"][0]["num_selected"] is None, "feedback may change the mode alone"
    assert by_name["pre"]["policy"] == {
        "policy": "hybridgen", "hybridgen_mode": "pre", "policy_percent": 10, "near_tokens": 32, "exact_layers": 1,
    }  # fmt: skip
    table = capsys.readouterr().out.split("tiny, 2 x 130\n")[1].splitlines()
    assert [line.split()[0] for line in table[1:]] == list(hybridgen_ablation.VARIANTS)


def test_slow_variant_is_given_up_and_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "records.jsonl"
    build = hybridgen_ablation.build

    def build_slowly(plan: hybridgen_ablation.Plan, shape: str, variant: str, folder: str) -> object:
        while variant == "post":
            time.monotonic()
        return build(plan, shape, variant, folder)

    monkeypatch.setattr(hybridgen_ablation, "build", build_slowly)
    few = ["--variants", "post,exact", "--variant-seconds", "20"]
    monkeypatch.setattr(hybridgen_ablation, "time_limit", _limit_of_post(hybridgen_ablation.time_limit))
    assert run(monkeypatch, output, "--points", "tiny:1x130", *few) == 1
    slow, other = (json.loads(line) for line in output.read_text().splitlines())
    assert (slow["points"], slow["num_left_out"]) == ([], 1)
    assert slow["failed"].startswith("it took longer than")
    assert other["failed"] is None
    assert other["points"][0]["times_full"] is None, "nothing was measured to hold it against"


def _limit_of_post(
    time_limit: Callable[[float], AbstractContextManager[None]],
) -> Callable[[float], AbstractContextManager[None]]:
    """The first limit is over soon, so that nobody waits for it here."""
    limits = iter([0.05])
    return lambda seconds: time_limit(next(limits, seconds))


def test_no_variant_begins_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "records.jsonl"
    assert run(monkeypatch, output, "--points", "tiny:1x130", "--seconds", "1e-9") == 1
    assert output.read_text() == ""
    assert capsys.readouterr().out.count("left out") == len(hybridgen_ablation.VARIANTS)


@pytest.mark.parametrize(
    "wrong",
    [
        ["--points", "tiny:8192"],
        ["--points", "none:1x20"],
        ["--variants", "full,other"],
        ["--variants", "post,full"],
        ["--percent", "0"],
        ["--seconds", "0"],
        ["--steps", "0"],
    ],
)
def test_wrong_command_line_ends_with_code_2(wrong: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["hybridgen_ablation.py", *wrong])
    with pytest.raises(SystemExit, match="2"):
        hybridgen_ablation.main()

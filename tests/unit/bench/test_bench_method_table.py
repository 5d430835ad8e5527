"""The table of methods of a comparison's records."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from method_table import HEAD, main, make_rows

OPENING: dict[str, Any] = {"model": "m", "engine": "ambidex", "kv_gpu_tokens": 128, "settings": {}}


def speed(variant: str, context: int, seconds: float, num_bytes: int) -> dict[str, Any]:
    figures = {"step_s": {"median": seconds}, "lane_bytes": {"gpu": num_bytes, "cpu": num_bytes},
               "became": {"compute.decode": "ordinary" if variant == "h2o" else "captured"}}  # fmt: skip
    cell = {**OPENING, "kind": "speed", "variant": variant, "context": context, "batch": 1}
    return {"cell": cell, "status": "done", "figures": figures}


def quality(variant: str, context: int, top1: float) -> dict[str, Any]:
    agreement = {"top1_equal": top1, "mean_kl": 0.02, "perplexity": 1.0, "exact_perplexity": 1.0}
    cell = {**OPENING, "kind": "quality", "variant": variant, "context": context, "batch": None, "kv_gpu_tokens": None}
    return {"cell": cell, "status": "done", "figures": {"agreement": agreement}}


LINES = [
    speed("exact", 64, 0.010, 1000), speed("h2o", 64, 0.5, 200), speed("h2o", 64, 0.020, 200), quality("h2o", 64, 0.9),
    speed("exact", 128, 0.1, 5), {**speed("quest", 64, 1.0, 1), "status": "failed", "reason": "r"},
]  # fmt: skip


def test_rows_hold_a_point_against_exact_with_the_last_figures() -> None:
    rows = make_rows(LINES, model=None, context=64, batch=1)
    assert rows == [
        ["`exact`", "recorded", "10", "1.00", "100 %", "–", "–"],
        ["`h2o`", "op by op", "20", "0.50", "20 %", "90.0 %", "2.0e-02"],
    ]
    assert all(len(row) == len(HEAD) for row in rows)
    assert make_rows(LINES, model="other", context=64, batch=1) == []
    assert make_rows(LINES[1:2], model="m", context=64, batch=1)[0][3:5] == ["–", "–"], "without exact no ratio"


def test_command_prints_markdown_or_says_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cells.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    monkeypatch.setattr(sys, "argv", ["method_table.py", str(file), "--context", "64"])
    assert main() == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| `exact` | recorded | 10 | 1.00 | 100 % | – | – |",
        "| `h2o` | op by op | 20 | 0.50 | 20 % | 90.0 % | 2.0e-02 |",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["method_table.py", str(file), "--context", "65"])
    assert main() == 2
    assert "has no speed of context 65, batch 1 of such a model: it has m" in capsys.readouterr().err

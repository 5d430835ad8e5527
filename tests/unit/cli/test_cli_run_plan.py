"""What lies where and how long steps should take is said on stderr, and what came of it; stdout has answers alone."""

import json
from pathlib import Path

import pytest
from fake_llm import FakeLLM, run_ambidex

from ambidex.core.ids import Tier
from ambidex.core.units import GIB
from ambidex.engine.run_plan import DecodeOutcome, PredictedStep, RunPlan, RunPlanRow

ROWS = (
    RunPlanRow(tier=Tier.GPU, read_by="GPU", weights_bytes=15 * GIB, kv_bytes=GIB, busy_s=0.0121),
    RunPlanRow(tier=Tier.DRAM, read_by="CPU", weights_bytes=12 * GIB, kv_bytes=2 * GIB, busy_s=0.17),
    RunPlanRow(tier=Tier.DRAM, read_by="link", weights_bytes=9 * GIB, kv_bytes=0, busy_s=0.16),
)
STEPS = (
    PredictedStep(batch=1, context=2048, step_s=0.18, binds="CPU"),
    PredictedStep(batch=8, context=2048, step_s=0.22, binds="link"),
)
PLAN = RunPlan(rows=ROWS, steps=STEPS)
OUTCOME = DecodeOutcome(num_steps=255, measured_s=0.2, batch=1.0, context=812, predicted_s=0.16)
SHOWN = """\
tier  read by  weights   keys and values, up to  busy in a step
gpu   GPU      15.0 GiB  1.0 GiB                 12.1 ms
dram  CPU      12.0 GiB  2.0 GiB                 170 ms
dram  link     9.0 GiB                           160 ms
decode: 180 ms a step predicted for 1 x 2048 tokens (5.6 tokens/s, waits for CPU); \
220 ms a step predicted for 8 x 2048 tokens (36.4 tokens/s, waits for link)
"""
MEASURED = "decode: 200 ms a step measured, 160 ms predicted (+25%), mean of 255 steps of 1 x 812 tokens\n"


def llm(**changes: object) -> FakeLLM:
    return FakeLLM(**{"plan": PLAN, "outcome": OUTCOME} | changes)


def test_a_run_begins_with_the_table_and_ends_with_predicted_against_measured() -> None:
    result = run_ambidex("generate", "m", "p", llm=llm())
    assert (result.stdout, result.stderr) == ("Hello wörld!\n", SHOWN + MEASURED)
    result = run_ambidex("chat", "m", llm=llm(), stdin="hi\n")
    assert (result.stdout, result.stderr) == ("Hello wörld!\n", SHOWN + MEASURED)


def test_a_file_of_prompts_has_it_too_and_its_answers_have_not(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "p"}\n')
    result = run_ambidex("generate", "m", "--jsonl", str(source), "--output", str(target), llm=llm())
    assert result.stdout == ""
    assert result.stderr.startswith(SHOWN + MEASURED)
    result = run_ambidex("generate", "m", "--jsonl", str(source), "--output", "-", llm=llm())
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["Hello wörld!"]


@pytest.mark.parametrize(
    "args", [("generate", "m", "p", "--quiet"), ("generate", "m", "p", "-q"), ("generate", "m", "p", "--json")]
)
def test_quiet_runs_and_json_say_nothing(args: tuple[str, ...]) -> None:
    assert run_ambidex(*args, llm=llm()).stderr == ""
    assert run_ambidex(*args[:3], llm=llm(), env={"AMBIDEX_QUIET": "1"}).stderr == ""


def test_where_all_lies_on_the_accelerator_nothing_is_said() -> None:
    assert run_ambidex("generate", "m", "p", llm=llm(plan=None)).stderr == ""


def test_without_a_prediction_the_reason_is_said_and_what_was_measured() -> None:
    rows = tuple(RunPlanRow(tier=row.tier, read_by=row.read_by, weights_bytes=row.weights_bytes,
                            kv_bytes=row.kv_bytes, busy_s=None) for row in ROWS)  # fmt: skip
    outcome = DecodeOutcome(num_steps=1, measured_s=1.25, batch=2.5, context=10, predicted_s=None)
    result = run_ambidex(
        "generate", "m", "p", llm=llm(plan=RunPlan(rows=rows, why_not="`gpu_memory` is odd"), outcome=outcome)
    )
    lines = result.stderr.splitlines()
    assert lines[0] == "tier  read by  weights   keys and values, up to"
    assert lines[-2] == "decode: not predicted: --gpu-memory is odd"
    assert lines[-1] == "decode: 1.25 s a step measured, mean of 1 steps of 2.5 x 10 tokens"


def test_a_run_without_a_decode_step_ends_without_a_line() -> None:
    assert run_ambidex("generate", "m", "p", llm=llm(outcome=None)).stderr == SHOWN

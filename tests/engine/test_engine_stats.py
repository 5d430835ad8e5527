"""Statistics: seconds and tokens of prefill and of decode; and what the report says of settings that were adjusted."""

import pytest

from ambidex.core.config import EngineConfig
from ambidex.core.ids import RequestId
from ambidex.core.step import SampledToken, ScheduledRequest, StepPlan, StepResult
from ambidex.engine.kv_report import region_rows
from ambidex.engine.stats import EngineStats


def request(name: str, num_tokens: int) -> ScheduledRequest:
    return ScheduledRequest(
        request_id=RequestId(name), token_ids=(1,) * num_tokens, start=0, blocks=(), is_sampled=True
    )


def result(*names: str, seconds: float) -> StepResult:
    return StepResult(tokens={RequestId(name): SampledToken(token_id=1) for name in names}, seconds={"total": seconds})


def test_a_step_with_a_chunk_counts_for_prefill_and_others_for_decode() -> None:
    stats = EngineStats()
    stats.record(StepPlan(requests=(request("a", 7),)), result("a", seconds=1.0))
    stats.record(StepPlan(requests=(request("a", 1), request("b", 5))), result("a", "b", seconds=2.0))
    stats.record(StepPlan(requests=(request("a", 1), request("b", 1))), result("a", "b", seconds=4.0))
    stats.record(StepPlan(), result(seconds=8.0))  # moves alone
    assert (stats.num_prefill_tokens, stats.prefill_seconds) == (12, 3.0)
    assert (stats.num_decode_tokens, stats.decode_seconds) == (2, 4.0)
    assert stats.num_output_tokens == 5


def rows(num_gpu_blocks: int, **settings: int) -> dict[str, tuple[str, str]]:
    config = EngineConfig(model="any", block_size=16, num_sink_tokens=16, **settings)  # type: ignore[arg-type]
    found = region_rows(config, num_gpu_blocks=num_gpu_blocks, max_context_len=1000)
    return {row.name: (row.value, row.why) for row in found}


def test_report_says_that_tokens_were_rounded_to_blocks() -> None:
    assert rows(7, kv_gpu_tokens=100)["kv_gpu_tokens"] == (
        "112 tokens", "100 were asked for: rounded up to blocks of 16",
    )  # fmt: skip
    assert "kv_gpu_tokens" not in rows(7, kv_gpu_tokens=112)


@pytest.mark.parametrize(
    ("num_gpu_blocks", "value"),
    [
        (10, "up to 80 tokens"),  # 64 tokens touch five blocks of 16, unless they begin with one
        (6, "up to 80 tokens"),
        (5, "at most 64 tokens"),
        (2, "at most 16 tokens"),
        (1, "at most 16 tokens"),
        (0, "at most 0 tokens"),
    ],
)
def test_report_says_what_the_recent_window_became(num_gpu_blocks: int, value: str) -> None:
    found, why = rows(num_gpu_blocks, recent_window=64)["recent_window"]
    assert found == value
    assert "64 were asked for" in why

"""flexgen and moe_lightning attend all keys: greedy tokens are those of `exact`, and the lanes that the method names do
the work."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_engine_splits import LENGTHS, NUM_OUTPUT, SPLITS, answers, make_prompts

from ambidex import LLM, EngineConfig, SamplingParams
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.errors import ConfigError
from ambidex.core.ids import Fallback, Lane, Tier
from ambidex.core.kv_spec import STEP_MOST_SHARE
from ambidex.core.policy import LANE_PRESETS, PolicyName
from ambidex.core.request import MAX_LOGPROBS
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.engine.lane_preset import follow_preset, most_streamed_share
from ambidex.engine.outputs import RequestOutput
from ambidex.models.divided import RingSizes
from ambidex.runner.decode import DecodeForm
from tiny_engine import make_engine_folder

NAMES = list(LANE_PRESETS)
FAMILIES = ("llama", "opt", "opt_2_7b", "qwen3", "falcon_7b")
RING = RingSizes(chunk_bytes=9000, num_slots=2)
PARAMS = SamplingParams(max_output_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)


def run(engine: Engine) -> list[tuple[int, ...]]:
    """Greedy tokens of all prompts, which are computed together."""
    return [output.token_ids for output in run_whole(engine, PARAMS)]


def run_whole(engine: Engine, params: SamplingParams) -> list[RequestOutput]:
    ids, last = [engine.add(prompt, params) for prompt in make_prompts()], {}
    while engine.has_work:
        last |= {output.request_id: output for output in engine.step()}
    assert not [output.error for output in last.values() if output.error]
    return [last[request_id] for request_id in ids]


def assert_equal_but_for_rounding(got: RequestOutput, wanted: RequestOutput, tolerance: float) -> None:
    """Log-probabilities are as near as that up to the first token that differs, which must have been a close call."""
    assert got.logprobs is not None
    assert wanted.logprobs is not None
    for ours, theirs in zip(got.logprobs, wanted.logprobs, strict=True):
        likely = dict(theirs.top_logprobs)
        assert ours.token_id in likely
        assert ours.logprob == pytest.approx(likely[ours.token_id], abs=tolerance)
        if ours.token_id != theirs.token_id:
            assert theirs.logprob - likely[ours.token_id] <= 2 * tolerance
            return


def build(folder: Path, name: str, *, device: DeviceKind = DeviceKind.CPU, **settings: Any) -> Engine:
    parts = {part: settings.pop(part) for part in ("weight_ring", "decode_form") if part in settings}
    own = {"dtype": DTypeChoice.FP32, "block_size": 16, "num_threads": 1} | settings
    return build_engine(EngineConfig(model=str(folder), policy=PolicyName(name), device=device, **own), **parts)


@pytest.mark.parametrize("split", [{}, *SPLITS.values()], ids=["as the policy has it", *SPLITS])
@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_those_of_full_attention(
    name: str, variant: str, split: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_engine_folder(tmp_path, variant)
    wanted = run(build(folder, "exact"))
    assert run(build(folder, name, **split)) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("split", [{}, *SPLITS.values()], ids=["as the policy has it", *SPLITS])
@pytest.mark.parametrize("variant", FAMILIES)
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_answers_equal_those_of_full_attention_but_for_rounding(
    name: str, variant: str, split: dict[str, Any], tmp_path: Path
) -> None:
    """In fp16: the stream lane reads no fp32, and lanes that add up in another order round otherwise."""
    folder = make_engine_folder(tmp_path, variant)
    own: dict[str, Any] = {"device": DeviceKind.CUDA, "dtype": DTypeChoice.FP16}
    params = replace(PARAMS, logprobs=MAX_LOGPROBS)
    wanted = run_whole(build(folder, "exact", **own), params)
    for ours, theirs in zip(run_whole(build(folder, name, **own, **split), params), wanted, strict=True):
        assert_equal_but_for_rounding(ours, theirs, tolerance=0.02)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "k=int8,v=int4"])
@pytest.mark.parametrize("name", NAMES)
def test_keys_in_integers_are_attended_as_full_attention_over_them(name: str, kv_dtype: str, tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    wanted = run(build(folder, "exact", kv_dtype=kv_dtype))
    assert run(build(folder, name, kv_dtype=kv_dtype)) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "k=int8,v=int4"])
@pytest.mark.parametrize("dtype", [DTypeChoice.FP16, DTypeChoice.FP32])
@pytest.mark.parametrize("variant", ["llama", "opt_2_7b"])
def test_flexgen_on_a_gpu_moves_keys_in_integers_over_the_link(
    variant: str, dtype: DTypeChoice, kv_dtype: str, tmp_path: Path
) -> None:
    """FlexGen's KV in few bits. The rounding of the rows is the same whoever reads them."""
    folder = make_engine_folder(tmp_path, variant)
    own: dict[str, Any] = {"device": DeviceKind.CUDA, "dtype": dtype, "kv_dtype": kv_dtype, "num_sink_tokens": 0}
    params = replace(PARAMS, logprobs=MAX_LOGPROBS)
    wanted = run_whole(build(folder, "exact", stream_percent=0, recent_window=0, **own), params)
    engine = build(folder, "flexgen", **own)
    for ours, theirs in zip(run_whole(engine, params), wanted, strict=True):
        assert_equal_but_for_rounding(ours, theirs, tolerance=0.02)
    assert engine.report.value("compute", "stream_share").startswith("1.00")
    assert engine.stats.lane_bytes[Lane.STREAM] > 0


@pytest.mark.gpu
def test_on_a_gpu_keys_in_integers_are_read_by_the_cpu_unless_the_link_is_asked_for(tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    own: dict[str, Any] = {"device": DeviceKind.CUDA, "dtype": DTypeChoice.FP16, "kv_dtype": "int4"}
    assert build(folder, "exact", **own).report.value("compute", "stream_share").startswith("0.00")
    assert build(folder, "exact", stream_percent=50, **own).report.value("compute", "stream_share").startswith("0.50")


@pytest.mark.parametrize("form", [None, DecodeForm.FIXED])
@pytest.mark.parametrize("name", NAMES)
def test_weights_that_do_not_fit_travel_and_the_cpu_multiplies_none(
    name: str, form: DecodeForm | None, tmp_path: Path
) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    wanted = run(build(folder, "exact"))
    engine = build(folder, name, weights_gpu_memory="100KB", weight_ring=RING, decode_form=form)
    assert "over the link" in engine.report.value("compute", "weights_placed")
    assert "multiplied by the CPU" not in engine.report.value("compute", "weights_placed")
    assert run(engine) == wanted


@pytest.mark.gpu
def test_on_a_gpu_flexgen_moves_weights_and_keys_once_for_all_requests_of_a_step(tmp_path: Path) -> None:
    """Its zig-zag: a block's batches are computed as one, so a step's weights cross the link once."""
    folder = make_engine_folder(tmp_path, "llama")
    own: dict[str, Any] = {"device": DeviceKind.CUDA, "dtype": DTypeChoice.FP16, "num_sink_tokens": 0}
    params = replace(PARAMS, logprobs=MAX_LOGPROBS)
    wanted = run_whole(build(folder, "exact", **own), params)
    engine = build(folder, "flexgen", weights_gpu_memory="100KB", weight_ring=RING, **own)
    for ours, theirs in zip(run_whole(engine, params), wanted, strict=True):
        assert_equal_but_for_rounding(ours, theirs, tolerance=0.02)
    assert "over the link" in engine.report.value("compute", "weights_placed")
    assert engine.stats.lane_bytes[Lane.STREAM] > 0
    lanes = engine.core.executor.decode_steps.weight_lanes
    assert lanes.num_bytes(1) == lanes.num_bytes(len(LENGTHS)), "whatever the batch, the same bytes"
    assert lanes.num_bytes(1)[Lane.CPU] == 0


def test_flexgens_buffers_may_hold_all_keys_of_a_step() -> None:
    config = EngineConfig(model="m")
    shares = {name: most_streamed_share(replace(config, policy=PolicyName(name))) for name in ("exact", *NAMES)}
    assert shares == {"exact": STEP_MOST_SHARE, "flexgen": 1.0, "moe_lightning": STEP_MOST_SHARE}


@pytest.mark.parametrize("name", NAMES)
def test_whole_blocks_lie_in_dram_unless_the_settings_say_otherwise(name: str, tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    engine = build(folder, name, num_sink_tokens=0)
    run(engine)
    longest = (max(LENGTHS) + NUM_OUTPUT) // 16
    assert engine.stats.peak_kv_bytes[Tier.DRAM] >= longest * engine.figures.kv[Tier.DRAM].bytes_per_block
    assert engine.stats.lane_bytes[Lane.CPU] > 0
    windowed = build(folder, name, recent_window=512)
    run(windowed)
    assert windowed.stats.peak_kv_bytes[Tier.DRAM] == 0


def test_without_a_gpu_flexgen_says_that_there_is_no_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    engine = build(folder, "flexgen")
    assert engine.stats.fallbacks[Fallback.NO_LINK] == 1
    assert caplog.text.count("policy flexgen moves keys in DRAM to a GPU in every step, and there is no GPU") == 1
    assert Fallback.NO_LINK not in build(folder, "moe_lightning").stats.fallbacks


def test_beside_a_gpu_flexgen_reads_all_keys_over_the_link_and_moe_lightning_none() -> None:
    config = EngineConfig(model="m", num_sink_tokens=4)
    followed = {
        name: follow_preset(replace(config, policy=PolicyName(name)), has_link=True) for name in ("exact", *NAMES)
    }
    assert {name: own.stream_percent for name, own in followed.items()} == {
        "exact": None, "flexgen": 100, "moe_lightning": 0,
    }  # fmt: skip
    assert [own.recent_window for own in followed.values()] == [None, 0, 0], "all whole blocks lie in DRAM"
    assert all(own.num_sink_tokens == 4 for own in followed.values())
    asked = replace(config, policy=PolicyName.FLEXGEN, recent_window=512)
    assert follow_preset(asked, has_link=True).recent_window == 512
    assert follow_preset(asked, has_link=False).stream_percent is None, "without a GPU nobody reads over a link"


@pytest.mark.parametrize("name", NAMES)
def test_answers_share_a_prefix_cache(name: str, tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    prompts = make_prompts()
    wanted = answers(folder, prompts)
    config = EngineConfig(
        model=str(folder), dtype=DTypeChoice.FP32, policy=PolicyName(name), prefix_cache_percent=100, block_size=16
    )
    with LLM(config) as llm:
        for _ in range(2):
            assert [output.token_ids for output in llm.generate(prompts, PARAMS)] == wanted
        assert llm.stats().num_cached_tokens > 0


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["llama", "opt_2_7b"])
@pytest.mark.parametrize("name", NAMES)
def test_on_a_gpu_the_lane_that_the_method_names_reads_all_keys_in_dram(
    name: str, variant: str, tmp_path: Path
) -> None:
    folder = make_engine_folder(tmp_path, variant)
    engine = build(folder, name, device=DeviceKind.CUDA, dtype=DTypeChoice.BF16, num_sink_tokens=0)
    run(engine)
    share = engine.report.value("compute", "stream_share")
    if name == PolicyName.FLEXGEN:
        assert share.startswith("1.00")
        assert engine.stats.lane_bytes[Lane.STREAM] > 0
    else:
        assert share.startswith("0.00")
        assert engine.stats.lane_bytes[Lane.CPU] > 0


@pytest.mark.gpu
def test_flexgen_on_a_gpu_without_a_stream_lane_is_refused(tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    with pytest.raises(ConfigError, match="`policy` flexgen reads all keys in DRAM over the link, which cannot be had"):
        build(folder, "flexgen", device=DeviceKind.CUDA)  # K and V in fp32

"""Greedy tokens do not depend on where the KV cache lies, how it is cut, or who else is computed in the same step."""

import random
from pathlib import Path

import pytest

from ambidex import LLM, EngineConfig, SamplingParams
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.ids import Lane
from ambidex.engine.compose import build_engine
from tiny_engine import make_engine_folder
from tiny_models import VARIANTS, VOCAB_SIZE

NUM_OUTPUT = 16
LENGTHS = (1, 5, 16, 17, 33, 40, 63, 90)
PARAMS = SamplingParams(max_output_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)
SPLITS: dict[str, dict[str, int | None]] = {
    "none on the accelerator": {"kv_gpu_tokens": 0},
    "one block": {"kv_gpu_tokens": 1},
    "sink and short window": {"kv_gpu_tokens": 512, "num_sink_tokens": 4, "recent_window": 8},
    "window without sink": {"kv_gpu_tokens": 512, "num_sink_tokens": 0, "recent_window": 20},
    "pressure": {"kv_gpu_tokens": 64, "num_sink_tokens": 8},
    "almost all": {"kv_gpu_tokens": 96, "num_sink_tokens": 8, "recent_window": 64},
}
DEVICES = [DeviceKind.CPU, pytest.param(DeviceKind.CUDA, marks=pytest.mark.gpu)]


def cases(variant: str) -> list[tuple[str, dict[str, int]]]:
    """Each split with one of the block sizes and chunks, which differs from variant to variant: together the variants
    meet each split with each size."""
    sizes = [{"block_size": size, "max_tokens_per_step": chunk} for size in (4, 16, 64) for chunk in (512, 7)]
    first = list(VARIANTS).index(variant)
    return [(name, sizes[(first + place) % len(sizes)]) for place, name in enumerate(SPLITS)]


def make_prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def answers(folder: Path, prompts: list[list[int]], **settings: object) -> list[tuple[int, ...]]:
    """Greedy tokens of each prompt, in fp32."""
    config = EngineConfig(model=str(folder), dtype=DTypeChoice.FP32, **settings)  # type: ignore[arg-type]
    with LLM(config) as llm:
        return [output.token_ids for output in llm.generate(prompts, PARAMS)]


def alone(folder: Path, prompts: list[list[int]], **settings: object) -> list[tuple[int, ...]]:
    """Greedy tokens of each prompt when no other shares its steps."""
    config = EngineConfig(model=str(folder), dtype=DTypeChoice.FP32, **settings)  # type: ignore[arg-type]
    with LLM(config) as llm:
        return [llm.generate([prompt], PARAMS)[0].token_ids for prompt in prompts]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_under_every_split_equal_unsplit_run(variant: str, device: DeviceKind, tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, variant)
    prompts = make_prompts()
    wanted = alone(folder, prompts, device=device)
    assert len(set(wanted)) > 1, "the model answers every prompt alike: the test would prove nothing"
    for name, sizes in cases(variant):
        got = answers(folder, prompts, device=device, **sizes, **SPLITS[name])
        assert got == wanted, f"{name}, {sizes}, together"
    for name, split in SPLITS.items():
        assert alone(folder, prompts[-1:], device=device, block_size=4, **split) == wanted[-1:], f"{name}, alone"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", ["llama", "qwen2_windows", "opt_2_7b"])
def test_greedy_tokens_with_keys_streamed_from_dram_equal_unsplit_run(
    variant: str, device: DeviceKind, tmp_path: Path
) -> None:
    """Chunks of prompts over keys that lie in DRAM, beside requests that decode; block size and chunk fit ill."""
    folder = make_engine_folder(tmp_path, variant)
    prompts = make_prompts()
    wanted = alone(folder, prompts, device=device)
    for chunk, split in ((23, "none on the accelerator"), (48, "sink and short window"), (30, "pressure")):
        config = EngineConfig(
            model=str(folder), dtype=DTypeChoice.FP32, device=device, block_size=16, max_tokens_per_step=chunk,
            **SPLITS[split],  # type: ignore[arg-type]
        )  # fmt: skip
        engine = build_engine(config, min_streamed=2)
        ids, answers = [engine.add(prompt, PARAMS) for prompt in prompts], {}
        while engine.has_work:
            answers |= {output.request_id: output for output in engine.step()}
        assert [answers[request_id].token_ids for request_id in ids] == wanted, split
        assert engine.stats.lane_bytes[Lane.STREAM] > 0
        assert engine.stats.lane_bytes[Lane.CPU] > 0
        assert engine.stats.num_failed_moves == 0


def test_greedy_tokens_when_blocks_run_out_equal_unsplit_run(tmp_path: Path) -> None:
    folder = make_engine_folder(tmp_path, "llama")
    prompts = make_prompts()
    wanted = alone(folder, prompts)
    config = EngineConfig(
        model=str(folder), dtype=DTypeChoice.FP32, block_size=4, kv_gpu_tokens=32, dram_memory=72 * 1536,
        max_context_len=120,
    )  # fmt: skip
    with LLM(config) as llm:
        got = [output.token_ids for output in llm.generate(prompts, PARAMS)]
        num_preemptions = llm.stats().num_preemptions
    assert num_preemptions > 0, "nothing was preempted: the test would prove nothing"
    assert got == wanted

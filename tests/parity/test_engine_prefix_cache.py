"""Greedy tokens do not depend on what the prefix cache has, wherever its blocks lie."""

import random
from pathlib import Path

import pytest
from test_engine_splits import DEVICES, SPLITS

from ambidex import LLM, EngineConfig, SamplingParams
from ambidex.core.config import DeviceKind, DTypeChoice
from ambidex.core.errors import CopyError
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.engine.outputs import RequestOutput
from ambidex.storage.copy import copy_block
from ambidex.storage.kv_pool import KVPool
from tiny_engine import make_engine_folder
from tiny_models import VOCAB_SIZE

PARAMS = SamplingParams(max_output_tokens=12, temperature=0.0, ignore_eos=True)
VARIANTS = ("llama", "qwen2_windows", "falcon_7b")


def make_prompts() -> list[list[int]]:
    """Prompts of three families that begin alike, up to anywhere in a block; some are the same, or continue others."""
    rng = random.Random(11)
    families = [[rng.randrange(3, VOCAB_SIZE) for _ in range(90)] for _ in range(3)]
    prompts = []
    for length in (70, 16, 33, 70, 48, 64, 17, 90, 5, 70):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(0, 9))]
        prompts.append([*rng.choice(families)[:length], *own][:90])
    return prompts


def config_of(folder: Path, device: DeviceKind, **settings: object) -> EngineConfig:
    return EngineConfig(model=str(folder), dtype=DTypeChoice.FP32, device=device, **settings)  # type: ignore[arg-type]


def run(engine: Engine, prompts: list[list[int]]) -> list[RequestOutput]:
    ids, outputs = [engine.add(prompt, PARAMS) for prompt in prompts], {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    return [outputs[request_id] for request_id in ids]


def test_turns_of_a_conversation_begin_behind_what_is_cached(tmp_path: Path) -> None:
    engine = build_engine(
        config_of(make_engine_folder(tmp_path), DeviceKind.CPU, block_size=4, prefix_cache_percent=100)
    )
    prompt = make_prompts()[0]
    first = run(engine, [prompt])[0]
    assert first.num_cached_tokens == 0
    whole = [*prompt, *first.token_ids]
    second = run(engine, [[*whole, 5, 6, 7]])[0]
    assert second.num_cached_tokens == (len(whole) - 1) // 4 * 4  # the last token of an answer is not computed
    assert engine.stats.num_cached_tokens == second.num_cached_tokens
    assert engine.stats.cached_bytes.values()
    assert sum(engine.stats.kv_bytes.values()) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_with_a_cache_equal_those_without_under_every_split(
    variant: str, device: DeviceKind, tmp_path: Path
) -> None:
    folder = make_engine_folder(tmp_path, variant)
    prompts = make_prompts()
    with LLM(config_of(folder, device)) as llm:
        wanted = [llm.generate([prompt], PARAMS)[0].token_ids for prompt in prompts]
    assert len(set(wanted)) > 4, "the model answers every prompt alike: the test would prove nothing"
    for name, split in SPLITS.items():
        for block_size, chunk in ((4, 512), (16, 23)):
            config = config_of(
                folder, device, block_size=block_size, max_tokens_per_step=chunk, prefix_cache_percent=100, **split
            )
            engine = build_engine(config)
            for turn in range(3):  # computed; found; found in part, in an order that mixes tiers and readers
                random.Random(turn).shuffle(order := list(range(len(prompts))))
                got = dict(zip(order, run(engine, [prompts[idx] for idx in order]), strict=True))
                assert [got[idx].token_ids for idx in range(len(prompts))] == wanted, f"{name}, {block_size}, {turn}"
            assert engine.stats.num_cached_tokens > len(prompts[0])
            assert engine.stats.num_cache_mismatches == 0
            assert engine.drop_cached() > 0
            engine.core.scheduler.check()


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "k=int8,v=int4"])
def test_integer_tokens_of_prompts_computed_in_the_same_chunks_equal_those_without(
    kv_dtype: str, tmp_path: Path
) -> None:
    """Attention over integers rounds by which keys a chunk has computed itself: not if chunks are blocks."""
    folder = make_engine_folder(tmp_path)
    answers = {}
    for percent in (0, 100):
        config = config_of(
            folder, DeviceKind.CPU, block_size=16, kv_gpu_tokens=48, num_sink_tokens=16, recent_window=16,
            max_tokens_per_step=16, prefix_cache_percent=percent, kv_dtype=kv_dtype,
        )  # fmt: skip
        engine = build_engine(config)
        answers[percent] = [run(engine, [prompt])[0].token_ids for prompt in make_prompts() * 2]
    assert engine.stats.num_cached_tokens > 0
    assert engine.stats.num_moves > 0
    assert answers[100] == answers[0]


def test_greedy_tokens_when_the_cache_is_too_small_for_all_equal_those_without(tmp_path: Path) -> None:
    """Blocks are evicted, moved and found by turns; requests are preempted; every third copy fails."""
    folder = make_engine_folder(tmp_path)
    prompts = make_prompts()
    calls = []

    def copy_most(source: KVPool, source_id: int, target: KVPool, target_id: int) -> None:
        calls.append(source_id)
        if len(calls) % 3 == 0:
            target.k[:, :, target_id] = 1  # a copy that died half way
            raise CopyError("injected")
        copy_block(source, source_id, target, target_id)

    answers = {}
    for percent in (0, 100):
        config = config_of(
            folder, DeviceKind.CPU, block_size=4, kv_gpu_tokens=48, dram_memory=72 * 1536, max_context_len=120,
            max_tokens_per_step=40, prefix_cache_percent=percent,
        )  # fmt: skip
        engine = build_engine(config, copy=copy_most)
        answers[percent] = [
            {tuple(prompt): output.token_ids for prompt, output in zip(turn, run(engine, turn), strict=True)}
            for turn in (prompts[place:] + prompts[:place] for place in range(4))
        ]
        engine.core.scheduler.check()
    stats = engine.stats
    assert min(stats.num_evicted_blocks, stats.num_cached_tokens, stats.num_failed_moves, stats.num_preemptions) > 0
    assert answers[100] == answers[0]

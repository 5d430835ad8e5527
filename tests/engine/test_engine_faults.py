"""One bad request, copy or allocation harms only its own request."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ambidex import LLM, EngineConfig, FinishReason, SamplingParams
from ambidex.attention.tiered import TieredAttention
from ambidex.core.config import Graphs
from ambidex.core.errors import CopyError
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.engine.outputs import RequestOutput
from ambidex.models.base import CausalLM
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import call_model
from ambidex.storage.copy import copy_block
from ambidex.storage.kv_pool import KVPool
from tiny_engine import ids_of, make_engine_folder

GREEDY = SamplingParams(max_output_tokens=10, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_engine_folder(tmp_path_factory.mktemp("faults"))


def run(engine: Engine, prompts: list[str]) -> list[RequestOutput]:
    ids = [engine.add(prompt, GREEDY) for prompt in prompts]
    outputs: dict[str, RequestOutput] = {}
    for _ in range(500):
        outputs |= {output.request_id: output for output in engine.step()}
        if not engine.has_work:
            return [outputs[request_id] for request_id in ids]
    raise AssertionError("the engine did not end")


def answers(folder: Path, prompts: list[str]) -> list[tuple[int, ...]]:
    with LLM(str(folder)) as llm:
        return [output.token_ids for output in llm.generate(list(prompts), GREEDY)]


def test_nan_logits_fail_that_request_and_others_go_on(folder: Path, tmp_path: Path) -> None:
    bad_id = ids_of("~")[0]
    poisoned = make_engine_folder(tmp_path)
    weights = load_file(poisoned / "model.safetensors")
    weights["model.embed_tokens.weight"][bad_id] = torch.nan
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    engine = build_engine(EngineConfig(model=str(poisoned)))
    good, bad, also_good = run(engine, ["hello", "he~lo", "world"])
    assert bad.finish_reason is FinishReason.ERROR
    assert "not finite" in (bad.error or "")
    assert [good.token_ids, also_good.token_ids] == answers(folder, ["hello", "world"])


def test_failing_copies_leave_blocks_where_they_were_and_answers_right(folder: Path) -> None:
    calls = []

    def copy_every_third(source: KVPool, source_id: int, target: KVPool, target_id: int) -> None:
        calls.append(source_id)
        if len(calls) % 3:
            target.k[:, :, target_id] = torch.nan  # a copy that died half way
            raise CopyError("injected")
        copy_block(source, source_id, target, target_id)

    config = EngineConfig(model=str(folder), block_size=4, kv_gpu_tokens=64, num_sink_tokens=4, recent_window=8)
    engine = build_engine(config, copy=copy_every_third)
    prompts = ["hello world, this is a longer prompt", "another one of these"]
    outputs = run(engine, prompts)
    assert engine.stats.num_failed_moves > 0
    assert engine.stats.num_moves > 0
    assert [output.token_ids for output in outputs] == answers(folder, prompts)
    assert sum(engine.stats.kv_bytes.values()) == 0


def test_out_of_memory_fails_the_largest_request_and_others_go_on(folder: Path) -> None:
    def forward(model: CausalLM, batch: InputBatch, attention: TieredAttention) -> Tensor:
        if batch.token_ids.numel() > 40:
            raise torch.OutOfMemoryError("injected")
        return call_model(model, batch, attention)

    engine = build_engine(EngineConfig(model=str(folder)), forward=forward)
    small, large, other = run(engine, ["hello", "x" * 45, "world"])
    assert large.finish_reason is FinishReason.ERROR
    assert "no memory left" in (large.error or "")
    assert [small.token_ids, other.token_ids] == answers(folder, ["hello", "world"])


def test_step_cut_short_fails_its_requests_and_the_engine_goes_on(folder: Path) -> None:
    calls = []

    def forward(model: CausalLM, batch: InputBatch, attention: TieredAttention) -> Tensor:
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return call_model(model, batch, attention)

    engine = build_engine(EngineConfig(model=str(folder), graphs=Graphs.OFF), forward=forward)
    request_id = engine.add("hello", GREEDY)
    engine.step()
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    output = engine.step()[-1]
    assert output.request_id == request_id
    assert output.error == "the step was cut short: KeyboardInterrupt"
    assert run(engine, ["world"])[0].token_ids == answers(folder, ["world"])[0]
    assert sum(engine.stats.kv_bytes.values()) == 0


def test_abort_in_prefill_and_in_decode_frees_every_tier(folder: Path) -> None:
    config = EngineConfig(
        model=str(folder), block_size=4, kv_gpu_tokens=16, num_sink_tokens=4, recent_window=8, max_tokens_per_step=8
    )
    engine = build_engine(config)
    prefilling, decoding = engine.add("x" * 60, GREEDY), engine.add("hi", GREEDY)
    engine.step()
    output = engine.abort(prefilling)
    assert output is not None
    assert output.finish_reason is FinishReason.ABORT
    while not any(output.request_id == decoding for output in engine.step()):
        pass
    engine.abort(decoding)
    assert engine.abort(decoding) is None
    while engine.has_work:
        engine.step()
    assert sum(engine.stats.kv_bytes.values()) == 0
    assert run(engine, ["hello"])[0].token_ids == answers(folder, ["hello"])[0]

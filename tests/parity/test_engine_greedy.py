"""Greedy answers of a whole engine against transformers, for every family."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ambidex import LLM, SamplingParams
from tiny_engine import add_tokenizer
from tiny_models import VARIANTS, VOCAB_SIZE, save_tiny_model

NUM_STEPS = 64
PROMPT_LENGTHS = (1, 7, 33)
TOLERANCE = 1e-4  # of the largest logit: two logits nearer than that may change places


def assert_follows(reference: PreTrainedModel, prompt: list[int], answer: tuple[int, ...]) -> None:
    """Each token is the reference's choice for what stands before it, or as good within the tolerance."""
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    gaps = logits.amax(dim=1) - chosen
    assert len(answer) == NUM_STEPS
    assert (gaps <= TOLERANCE * logits.abs().amax(dim=1)).all(), (
        f"first difference at {int(gaps.argmax())}: {gaps.max()}"
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_follow_transformers_for_64_steps(variant: str, tmp_path: Path) -> None:
    folder, reference = save_tiny_model(variant, tmp_path)
    add_tokenizer(folder)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    params = SamplingParams(max_output_tokens=NUM_STEPS, temperature=0.0, ignore_eos=True)
    with LLM(str(folder), dtype="fp32", block_size=8, kv_gpu_tokens=48, num_sink_tokens=4, recent_window=12) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_follows(reference, prompt, output.token_ids)

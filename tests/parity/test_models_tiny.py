"""Every model family against transformers, on tiny random checkpoints that go through our own loader."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ambidex.core.model_spec import ModelSpec
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec
from ambidex.models.base import CausalLM
from ambidex.models.registry import build_model
from ambidex.models.weights import load_weights
from dense_attention import DenseAttention
from tiny_models import VARIANTS, VOCAB_SIZE, save_tiny_model

CPU = torch.device("cpu")
PROMPT_LENGTHS = (1, 7, 33)
TOLERANCE = 1e-4  # of the largest logit; fp32 rounding over two layers is near 1e-6


@dataclass(frozen=True)
class Pair:
    """The same checkpoint in transformers and here."""

    spec: ModelSpec
    ours: CausalLM
    reference: PreTrainedModel


@pytest.fixture(scope="module", params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(request.param, tmp_path_factory.mktemp("tiny"))


def make_pair(variant: str, folder: Path) -> Pair:
    path, reference = save_tiny_model(variant, folder)
    source = find_model(str(path))
    spec = read_spec(source)
    ours = build_model(spec, device=CPU, dtype=torch.float32)
    load_weights(ours, spec, source, device=CPU, dtype=torch.float32)
    return Pair(spec, ours, reference)


def make_prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in PROMPT_LENGTHS]


def run_step(pair: Pair, attention: DenseAttention, tokens: list[Tensor], starts: list[int]) -> list[Tensor]:
    """Logits of one ragged step, split by request; request i's tokens stand at positions `starts[i]` and after."""
    lengths = [len(ids) for ids in tokens]
    positions = torch.cat([torch.arange(start, start + n) for start, n in zip(starts, lengths, strict=True)])
    attention.begin(lengths)
    hidden = pair.ours(torch.cat(tokens), positions, attention)
    return list(pair.ours.logits(hidden).split(lengths))


def run_reference(pair: Pair, prompt: Tensor) -> Tensor:
    with torch.no_grad():
        return pair.reference(prompt[None]).logits[0]


def compute_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def test_logits_of_a_ragged_batch_equal_transformers(pair: Pair) -> None:
    prompts = make_prompts()
    logits = run_step(pair, DenseAttention(pair.spec), prompts, [0] * len(prompts))
    errors = [compute_error(ours, run_reference(pair, prompt)) for ours, prompt in zip(logits, prompts, strict=True)]
    assert max(errors) < TOLERANCE, f"relative errors at lengths {PROMPT_LENGTHS}: {errors}"


def test_logits_of_chunks_and_single_tokens_equal_transformers(pair: Pair) -> None:
    prompt = make_prompts()[-1]
    attention = DenseAttention(pair.spec)
    chunks = prompt.split([20, 11, 1, 1])
    starts = [0, 20, 31, 32]
    logits = [run_step(pair, attention, [chunk], [start])[0] for chunk, start in zip(chunks, starts, strict=True)]
    assert compute_error(torch.cat(logits), run_reference(pair, prompt)) < TOLERANCE


def test_logits_in_bf16_are_fp32_of_the_bf16_product(tmp_path: Path) -> None:
    path, _ = save_tiny_model("llama_tied", tmp_path)
    source = find_model(str(path))
    spec = read_spec(source)
    model = build_model(spec, device=CPU, dtype=torch.bfloat16)
    load_weights(model, spec, source, device=CPU, dtype=torch.bfloat16)
    logits = model.logits(torch.ones(1, spec.hidden_size, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float())

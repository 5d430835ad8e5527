"""Falcon without rotary positions: logits and answers against transformers, wherever the keys lie."""

from pathlib import Path
from typing import Any

import pytest
import torch

from ambidex import LLM, SamplingParams
from ambidex.core.config import DeviceKind
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec
from ambidex.models.registry import build_model
from ambidex.models.weights import load_weights
from dense_attention import DenseAttention
from tiny_engine import add_tokenizer
from tiny_models import ALIBI_VARIANTS, VOCAB_SIZE, save_tiny_model

CPU = torch.device("cpu")
DEVICES = [DeviceKind.CPU, pytest.param(DeviceKind.CUDA, marks=pytest.mark.gpu)]
TOLERANCE = 1e-4  # of the largest logit
LENGTHS = (1, 7, 33, 70)
NUM_OUTPUT = 24
SPLITS: dict[str, dict[str, Any]] = {
    "all on the accelerator": {"kv_gpu_tokens": 1024},
    "none on the accelerator": {"kv_gpu_tokens": 0},
    "sink and short window": {"kv_gpu_tokens": 256, "num_sink_tokens": 16, "recent_window": 8},
    "rows": {"kv_gpu_tokens": 256, "num_sink_tokens": 4, "recent_window": 8, "block_size": 12},
    "chunks": {"kv_gpu_tokens": 64, "max_tokens_per_step": 9},
}


@pytest.mark.parametrize("variant", ALIBI_VARIANTS)
def test_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    path, reference = save_tiny_model(variant, tmp_path)
    source = find_model(str(path))
    spec = read_spec(source)
    model = build_model(spec, device=CPU, dtype=torch.float32)
    load_weights(model, spec, source, device=CPU, dtype=torch.float32)
    prompt = torch.randint(VOCAB_SIZE, (50,), generator=torch.Generator().manual_seed(0))
    attention = DenseAttention(spec)
    attention.begin([50])
    logits = model.logits(model(prompt, torch.arange(50), attention))
    with torch.no_grad():
        wanted = reference(prompt[None]).logits[0]
    assert (logits - wanted).abs().max() < TOLERANCE * wanted.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("variant", ALIBI_VARIANTS)
def test_greedy_tokens_follow_transformers_under_every_split(variant: str, device: DeviceKind, tmp_path: Path) -> None:
    folder, reference = save_tiny_model(variant, tmp_path)
    add_tokenizer(folder)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in LENGTHS]
    params = SamplingParams(max_output_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)
    for name, split in SPLITS.items():
        with LLM(str(folder), device=device, dtype="fp32", **{"block_size": 16, **split}) as llm:
            outputs = llm.generate(prompts, params)
            assert llm.report.value("compute", "decode") == "ordinary"
            assert llm.stats().peak_kv_bytes.get("dram", 0) > 0 or "all" in name  # type: ignore[call-overload]
        for prompt, output in zip(prompts, outputs, strict=True):
            answer = output.token_ids
            with torch.inference_mode():
                logits = reference(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
            gaps = logits.amax(dim=1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
            assert (gaps <= TOLERANCE * logits.abs().amax(dim=1)).all(), name

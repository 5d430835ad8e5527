"""SmolLM2-135M-Instruct with its matrices as stored (Q4_1 and Q8_0) against the same matrices dequantised to fp32."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from ambidex import LLM, SamplingParams
from ambidex.core.config import EngineConfig
from ambidex.core.errors import NativeModuleError
from ambidex.core.ids import Tier
from ambidex.engine.compose import build_engine, choices
from ambidex.formats.locate import find_model
from ambidex.formats.spec import read_spec
from ambidex.kernels.cpu import native
from ambidex.kernels.cpu.quantized import QuantizedMatrix
from ambidex.kernels.linear import LinearContext
from ambidex.models.base import CausalLM
from ambidex.models.registry import build_model
from ambidex.models.weights import load_weights
from dense_attention import DenseAttention

pytestmark = pytest.mark.timeout(1800)

CPU, META = torch.device("cpu"), torch.device("meta")
TOLERANCE = 1e-3  # of the largest logit; x is rounded to 2^-16 of the largest of 32 numbers, in each of 211 products
GREEDY = SamplingParams(max_output_tokens=48, temperature=0.0)
QUESTION = "In which year was the lighthouse built?"
PASSAGE = Path(__file__).parents[2] / "demo" / "passage.txt"


def load(*, keeps: bool) -> CausalLM:
    source = find_model("smollm2")
    spec = read_spec(source)
    model = build_model(
        spec,
        device=CPU,
        dtype=torch.float32,
        linear=LinearContext(native.ThreadPool(2)),
        matrix_device=META if keeps else None,
    )
    load_weights(model, spec, source, device=CPU, dtype=torch.float32, keeps_quantized=keeps)
    return model


def logits_of(model: CausalLM, ids: Tensor, *, chunk: int) -> Tensor:
    attention = DenseAttention(read_spec(find_model("smollm2")))
    found = []
    for start in range(0, len(ids), chunk):
        some = ids[start : start + chunk]
        attention.begin([len(some)])
        found.append(model.logits(model(some, torch.arange(start, start + len(some)), attention)))
    return torch.cat(found)


@torch.inference_mode()
def test_logits_are_those_of_dequantised_weights(real_text: str) -> None:
    """In one step of many tokens, in steps of a few, and in steps of one."""
    with LLM("smollm2", load_format="dummy", max_context_len=256) as llm:
        ids = torch.tensor(llm.tokenizer.encode(real_text[:3000]))[:300]
    kept, dense = load(keeps=True), load(keeps=False)
    expected = logits_of(dense, ids, chunk=len(ids))
    scale = expected.abs().max()
    whole = logits_of(kept, ids, chunk=len(ids))
    assert (whole - expected).abs().max() < TOLERANCE * scale
    assert (logits_of(kept, ids, chunk=150) - expected).abs().max() < TOLERANCE * scale
    assert (logits_of(kept, ids[:40], chunk=1) - expected[:40]).abs().max() < TOLERANCE * scale
    assert (whole.argmax(-1) == expected.argmax(-1)).float().mean() > 0.99


def ask(**settings: object) -> str:
    with LLM("smollm2", **settings) as llm:
        prompt = f"{PASSAGE.read_text(encoding='utf-8')}\n{QUESTION}"
        return llm.chat([{"role": "user", "content": prompt}], GREEDY).text


def test_greedy_answer_is_that_of_dequantised_weights() -> None:
    assert ask() == ask(dtype="fp32")


def test_start_report_and_ledger_say_what_is_kept() -> None:
    engine = build_engine(EngineConfig(model="smollm2", max_context_len=256))
    assert engine.report.value("compute", "weights") == "as stored, Q4_1 and Q8_0"
    assert engine.figures.keeps_quantized
    source = find_model("smollm2")
    stored = sum(path.stat().st_size for path in source.files)
    predicted = {entry.owner: entry.num_bytes for entry in engine.figures.ledger.entries(Tier.GPU)}["weights"]
    assert 0.97 * stored < predicted < stored  # the file also holds the vocabulary
    weights = [getattr(module, "weight", None) for module in load(keeps=True).modules()]
    found = {id(weight): weight for weight in weights if weight is not None}.values()
    assert sum(isinstance(weight, QuantizedMatrix) for weight in found) == 211
    assert predicted == sum(getattr(weight, "data", weight).nbytes for weight in found)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_an_explicit_dtype_dequantises(dtype: str) -> None:
    with LLM("smollm2", dtype=dtype, max_context_len=256) as llm:
        assert llm.report.value("compute", "weights") == dtype


def test_without_the_compiled_module_weights_are_dequantised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object, **_settings: object) -> None:
        raise NativeModuleError("not there")

    monkeypatch.setattr(choices, "ThreadPool", fail)
    with LLM("smollm2", max_context_len=256) as llm:
        assert llm.report.value("compute", "weights") == "fp32"


def test_dummy_weights_are_dense() -> None:
    with LLM("smollm2", load_format="dummy", max_context_len=256) as llm:
        assert llm.report.value("compute", "weights") == "fp16"
